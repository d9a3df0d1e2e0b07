"""`Debug`: rounds in plain Python, for breakpoints, prints, and errors that name the method and the client."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.data import Batch, Batches, ClientRows, Cohort
from fedsim.execution import _memory, _placement
from fedsim.execution._call import Call, CallShape
from fedsim.execution._client import Client, Loop, Step, batch_loop
from fedsim.execution._clients import Clients, Work
from fedsim.execution._device_clients import put_rows, rows_of
from fedsim.execution._execution import Execution, Jit, check_cohorts
from fedsim.execution._plan import Layout, plan_round
from fedsim.execution._programs import finished, programs_for
from fedsim.execution._state import ClientTable, FederatedAlgorithm, RoundInfo, State, parts_of, server_state

T = TypeVar("T")

_EMPTY_CLIENT = "a client without examples, in an empty cohort"


class StageError(RuntimeError):
    """An error inside an algorithm's method. It names the method, the client and the shapes of the arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Debug(Execution):
    """Runs rounds without compilation: methods get concrete arrays, for one client and one batch after another.

    An error is raised as a `StageError` with the original error as its cause. If an algorithm has a memory, a round is traced
    once beforehand to determine the shapes of the memory.

    >>> Debug()
    Debug()
    """

    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, cohorts)
        infos = []
        for cohort in cohorts:
            state, info = self.run_one(algorithm, state, cohort)
            infos.append(info)
        return state, jax.tree.map(lambda *rows: jnp.stack(rows), *infos)

    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, [cohort])
        plan, mesh, shapes = plan_round(cohort, Layout(cohort.slots, 1), algorithm.batches), Jit().mesh(), {}
        if algorithm.has_memory:
            state = _memory.remembered(algorithm, state, cohort.data)
            shapes = programs_for(algorithm, server_state(state), cohort.data)[0].outline.shapes
        table = kept = parts_of(state).clients
        if kept != ():
            state = state._replace(clients=())
        if isinstance(kept, ClientRows):
            table, plan = _memory.gathered(kept, plan, len(cohort), mesh)
        state, table = _placement.replicate((state, table), mesh)
        clients = _PythonClients(
            cohort,
            algorithm,
            jax.tree.map(jnp.asarray, plan),
            cohort.key,
            parts_of(state),
            {},
            table,
            dict(shapes),
            cohort.attack,
        )
        server, info = _stage("round", "the server", algorithm.round, parts_of(state).server, clients)
        state, table = finished(algorithm, state, clients, server, info), clients.table
        if isinstance(kept, ClientRows):
            table = _memory.written_back(kept, table, plan, len(cohort))
        return (state._replace(clients=table) if kept != () else state), info


class _PythonClients(Clients):
    """Clients that run one after another in Python, each with the columns of its own examples."""

    def __init__(self, cohort: Cohort, *args: Any) -> None:
        super().__init__(*args)
        self.cohort = cohort

    def _aggregate(self, call: Call, work: Callable[..., Any]) -> Any:
        return super()._aggregate(call, self._staged(call, work))

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        return super()._map(call, self._staged(call, work))

    def _staged(self, call: Call, work: Callable[..., T]) -> Callable[..., T]:
        def staged(shared: Any, client: Client) -> T:
            return _stage(call.work_name, self._name_of(client), work, shared, client)

        return staged

    def _name_of(self, client: Client) -> str:
        return f"client {self.cohort.data.client_ids[int(client.position)]!r}" if len(self.cohort) else _EMPTY_CLIENT

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        slots, accumulator, entries = self.cohort.slots, None, None
        clients: list[Any] = list(enumerate(self.cohort.client_ids))
        # In an empty cohort, a client without examples determines the shapes of updates and infos. It does not count.
        for at, client_id in clients or [(0, None)]:
            name, slot = _EMPTY_CLIENT if client_id is None else f"client {client_id!r}", jnp.int32(at)
            has_rows = client_id is not None and self.cohort.sizes[at] > 0
            rows = self.cohort.data.client(int(self.cohort.clients[at])).examples if has_rows else self._no_rows()
            columns = {feature: jnp.asarray(np.asarray(column)) for feature, column in rows.items()}
            # The client's columns are only its own.
            client = jax.tree.map(lambda x, at=at: x[at], call.clients)._replace(start=jnp.int32(0))
            self.loop = _loop_of(call.work_name, name)
            stored = rows_of(self.table, client.memory[None]) if isinstance(self.table, ClientTable) else ()
            row = self._row(call, jax.tree.map(lambda x: x[0], stored))
            received = call
            if self.algorithm.staleness is not None:
                started = self._started(client.staleness[None])
                received = call._replace(shared=jax.tree.map(lambda x: x[0], started))
            arrived, own, row = _stage(call.work_name, name, functools.partial(work, received), client, columns, row)
            if entries is None:
                entries = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), own)
                self.shapes.setdefault(call.name, CallShape(call.name, arrived, arrived, own, call.aggregator, (), 0))
            if call.fold is not None:
                if accumulator is None:
                    _stage("aggregator.check", "the server", call.fold.check, arrived, slots)
                    shapes = jax.eval_shape(functools.partial(call.fold.zero, slots=slots), arrived)
                    _placement.must_fit(call.fold, shapes, slots, Jit().mesh())
                    accumulator = _stage("aggregator.zero", name, call.fold.zero, arrived, slots)
                accumulator = _stage(
                    "aggregator.accumulate", name, call.fold.accumulate, accumulator, arrived, own["weight"], slot
                )
                self._keep(slot, own["weight"] != 0, row)
            entries = jax.tree.map(lambda rows, new, slot=slot: rows.at[slot].set(new), entries, own)
        return accumulator, entries if clients else jax.tree.map(jnp.zeros_like, entries)

    def _no_rows(self) -> dict[str, np.ndarray]:
        return {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in self.cohort.data.columns.items()}

    def _keep(self, slot: jax.Array, counts: jax.Array, row: Any) -> None:
        if isinstance(self.table, ClientTable) and counts:
            rows = jax.tree.map(lambda x: x[None], ClientTable(row, jnp.bool_(True)))
            self.table = put_rows(self.table, self.plan.memory[slot][None], rows)


def _loop_of(work_name: str, client: str) -> Loop:
    """Returns a Python loop whose errors name the step and the client."""

    def loop(batches: Batches, num_steps: jax.Array, batch_at: Callable[[jax.Array], Batch], step: Step, state: T) -> T:
        if isinstance(num_steps, jax.core.Tracer):  # for example inside jax.lax.cond
            return batch_loop()(batches, num_steps, batch_at, step, state)
        for t in range(int(num_steps)):
            state = _stage(f"step {t} of {work_name}", client, step, state, batch_at(jnp.int32(t)))
        return state

    return loop


def _stage(stage: str, owner: str, function: Callable[..., T], *args: Any) -> T:
    try:
        return function(*args)
    except StageError:
        raise
    except Exception as error:
        got = "\n".join(f"  argument {i}: {_shapes(arg)}" for i, arg in enumerate(args))
        raise StageError(f"{type(error).__name__} in {stage} of {owner}: {error}\nThe arguments were:\n{got}") from error


def _shapes(value: Any) -> str:
    if isinstance(value, Client):
        value = {"num_examples": value.num_examples, "num_steps": value.num_steps, "memory": value.memory}
    leaves = jax.tree_util.tree_leaves_with_path(value)
    shown = [
        f"{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', []))}"
        for path, leaf in leaves[:12]
    ]
    return ", ".join(shown) + (f", and {len(leaves) - 12} more" if len(leaves) > 12 else "")
