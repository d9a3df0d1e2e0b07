"""`Debug`: rounds in plain Python, for breakpoints, prints, and errors that name the method and the client."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.data import Batch, Batches, ClientRows, Cohort, FederatedData
from fedsim.execution import _memory, _placement
from fedsim.execution._call import Call, CallShape
from fedsim.execution._client import Client, ClientPlan, ClientUpdate, Loop, Step, batch_loop
from fedsim.execution._clients import Clients, Work
from fedsim.execution._device_clients import put_rows, rows_of
from fedsim.execution._execution import Execution, Jit, check_cohorts
from fedsim.execution._plan import Layout, RoundPlan, plan_round
from fedsim.execution._programs import finished, programs_for
from fedsim.execution._state import ClientTable, FederatedAlgorithm, RoundInfo, State, parts_of, server_state
from fedsim.primitives._placement import without_mesh_of_context

T = TypeVar("T")
C = TypeVar("C", bound="_PythonClients")

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

    @without_mesh_of_context()
    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, cohorts)
        infos = []
        for cohort in cohorts:
            state, info = self.run_one(algorithm, state, cohort)
            infos.append(info)
        return state, jax.tree.map(lambda *rows: jnp.stack(rows), *infos)

    @without_mesh_of_context()
    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        state, kept, plan, clients = _begun(algorithm, state, cohort, _PythonClients)
        server, info = _stage("round", "the server", algorithm.round, parts_of(state).server, clients)
        table: Any = clients.table
        state = finished(algorithm, state, clients, server, info)
        if isinstance(kept, ClientRows):
            table = _memory.written_back(kept, table, plan, len(cohort))
        return (state._replace(clients=table) if kept != () else state), info


def _begun(
    algorithm: FederatedAlgorithm, state: State, cohort: Cohort, kind: Callable[..., C]
) -> tuple[State, Any, RoundPlan, C]:
    """Returns the state without clients' memories, these memories, the plan of the round, and its clients, of a ``kind``."""
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
    clients = kind(
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
    return state, kept, plan, clients


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
        def staged(*given: Any) -> T:
            return _stage(call.work_name, self._name_of(given[-1]), work, *given)

        return staged

    def _name_of(self, client: Client) -> str:
        return f"client {self.cohort.data.client_ids[int(client.position)]!r}" if len(self.cohort) else _EMPTY_CLIENT

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        slots, accumulator, entries = self.cohort.slots, None, None
        clients: list[Any] = list(enumerate(self.cohort.client_ids))
        # In an empty cohort, a client without examples determines the shapes of updates and infos. It does not count.
        for at, client_id in clients or [(0, None)]:
            name, slot = _EMPTY_CLIENT if client_id is None else f"client {client_id!r}", jnp.int32(at)
            arrived, own, row = self._run_client(call, work, at, name, client_id is not None and self.cohort.sizes[at] > 0)
            if entries is None:
                entries = jax.tree.map(lambda x: jnp.zeros((call.num_entries, *x.shape), x.dtype), own)
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
            place = call.places(jax.tree.map(lambda x, at=at: x[at], call.clients))
            entries = jax.tree.map(lambda rows, new, place=place: rows.at[place].set(new), entries, own)
        return accumulator, entries if clients else jax.tree.map(jnp.zeros_like, entries)

    def _run_client(self, call: Call, work: Work, at: int, name: str, has_rows: bool) -> tuple[Any, dict[str, Any], Any]:
        """Runs the client in a slot, which the messages of errors call ``name``."""
        rows = self.cohort.data.client(int(self.cohort.clients[at])).examples if has_rows else self._no_rows()
        columns = {feature: jnp.asarray(np.asarray(column)) for feature, column in rows.items()}
        # The client's columns are only its own.
        client = jax.tree.map(lambda x: x[at], call.clients)._replace(start=jnp.int32(0))
        self.loop = _loop_of(call.work_name, name)
        stored = rows_of(self.table, client.memory[None]) if isinstance(self.table, ClientTable) else ()
        row = self._row(call, jax.tree.map(lambda x: x[0], stored))
        received = call
        if self.algorithm.staleness is not None:
            started = self._started(client.staleness[None])
            received = call._replace(shared=jax.tree.map(lambda x: x[0], started))
        return _stage(call.work_name, name, functools.partial(work, received), client, columns, row)

    def _no_rows(self) -> dict[str, np.ndarray]:
        return {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in self.cohort.data.columns.items()}

    def _keep(self, slot: jax.Array, counts: jax.Array, row: Any) -> None:
        if isinstance(self.table, ClientTable) and counts:
            rows = jax.tree.map(lambda x: x[None], ClientTable(row, jnp.bool_(True)))
            self.table = put_rows(self.table, self.plan.memory[slot][None], rows)


class ClientRound(NamedTuple):
    """One client's round, as `run_client` has run it.

    Attributes:
      shared: what the client received when it started.
      result: what its work returned.
      received: its update as the server takes it: compressed, scaled, and zeros if it does not count.
      entries: what the client adds to the round's info, by name, arrays without an axis of clients.
      num_steps: of its training loops.
    """

    shared: Any
    result: ClientUpdate
    received: Any
    entries: dict[str, Any]
    num_steps: int


def call_of_updates(algorithm: FederatedAlgorithm, state: State, data: FederatedData) -> str:
    """Returns the name of the last call of ``clients.aggregate`` in a round, after tracing the round if it is not known.

    Raises:
      ValueError: a round has no such call.
    """
    outline = programs_for(algorithm, server_state(state), data)[0].outline
    names = [call.name for call in outline.calls if call.aggregator is not None]
    if not names:
        raise ValueError(f"The round of {type(algorithm).__name__} has no clients.aggregate, so its clients send no updates.")
    return names[-1]


def run_client(algorithm: FederatedAlgorithm, state: State, cohort: Cohort, slot: int, call: str) -> ClientRound:
    """Runs one client's round alone, in plain Python.

    If the algorithm's round calls its clients more than once, the earlier calls run for all clients, because the last one needs
    their results.

    Args:
      algorithm: an algorithm that does not override ``apply``.
      state: the state before the round.
      cohort: all clients of the round.
      slot: the client's position in the cohort.
      call: what `call_of_updates` returns.

    Raises:
      StageError: the algorithm raises an error.
    """
    state, _, _, clients = _begun(algorithm, state, cohort, functools.partial(_OneClient, slot, call))
    with contextlib.suppress(_ClientFinishedError):
        algorithm.round(parts_of(state).server, clients)
    return clients.done


class _ClientFinishedError(Exception):
    """Ends a round of which only one client's update is of interest."""


class _OneClient(_PythonClients):
    """Clients of which only the one in a slot runs in the last call, after which the round ends."""

    done: ClientRound

    def __init__(self, slot: int, last: str, *args: Any) -> None:
        super().__init__(*args)
        self._slot, self._last = slot, last

    def _update(self, work: Callable[..., ClientUpdate], call: Call, own: ClientPlan, columns: Any, row: Any) -> Any:
        def recorded(shared: Any, client: Client) -> ClientUpdate:
            self._recorded = shared, (result := work(shared, client)), int(client.num_steps)
            return result

        return super()._update(recorded, call, own, columns, row)

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        if call.name != self._last:
            return super()._run(call, work)
        name = f"client {self.cohort.client_ids[self._slot]!r}"
        received, entries, _ = self._run_client(call, work, self._slot, name, bool(self.cohort.sizes[self._slot] > 0))
        shared, result, num_steps = self._recorded
        self.done = ClientRound(shared, result, received, entries, num_steps)
        raise _ClientFinishedError


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
