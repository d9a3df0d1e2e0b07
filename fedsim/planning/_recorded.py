"""What a round's clients do: the messages they receive and the steps of their loops, from a trace that computes nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import partial_eval

from fedsim.algorithm import Algorithm
from fedsim.data import Batch, Batches, Cohort
from fedsim.execution import Client
from fedsim.execution._call import CallShape
from fedsim.execution._outline import outline
from fedsim.execution._state import State


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over a client's batches.

    Attributes:
      batches: how the examples are cut into batches.
      purpose: see `Client.for_each_batch`.
      jaxpr: one step, a function of ``constants``, the state and the batch.
      constants: the shapes of the values that the step reads besides its arguments.
      state: the shapes of the loop's state.
    """

    batches: Batches
    purpose: str | None
    jaxpr: Jaxpr
    constants: list[jax.ShapeDtypeStruct]
    state: Any

    def step(self, constants: list[jax.Array], state: Any, batch: Batch) -> Any:
        """Takes one step."""
        results = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, constants))(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(jax.tree.structure(self.state), results)

    def num_steps(self, cohort: Cohort, training: Batches) -> np.ndarray:
        """Returns the number of steps of each client, ``int64 [n]``; only stragglers' loops for training stop early."""
        steps = self.batches.num_steps(cohort.sizes)
        return steps if self.purpose is not None or cohort.work is None else np.minimum(steps, cohort.num_steps(training))

    @functools.cached_property
    def flops(self) -> float:
        """The number of floating-point operations of one step."""
        return flops_of(self.jaxpr)


class RecordedCall(NamedTuple):
    """A call of `Clients.aggregate` or `Clients.map` in a round.

    Attributes:
      shape: the shapes of what clients send.
      shared: the shapes of what they receive.
      downlink: compresses it; None sends it as it is.
      loops: a client's loops.
    """

    shape: CallShape
    shared: Any
    downlink: Any
    loops: tuple[Loop, ...]


def record(algorithm: Algorithm, state: State, cohort: Cohort) -> tuple[list[RecordedCall], Any]:
    """Traces a round of an algorithm with shapes instead of arrays.

    Args:
      algorithm: whose rounds run.
      state: the shapes of a server's state.
      cohort: the clients of the round.

    Returns:
      The calls of the round in order, and the shapes of ``client.memory``, () if there is none.
    """
    seen: list[tuple[Any, Any, list[Loop]]] = []
    traced: Any = copy.copy(algorithm)

    def round(state: State, clients: Any) -> tuple[State, Any]:
        return algorithm.round(state, _RecordedClients(algorithm, clients, seen))  # type: ignore[arg-type]

    object.__setattr__(traced, "round", round)
    known = outline(traced, {}, state, cohort.data)
    calls = [
        RecordedCall(shape, shared, downlink, tuple(loops))
        for shape, (shared, downlink, loops) in zip(known.calls, seen, strict=True)
    ]
    return calls, known.row[0] if known.row != () else ()


class _RecordedClients:
    """Passes calls on to the clients of a traced round, and records them."""

    def __init__(self, algorithm: Algorithm, clients: Any, seen: list[tuple[Any, Any, list[Loop]]]) -> None:
        self._algorithm, self._clients, self._seen = algorithm, clients, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def aggregate(self, work: Callable[..., Any], shared: Any, *, downlink: Any = None, **options: Any) -> Any:
        downlink = self._algorithm.downlink if downlink is None else downlink
        return self._clients.aggregate(self._recorded(work, shared, downlink), shared, downlink=downlink, **options)

    def map(self, work: Callable[..., Any], shared: Any, **options: Any) -> Any:
        return self._clients.map(self._recorded(work, shared, None), shared, **options)

    def map_rows(self, work: Callable[..., Any], shared: Any, rows: Any, **options: Any) -> Any:
        return self._clients.map_rows(self._recorded(work, shared, None), shared, rows, **options)

    def _recorded(self, work: Callable[..., Any], shared: Any, downlink: Any) -> Callable[..., Any]:
        loops: list[Loop] = []
        self._seen.append((_shapes(shared), downlink, loops))

        @functools.wraps(work)
        def recorded(*given: Any) -> Any:
            loops.clear()  # The work may be traced more than once.
            return work(*given[:-1], _RecordedClient(**vars(given[-1]), loops=loops))

        return recorded


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _RecordedClient(Client):
    """A client that records its loops."""

    loops: list[Loop]

    def for_each_batch(self, batches: Batches, step: Any, state: Any, purpose: str | None = None) -> Any:
        at = len(self.loops)

        def recorded(state: Any, batch: Batch) -> Any:
            if len(self.loops) == at:
                closed = jax.make_jaxpr(step)(state, batch)
                constants = [jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype) for x in closed.consts]
                self.loops.append(Loop(batches, purpose, closed.jaxpr, constants, _shapes(state)))
            return step(state, batch)

        return super().for_each_batch(batches, recorded, state, purpose)


def flops_of(jaxpr: Jaxpr) -> float:
    """Returns XLA's count of floating-point operations, with the body of every `jax.lax.scan` counted for all of its steps.

    XLA counts the body of a loop once. The body of a loop of unknown length is counted once here, too. What the results do not
    depend on does not count, because XLA removes it.

    >>> def steps(x): return jax.lax.scan(lambda x, _: (x @ x, None), x, length=10)[0]
    >>> 10 * 2 * 8**3 <= flops_of(jax.make_jaxpr(steps)(jnp.ones([8, 8])).jaxpr) < 10 * 2 * 8**3 + 100
    True
    """
    needed = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return _counted_once(needed) + _in_further_steps(needed)


def _counted_once(jaxpr: Jaxpr) -> float:
    def run(constants: list[Any], inputs: list[Any]) -> Any:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*inputs)

    variables: list[list[Any]] = [jaxpr.constvars, jaxpr.invars]
    shapes = ([jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in of] for of in variables)
    costs: Any = jax.jit(run).lower(*shapes).cost_analysis()
    return float((costs or {}).get("flops", 0.0))


def _in_further_steps(jaxpr: Jaxpr) -> float:
    """Returns the operations that XLA leaves out: those of every loop of known length after its first step."""
    total = 0.0
    for equation in jaxpr.eqns:
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            total += repeats * _in_further_steps(inner)
            if repeats > 1:
                total += (repeats - 1) * _counted_once(inner)
    return total


def _shapes(values: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype), jax.tree.map(jnp.asarray, values))
