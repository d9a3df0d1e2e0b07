"""`trace_round`: traces a round to a `RoundProgram`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from fedsim import rng, tree
from fedsim.attacks import Attack
from fedsim.data import Batch, Batches
from fedsim.model import ModelParts
from fedsim.rounds._call import Call, compressed_floats
from fedsim.rounds._client import ClientPlan, ClientUpdate, Step, batch_loop
from fedsim.rounds._clients import Clients
from fedsim.rounds._numbers import Numbers, with_numbers
from fedsim.rounds._plan import RoundPlan
from fedsim.rounds._round_program import Loop, Operands, RoundProgram, TracedCall, TracedFunction, ask_for, call_p
from fedsim.rounds._state import (
    Average,
    FederatedAlgorithm,
    FederatedState,
    RoundInfo,
    Shared,
    State,
    new_average,
)


class TraceOptions(NamedTuple):
    """What a trace depends on besides the algorithm, its numbers, the state and the columns of the data.

    Attributes:
      slots: the largest number of clients.
      rows: the number of rows of the columns that a client reads.
      attack: the attack on the cohorts.
      most_examples: the most examples of a client, which reverse-mode derivatives need; else None.
      axis: the name and the size of the axis of devices that run the round together; None for a single device.
      rows_mesh: the devices that the rows of `Clients.map_rows` are divided over; None if they are on every device.
      key: the dtype of the root key; None for that of `fedsim.rng.root`.
      batch_sharding: how the rows of a client's batches are divided over devices; None leaves them whole.
      whole: where an array is whole on all devices of a client; None if each client has one device.
      lockstep: whether all devices take as many steps as the one that takes most, and keep their state after their own.

    Rounds with equal options share one trace, for example cohorts of 8 and of 10 clients:

    >>> from fedsim.execution import rounded_slots
    >>> TraceOptions(slots=rounded_slots(8), rows=1797) == TraceOptions(slots=rounded_slots(10), rows=1797)
    True
    """

    slots: int
    rows: int
    attack: Attack | None = None
    most_examples: int | None = None
    axis: tuple[str, int] | None = None
    rows_mesh: Mesh | None = None
    key: Any = None
    batch_sharding: NamedSharding | None = None
    whole: NamedSharding | None = None
    lockstep: bool = False


class _TracedClients(Clients):
    """Traces the work of a client in each call.

    Args:
      algorithm, plan, key: see `Clients`.
      columns: the shapes of the columns.
      options: see `TraceOptions`.

    Attributes:
      before: what the server keeps for aggregators and for downlinks, and what it sent in the last rounds, before this round.
      row: the shapes of what a client keeps, see `FederatedState.clients`.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, plan: RoundPlan, key: jax.Array, columns: Any, options: TraceOptions
    ) -> None:
        super().__init__(algorithm, plan, key, options.attack, options.axis and options.axis[0])
        self.columns, self.options, self.rows_mesh = columns, options, options.rows_mesh
        self.before = FederatedState((), (), {}, {})
        self._first: dict[tuple[str, str], tuple[Any, Any]] = {}  # what has a first state, and the shapes that determine it
        self._sent: Any = ()
        self._memory: Any = ()
        self._first_form: tuple[str, Any] | None = None  # of a client's memory, and the name of the call that it is of
        self._aggregator_memories: dict[str, Any] = {}
        self.loop = self._recorded_loop
        self._loops: list[Loop] = []
        parts = jax.eval_shape(algorithm.model_parts, jax.random.key(0))
        if parts != ():
            self.parts = ask_for("parts", parts)
            self.new_statistics = self._statistics

    @property
    def row(self) -> Any:
        row = self._memory, self._aggregator_memories
        return tree.shapes(row) if jax.tree.leaves(row) else ()

    def first(self) -> FederatedState:
        """Returns the state before the first round, see `RoundProgram`, with shapes of a client's row."""
        states: dict[str, dict[str, Any]] = {"aggregator": {}, "downlink": {}}
        for (kind, name), (keeper, like) in self._first.items():
            states[kind][name] = keeper.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
        past = () if self.algorithm.staleness is None else self.algorithm.staleness.first(self._sent)
        return FederatedState((), self.row, states["aggregator"], states["downlink"], (), past)

    def _downlink_memory(self, name: str, downlink: Any, shared: Shared) -> Any:
        floats = compressed_floats(shared)
        memory = jax.eval_shape(downlink.init, floats)
        if not jax.tree.leaves(memory):
            return ()
        self._first["downlink", name] = downlink, tree.shapes(floats)
        return self._kept_by_server("downlink", name, memory)

    def _kept_by_server(self, kind: str, name: str, like: Any) -> Any:
        memory = ask_for(f"{kind} {name}", like)
        getattr(self.before, kind)[name] = memory
        return memory

    def _keep_sent(self, received: Shared) -> None:
        staleness = self.algorithm.staleness
        assert staleness is not None
        self._sent = tree.shapes(received)
        past = ask_for("past", jax.eval_shape(staleness.first, self._sent))
        self.before = self.before._replace(past=past)
        self.past = staleness.kept(past, received, self.plan.round)

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> Any:
        fold, aggregator = call.fold, call.aggregator
        assert fold is not None and aggregator is not None

        update: Any = ()

        def of_client(own: ClientPlan, columns: Any) -> Any:
            nonlocal update
            *results, sent = self.update_of(call, work, own, columns, self._kept)
            update = tree.shapes(sent)
            return tuple(results)

        one = self._traced_work(of_client, call)
        arrived, entries, self._memory, aggregator_memory = one.shapes
        if jax.tree.leaves(aggregator_memory):
            self._aggregator_memories[call.name] = aggregator_memory
        slots, axis = self.options.slots, self.axis
        if fold is not aggregator:  # An attack that does not fit the aggregator has its own error.
            fold.check(arrived, slots)
        zero = TracedFunction(lambda: fold.zero(arrived, slots) if axis is None else fold.zero_devices(arrived, slots, axis))
        weight, slot = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
        accumulate = TracedFunction(fold.accumulate, zero.shapes, arrived, weight, slot)
        merge = TracedFunction(fold.merge, zero.shapes, zero.shapes)
        memory: Any = ()
        if "server memory" in one.inputs:
            like = jax.eval_shape(aggregator.init, update)
            self._first["aggregator", call.name] = aggregator, update
            memory = self._kept_by_server("aggregator", call.name, like)
        with jax.ensure_compile_time_eval():
            first_memory = aggregator.client_memory(update)
        folded, found = self._bind(call, one, memory, update, arrived, entries, first_memory, zero, accumulate, merge)
        return self._conclude(call, update, folded, memory, found)

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        row = None if call.rows is None else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), call.rows)

        def of_client(own: ClientPlan, columns: Any) -> Any:
            return self.result_of(call, work, own, columns, self._kept, None if row is None else ask_for("row", row))

        one = self._traced_work(of_client, call)
        return self._bind(call, one, (), (), (), one.shapes)[1]

    def _traced_work(self, of_client: Callable[..., Any], call: Call) -> TracedFunction:
        self._loops = []
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), call.clients)
        return TracedFunction(of_client, own, self.columns)

    def _bind(
        self, call: Call, work: TracedFunction, memory: Any, update: Any, arrived: Any, entries: Any, first_memory: Any = (),
        *fold: TracedFunction,
    ) -> tuple[Any, Any]:  # fmt: skip
        zero, accumulate, merge = fold or (None, None, None)
        consts = [() if part is None else part.consts for part in (work, zero, accumulate, merge)]
        operands, structure = jax.tree.flatten(
            Operands(call.clients, memory, call.rows if call.rows is not None else (), *consts)
        )
        traced = TracedCall(
            name=call.name,
            shared=tree.shapes(call.shared),
            statistics=tree.shapes(call.statistics),
            downlink=call.downlink,
            update=update,
            arrived=arrived,
            entries=entries,
            num_entries=call.num_entries,
            aggregator=call.aggregator,
            first_memory=first_memory,
            loops=tuple(self._loops),
            rows=None if call.rows is None else call.num_entries,
            is_divisible=call.is_divisible,
            work=work,
            zero=zero,
            accumulate=accumulate,
            merge=merge,
            operands=structure,
        )
        results = call_p.bind(*map(jnp.asarray, operands), call=traced)
        return jax.tree.unflatten(jax.tree.structure(traced.results), results)

    def _kept(self, name: str, start: Any) -> Any:
        """Returns what was kept under this name as an input of the trace, and ``start`` for a client that has kept nothing."""
        if not jax.tree.leaves(start):
            return start
        if name == "memory":  # has one form in all calls of a round, that of the first call
            self._first_form = self._first_form or (self.names[-1], tree.shapes(start))
            call, form = self._first_form
            if jax.tree.map(jnp.shape, start) != jax.tree.map(jnp.shape, form):
                raise ValueError(
                    f"client_memory returns {tree.shapes(start)} in the call {self.names[-1]!r} of a round, and {form} in "
                    f"the call {call!r}: a client's memory needs the same structure and shapes in all calls."
                )
            start = jax.tree.map(lambda x, like: jnp.asarray(x).astype(like.dtype), start, form)
        kept = ask_for(name, tree.shapes(start))
        return (
            kept if name == "server memory" else tree.select(ask_for("seen", jax.ShapeDtypeStruct((), np.bool_)), kept, start)
        )

    def _recorded_loop(
        self, batches: Batches, purpose: str | None, num_steps: jax.Array, batch_at: Callable[[jax.Array], Batch], step: Step,
        state: Any,
    ) -> Any:  # fmt: skip
        """Runs a loop in the trace of a client, and records it."""
        state = tree.strong(state)
        if self.options.batch_sharding is not None:
            batch_at = _divided_batches(batch_at, self.options.batch_sharding)
        batch = jax.eval_shape(batch_at, jnp.int32(0))
        traced, after = jax.make_jaxpr(step, return_shape=True)(state, batch)
        self._loops.append(Loop(batches, purpose, traced.jaxpr, tree.shapes(traced.consts), tree.shapes(state)))
        structure = jax.tree.structure(after)

        def run(state: Any, batch: Batch) -> Any:
            after = jax.tree.unflatten(structure, jaxpr_as_fun(traced)(*jax.tree.leaves((state, batch))))
            return tree.select(batch.step < own_steps, after, state) if self.options.lockstep else after

        own_steps = num_steps
        if self.options.lockstep:
            num_steps = jax.lax.pmax(num_steps, self.axis)
        return batch_loop(self.options.most_examples)(batches, purpose, num_steps, batch_at, run, state)


