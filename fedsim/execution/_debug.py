"""`Debug`: rounds in plain Python, for breakpoints, prints, and errors that name the method and the client."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.data import Batch, Batches, ClientRows, Cohort, FederatedData
from fedsim.execution import _memory, _placement
from fedsim.execution._device_round import put_rows, rows_of
from fedsim.execution._execution import Execution, Jit, check_cohorts
from fedsim.execution._layout import Layout, plan_round
from fedsim.execution._traced_rounds import traced_rounds
from fedsim.primitives import without_mesh_of_context
from fedsim.rounds import (
    Call,
    Client,
    ClientPlan,
    Clients,
    ClientTable,
    ClientUpdate,
    FederatedAlgorithm,
    FederatedState,
    RoundInfo,
    RoundPlan,
    RunLoop,
    State,
    Step,
    batch_loop,
    finished,
    parts_of,
)

T = TypeVar("T")
C = TypeVar("C", bound="_PythonClients")

_EMPTY_CLIENT = "a client without examples, in an empty cohort"


class StageError(RuntimeError):
    """An error inside an algorithm's method. It names the method, the client and the shapes of the arguments.

    >>> import fedsim
    >>> class Failing(fedsim.algorithms.Histogram):
    ...     def client_update(self, shared, client): raise KeyError("z")
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(3, np.float32)}, sizes=[2, 1])
    >>> algorithm = Failing(execution=fedsim.Debug())
    >>> algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["1"]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedsim.execution._debug.StageError: KeyError in client_update of client '1': 'z'...
    """


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
        before = clients.before
        server, info = _stage("round", "the server", clients.run_round, before.server)
        after = finished(algorithm, before.server, before.average, clients, server, info)
        if not isinstance(state, FederatedState):
            return after.server, info
        table = _memory.written_back(kept, clients.table, plan, len(cohort)) if isinstance(kept, ClientRows) else clients.table
        return after._replace(clients=table), info


def _begun(
    algorithm: FederatedAlgorithm, state: State, cohort: Cohort, kind: Callable[..., C]
) -> tuple[State, Any, RoundPlan, C]:
    """Returns the state without clients' memories, these memories, the plan of the round, and its clients, of a ``kind``."""
    check_cohorts(algorithm, [cohort])
    plan, mesh, first_memories = plan_round(cohort, Layout(cohort.slots, 1), algorithm.batches), Jit().mesh(), {}
    if algorithm.has_memory:
        traced, _ = traced_rounds(algorithm, state, cohort.data)
        state, first_memories = _memory.remembered(algorithm, state, cohort.data), traced.trace().first_memories
    table = kept = parts_of(state).clients
    if kept != ():
        state = state._replace(clients=())
    if isinstance(kept, ClientRows):
        table, plan = _memory.gathered(kept, plan, len(cohort), mesh)
    state, table = _placement.replicate((state, table), mesh)
    of_clients = jax.tree.map(jnp.asarray, plan.of_clients())
    return state, kept, plan, kind(cohort, parts_of(state), table, first_memories, algorithm, of_clients, rng.typed(cohort.key))


class _PythonClients(Clients):
    """Clients that run one after another in Python, each with the columns of its own examples."""

    def __init__(
        self, cohort: Cohort, before: FederatedState, table: Any, first_memories: Any, algorithm: FederatedAlgorithm,
        plan: RoundPlan, key: jax.Array,
    ) -> None:  # fmt: skip
        super().__init__(algorithm, plan, key, cohort.attack)
        self.cohort, self.before, self.table, self.first_memories = cohort, before, table, first_memories
        self.past, self.parts = before.past, before.parts
        self.new_statistics = self._statistics

    def _downlink_memory(self, name: str, downlink: Any, shared: Any) -> Any:
        return self.before.downlink.get(name, ())

    def _keep_sent(self, received: Any) -> None:
        assert self.algorithm.staleness is not None
        self.past = self.algorithm.staleness.kept(self.past, received, self.plan.round)

    def _aggregate(self, call: Call, work: Callable[..., Any]) -> Any:
        slots, accumulator, entries, update = self.cohort.slots, None, None, None
        assert call.fold is not None
        for slot, own, name, columns, stored in self._clients(call):
            of_client = functools.partial(self.update_of, call, self._staged(call, work))
            kept = functools.partial(self._kept, call, stored)
            done = _stage(call.work_name, name, of_client, own, columns, kept)
            arrived, of_info, memory, aggregator_memory, update = done
            if accumulator is None:
                _stage("aggregator.check", "the server", call.fold.check, arrived, slots)
                shapes = jax.eval_shape(functools.partial(call.fold.zero, slots=slots), arrived)
                _placement.must_fit(call.fold, shapes, slots, Jit().mesh())
                accumulator = _stage("aggregator.zero", name, call.fold.zero, arrived, slots)
            added = accumulator, arrived, of_info["weight"], slot
            accumulator = _stage("aggregator.accumulate", name, call.fold.accumulate, *added)
            self._keep(call, slot, own.keeps(of_info["weight"]), stored, memory, aggregator_memory)
            entries = self._put(call, own, entries, of_info)
        entries = entries if len(self.cohort) else jax.tree.map(jnp.zeros_like, entries)
        memory = self.before.aggregator.get(call.name, ())
        return self._conclude(call, update, accumulator, memory, entries)  # type: ignore[arg-type]

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        entries = None
        for _, own, name, columns, stored in self._clients(call):
            row = None if call.rows is None else jax.tree.map(lambda x, own=own: x[own.position], call.rows)
            of_client = functools.partial(self.result_of, call, self._staged(call, work), row=row)
            result = _stage(call.work_name, name, of_client, own, columns, functools.partial(self._kept, call, stored))
            entries = self._put(call, own, entries, result)
        return entries if len(self.cohort) else jax.tree.map(jnp.zeros_like, entries)

    def _clients(self, call: Call) -> Iterator[tuple[jax.Array, ClientPlan, str, Any, Any]]:
        """Yields each client's slot, what is known of it, its name in errors, its columns, and its row of the table.

        In an empty cohort, a client without examples determines the shapes of updates and infos. It does not count.
        """
        clients: list[Any] = list(enumerate(self.cohort.client_ids))
        for at, client_id in clients or [(0, None)]:
            name = _EMPTY_CLIENT if client_id is None else f"client {client_id!r}"
            has_rows = client_id is not None and self.cohort.sizes[at] > 0
            rows = self.cohort.client(at).examples if has_rows else self._no_rows()
            columns = {feature: jnp.asarray(np.asarray(column)) for feature, column in rows.items()}
            # The client's columns are only its own.
            own = jax.tree.map(lambda x, at=at: x[at], call.clients)._replace(start=jnp.int32(0))
            stored: Any = ()
            if isinstance(self.table, ClientTable):
                stored = jax.tree.map(lambda x: x[0], rows_of(self.table, own.memory[None]))
            self.loop = _loop_of(call.work_name, name)
            yield jnp.int32(at), own, name, columns, stored

    def _put(self, call: Call, own: ClientPlan, entries: Any, new: Any) -> Any:
        """Writes the entries of a client among those of all clients, which are None before the first one."""
        place = own.slot if call.rows is None else own.position
        if entries is None:
            entries = jax.tree.map(lambda x: jnp.zeros((call.num_entries, *x.shape), x.dtype), new)
        return jax.tree.map(lambda rows, x: rows.at[place].set(x), entries, new)

    def _kept(self, call: Call, stored: Any, name: str, start: Any) -> Any:
        if name == "server memory":
            return self.before.aggregator.get(call.name, start)
        if not isinstance(stored, ClientTable) or not stored.seen:
            return start
        memory, by_call = stored.rows
        return memory if name == "memory" else by_call.get(call.name, start)

    def _staged(self, call: Call, work: Callable[..., T]) -> Callable[..., T]:
        def staged(*given: Any) -> T:
            return _stage(call.work_name, self._name_of(given[-1]), work, *given)

        return staged

    def _name_of(self, client: Client) -> str:
        return f"client {self.cohort.data.client_ids[int(client.position)]!r}" if len(self.cohort) else _EMPTY_CLIENT

    def _no_rows(self) -> dict[str, np.ndarray]:
        return {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in self.cohort.data.columns.items()}

    def _keep(self, call: Call, slot: jax.Array, counts: jax.Array, stored: Any, memory: Any, aggregator_memory: Any) -> None:
        if isinstance(self.table, ClientTable) and counts:
            others = stored.rows[1] if stored.seen else {name: self.first_memories[name] for name in stored.rows[1]}
            by_call = {name: aggregator_memory if name == call.name else kept for name, kept in others.items()}
            rows = jax.tree.map(lambda x: jnp.asarray(x)[None], ClientTable((memory, by_call), jnp.bool_(True)))
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

    Args:
      algorithm: whose round it is.
      state: a state before a round.
      data: the population.

    Raises:
      ValueError: a round has no such call.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> call_of_updates(algorithm, algorithm.init(jax.random.key(0)), data)
    'update'
    """
    program = traced_rounds(algorithm, state, data)[0].trace()
    names = [call.name for call in program.calls if call.aggregator is not None]
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

    Returns:
      What the client received and returned, what arrived of it, its entries of the info, and its number of steps.

    Raises:
      StageError: the algorithm raises an error.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> cohort = fedsim.Cohort.of(data, ["1", "0"])
    >>> done = run_client(algorithm, algorithm.init(jax.random.key(0)), cohort, slot=0, call="update")
    >>> done.result.update.tolist(), done.num_steps  # the counts of client "1", whose number is 0.7
    ([0.0, 0.0, 1.0, 0.0], 1)
    """
    _, _, _, clients = _begun(algorithm, state, cohort, functools.partial(_OneClient, slot, call))
    with contextlib.suppress(_ClientFinishedError):
        clients.run_round(clients.before.server)
    return clients.done