def _divided_batches(batch_at: Callable[[jax.Array], Batch], sharding: NamedSharding) -> Callable[[jax.Array], Batch]:
    """Returns the function with batches whose rows are divided over devices."""
    (axis,) = sharding.spec
    devices = sharding.mesh.shape[axis]

    def divided(step: jax.Array) -> Batch:
        batch = batch_at(step)
        if (rows := len(batch.mask)) % devices:
            raise ValueError(
                f"Expected sizes of batches that are multiples of data={devices}, the devices that each batch is divided over, "
                f"got size={rows}: choose another size or another number of devices."
            )
        examples, mask = jax.lax.with_sharding_constraint((batch.examples, batch.mask), sharding)
        return batch._replace(examples=examples, mask=mask)

    return divided


def trace_round(
    algorithm: FederatedAlgorithm, numbers: Numbers, state: State, columns: Mapping[str, Any], options: TraceOptions
) -> RoundProgram:
    """Traces a round with shapes instead of arrays, so nothing is computed.

    Args:
      algorithm: whose rounds run.
      numbers: replace the algorithm's numbers, see `fedsim.rounds.numbers_of`.
      state: a server's state, of arrays or ``jax.ShapeDtypeStruct``.
      columns: the columns of the data, ``[n, ...]``, of which only dtypes and the shapes of examples are read.
      options: see `TraceOptions`.

    Raises:
      ValueError: the round does not keep to the contract of `fedsim.Algorithm`, or it calls its clients inside a function that
        JAX transforms.

    >>> import fedsim
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> state, columns = jax.eval_shape(algorithm.init, jax.random.key(0)), {"x": np.zeros(3, np.float32)}
    >>> program = trace_round(algorithm, {}, state, columns, TraceOptions(slots=2, rows=3))
    >>> [call.name for call in program.calls], program.info_shapes.clients["weight"].shape
    (['update'], (2,))
    """
    shapes = {
        name: jax.ShapeDtypeStruct((options.rows, *c.shape[1:]), jax.dtypes.canonicalize_dtype(c.dtype))
        for name, c in columns.items()
    }
    seen: list[_TracedClients] = []

    def round(numbers: Numbers, before: State, key: jax.Array, plan: RoundPlan) -> tuple[FederatedState, Any]:
        own = with_numbers(algorithm, numbers)
        clients = _TracedClients(own, plan, key, shapes, options)
        seen.append(clients)
        average: Any = ()
        if own.averaging is not None:
            average = ask_for("average", Average(tree.shapes(before.params), jax.ShapeDtypeStruct((), np.float32)))
        server, info = clients.run_round(before)
        return finished(own, before, average, clients, server, info), info

    plan = RoundPlan.shapes(options.slots)
    axes = [options.axis] if options.axis else []
    key = jax.eval_shape(lambda: rng.root(0)) if options.key is None else jax.ShapeDtypeStruct((), options.key)
    with tree.whole_vectors(options.whole):
        jaxpr, results = jax.make_jaxpr(round, axis_env=axes, return_shape=True)(numbers, state, key, plan)
    (clients,) = seen
    names = [equation.params["call"].name for equation in jaxpr.eqns if equation.primitive is call_p]
    if names != clients.names:
        inside = next(name for name in clients.names if name not in names)
        raise ValueError(
            f"The round of {type(algorithm).__name__} has the call {inside!r} of its clients inside a function that JAX "
            "transforms, such as jax.jit or jax.lax.scan: call clients.aggregate and clients.map directly in round."
        )
    return RoundProgram(jaxpr, results, clients.algorithm.batches, clients.first())