class _ClientFinishedError(Exception):
    """Ends a round of which only one client's update is of interest."""


class _OneClient(_PythonClients):
    """Clients of which only the one in a slot runs in the last call, after which the round ends."""

    done: ClientRound

    def __init__(self, slot: int, last: str, *args: Any) -> None:
        super().__init__(*args)
        self._slot, self._last = slot, last

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> Any:
        if call.name != self._last:
            return super()._aggregate(call, work)
        recorded: Any = None

        def recording(shared: Any, client: Client) -> ClientUpdate:
            nonlocal recorded
            recorded = shared, (result := work(shared, client)), int(client.num_steps)
            return result

        _, own, name, columns, stored = next(client for client in self._clients(call) if int(client[0]) == self._slot)
        of_client = functools.partial(self.update_of, call, self._staged(call, recording))
        kept = functools.partial(self._kept, call, stored)
        received, entries, *_ = _stage(call.work_name, name, of_client, own, columns, kept)
        shared, result, num_steps = recorded
        self.done = ClientRound(shared, result, received, entries, num_steps)
        raise _ClientFinishedError


def _loop_of(work_name: str, client: str) -> RunLoop:
    """Returns a Python loop whose errors name the step and the client."""

    def loop(
        batches: Batches,
        purpose: str | None,
        num_steps: jax.Array,
        batch_at: Callable[[jax.Array], Batch],
        step: Step,
        state: T,
    ) -> T:
        if isinstance(num_steps, jax.core.Tracer):  # for example inside jax.lax.cond
            return batch_loop()(batches, purpose, num_steps, batch_at, step, state)
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