def finished(
    algorithm: FederatedAlgorithm, before: State, average: Any, clients: Clients, server: State, info: Any
) -> FederatedState:
    """Returns the state after a round, without the clients' memories. If no update counts, or fewer than those whose sum the
    server sees, it is the state before the round, unless the aggregator acts nevertheless.

    Args:
      algorithm: whose round it is.
      before: the server's state before the round.
      average: the average of its parameters, () without one.
      clients: the clients of the round.
      server, info: what the round returned.

    Raises:
      ValueError: the round aggregated updates and returned another info than `RoundInfo`, or ``server`` has another structure
        than ``before``.

    >>> import fedsim
    >>> histogram = fedsim.algorithms.Histogram(bins=2)
    >>> clients = Clients(histogram, RoundPlan.shapes(slots=1), jax.random.key(0))
    >>> clients.before = FederatedState(server=())
    >>> info = RoundInfo({}, *jnp.zeros(5, jnp.int32))  # num_aggregated is 0
    >>> finished(histogram, {"w": jnp.float32(1)}, (), clients, {"w": jnp.float32(9)}, info).server["w"].item()
    1.0
    """
    if clients.info is not None and not isinstance(info, RoundInfo):
        raise ValueError(
            f"Expected {type(algorithm).__name__}.round to return the info of clients.aggregate, got {type(info).__name__}. "
            "Put other numbers into ClientUpdate.info or into the state."
        )
    old, new = jax.tree.structure(before), jax.tree.structure(server)
    if old != new:  # type: ignore[operator]
        raise ValueError(
            f"Expected a round of {type(algorithm).__name__} to return a server state with the structure that init returns, "
            f"{old}, got {new}: check what server_update returns."
        )
    # Sums are computed in a wider dtype than parameters in half precision.
    server = jax.tree.map(_in_dtype_of, server, before)
    parts = clients.parts
    if isinstance(parts, ModelParts):
        if parts.are_changed and not clients.returns_parts and clients.info is not None:
            raise ValueError(
                f"Expected a client of {type(algorithm).__name__} to return the parts of the model after training, got none in "
                "its ClientUpdate: train by LocalTraining.run, and give parts=local.parts of its result."
            )
        parts = parts._replace(statistics=jax.tree.map(_in_dtype_of, clients.new_statistics, parts.statistics))
    after = FederatedState(
        server,
        (),
        clients.aggregator_states,
        clients.downlink_states,
        new_average(algorithm.averaging, average, getattr(server, "params", ())),
        parts=parts,
    )
    if isinstance(info, RoundInfo) and algorithm.aggregator.innermost.skips_empty_rounds:
        kept = clients.before._replace(server=before, average=average, past=(), parts=clients.parts)
        after = tree.select(algorithm.aggregator.acts_on(info.num_aggregated), after, kept)
    return after._replace(past=clients.past)


def _in_dtype_of(new: Any, old: Any) -> Any:
    old = jnp.asarray(old)
    return jnp.asarray(new, old.dtype) if tree.is_float(old) and tree.is_float(jnp.asarray(new)) else new
