"""`DividedRound`: a round whose server and whose clients run in different processes, each with its own part of the program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedsim import rng
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import _placement
from fedsim.execution._compile import compiled
from fedsim.execution._device_round import CompileOptions, DeviceRound
from fedsim.execution._execution import Jit, cut_rows
from fedsim.execution._layout import Layout, num_steps, plan_round, rounded_slots, windows
from fedsim.execution._traced_rounds import traced_rounds
from fedsim.rounds import (
    ClientTable,
    FederatedAlgorithm,
    FederatedState,
    Operands,
    RoundInfo,
    RoundPlan,
    Staleness,
    State,
    TraceOptions,
    Values,
    arrived_at_server,
    parts_of,
)


class Sent(NamedTuple):
    """What the server has computed when a round reaches its call of the clients.

    Attributes:
      operands: of the call, `fedsim.rounds.Operands`: what all clients get, and what is known of each, ``[slots, ...]``.
      live: values that the rest of the round reads.
      plan: the plan of the round.
      received: what clients receive, if the algorithm has ``Staleness(bound=0, mixing=True)``; else ().
    """

    operands: Operands
    live: Any
    plan: RoundPlan
    received: Any = ()


class Answer(NamedTuple):
    """What a process that has run some clients of a round returns.

    Attributes:
      accumulator: the aggregator's accumulator with the updates of these clients.
      entries: what each of them adds to the round's info, leaves ``[n, ...]``.
    """

    accumulator: Any
    entries: Any


class Update(NamedTuple):
    """What one client of a round sends, before the server multiplies it by its staleness weight.

    Attributes:
      arrived: the update as it arrives.
      entries: what the client adds to the round's info.

    >>> Update(arrived=np.zeros(3), entries={"weight": np.float32(2)}).entries["weight"].item()
    2.0
    """

    arrived: Any
    entries: Any


class DividedRound:
    """A round as two parts: the server's, and that of clients which are in another process.

    Both processes trace the same round, and exchange only arrays: the operands of the call of the clients, and for each
    process the accumulator with the updates of its clients, and their entries. Accumulators are merged in the order of the
    processes' numbers.

    If the algorithm has ``Staleness(bound=0)``, the updates may also come one by one, from clients that started in earlier
    rounds: `run_each` returns them in the process of the clients, and `end_each` aggregates them.

    Args:
      algorithm: with a round of a single ``clients.aggregate``.
      state: a state of the shapes that rounds have, of arrays or ``jax.ShapeDtypeStruct``.
      data: the population, or of a process with clients, the examples of these.
      slots: the largest number of clients of a round.
      key: the dtype of the root key.

    Raises:
      ValueError: a round has another number of calls, or a call that returns no aggregate.

    One process runs both clients here:

    >>> import fedsim
    >>> data = FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> state, cohort = algorithm.init(jax.random.key(0)), Cohort.of(data, ["0", "1"])
    >>> round = DividedRound(algorithm, state, data, slots=2, key=cohort.key.dtype)
    >>> sent = round.begin(state, cohort)
    >>> answer, _ = round.run_clients(sent.operands, cohort)
    >>> after, info = round.end(state, cohort, sent, {0: answer}, [np.array([0, 1])])
    >>> after.counts.tolist(), info.num_aggregated.item()
    ([0, 1, 2, 0], 2)
    """

    def __init__(self, algorithm: FederatedAlgorithm, state: State, data: FederatedData, *, slots: int, key: Any) -> None:
        execution = getattr(algorithm, "execution", None)
        self._execution = execution if isinstance(execution, Jit) else Jit()
        self._mesh, self.slots, rows = Jit.mesh(self._execution), rounded_slots(slots), max(1, data.num_examples)
        options = TraceOptions(slots=self.slots, rows=rows, key=key)
        self._traced, self._numbers = traced_rounds(algorithm, state, data, options)
        self._program, self._batches = self._traced.trace(options), algorithm.batches
        calls = self._program.calls
        if len(calls) != 1 or calls[0].aggregator is None:
            raise ValueError(
                f"Expected a round with a single clients.aggregate, got {type(algorithm).__name__} with the calls "
                f"{', '.join(call.name for call in calls) or 'none'}: its server and its clients cannot run in different "
                "processes. Run it in one process, or use another algorithm."
            )
        self.call = calls[0]
        cohort = Cohort(data, np.zeros(0, np.int32), 0, rng.root(0), slots=min(slots, data.num_clients))
        layout = self._execution._layout(self._traced, cohort, self._mesh)
        self._layout: Layout = dataclasses.replace(layout, slots=self.slots, devices=1, block=None)
        self._options = CompileOptions(
            self._mesh, self._layout, True, False, None, self._execution.deterministic, rows, key
        )  # fmt: skip
        of_server, of_clients = functools.partial(self._compiled, None), self._compiled
        self._begin, self._end, self._merge = of_server(self._to_call), of_server(self._to_end), of_server(self._merged)
        self._empty, self._add = of_server(self._zero), of_server(self._added)
        self._staleness: Staleness | None = algorithm.staleness
        self._start, self._fold = of_clients(None, self._to_clients), of_clients(5, self._window)
        self._client = of_clients(None, self._of_client)

    def _compiled(self, donated: int | None, function: Any) -> Any:
        return compiled(function, self._mesh, (P(), P()), donated, self._execution.deterministic)

    @property
    def operand_shapes(self) -> Operands:
        """The shapes and dtypes of the operands of the call."""
        return self._program.operand_shapes(0)

    @property
    def answer_shapes(self) -> Answer:
        """The shapes and dtypes of an answer, whose entries are those of one client."""
        assert self.call.zero is not None
        return Answer(self.call.zero.shapes, self.call.entries)

    def answer_of(self, leaves: Sequence[Any]) -> Answer:
        """Returns the answer with these leaves, in the order of `jax.tree.leaves`."""
        return Answer(*jax.tree.unflatten(jax.tree.structure(tuple(self.answer_shapes)), leaves))

    @property
    def memory_shapes(self) -> Any:
        """The shapes and dtypes of what one client keeps, () if clients keep nothing."""
        return self._program.first.clients

    # The server.

    def begin(self, state: State, cohort: Cohort) -> Sent:
        """Runs the server up to the call of the clients."""
        self._traced.check(cohort, self._options)
        plan = self._plan(cohort)
        operands, live, received = self._begin(*self._arguments(state, cohort, plan))
        return Sent(operands, live, plan, received)

    def end(
        self, state: State, cohort: Cohort, sent: Sent, answers: dict[int, Answer], slots_of: Sequence[np.ndarray]
    ) -> tuple[State, Any]:
        """Runs the server from the call of the clients to the end of the round.

        Clients whose process has not answered take no step, so their updates do not count.

        Args:
          state: that before the round, whose ``clients`` stay as they are: their memories are in the other processes.
          cohort: of the round.
          sent: what `begin` has returned.
          answers: the answers, by the numbers of the processes.
          slots_of: for each process, the slots of its clients in the cohort, ``int [n]``.

        Returns:
          The state and the info after the round.
        """
        took = np.zeros(self.slots, bool)
        for number in answers:
            took[slots_of[number]] = True
        plan = sent.plan._replace(most_steps=np.where(took, sent.plan.most_steps, 0).astype(np.int32))
        accumulator: Any = None
        rows = jax.tree.map(lambda x: np.zeros((self.slots, *x.shape), x.dtype), self.call.entries)
        if not answers:
            accumulator = self._empty(sent.operands.zero)
        for number in sorted(answers):
            own, entries = answers[number]
            accumulator = own if accumulator is None else self._merge(sent.operands.merge, accumulator, own)
            for all_rows, new in zip(jax.tree.leaves(rows), jax.tree.leaves(entries), strict=True):
                all_rows[slots_of[number]] = new
        return self._ended(state, cohort, sent._replace(plan=plan), accumulator, rows)

    def end_each(
        self, state: State, cohort: Cohort, sent: Sent, updates: Sequence[Update], started: Sequence[Any]
    ) -> tuple[State, Any]:
        """Runs the server from the call of the clients to the end of the round, with an update of each client.

        The order of the sum is that of a simulated round on one device, which runs one client at a time.

        Args:
          state, sent: as in `end`.
          cohort: of the round, with ``arrivals``.
          updates: those of its clients, in its order.
          started: what each of them has received; read only if the algorithm's staleness has ``mixing``.

        Returns:
          The state and the info after the round.
        """
        assert self._staleness is not None and cohort.arrivals is not None
        weights, scales = cohort.arrivals.weights, cohort.arrivals.scales
        accumulator = self._empty(sent.operands.zero)
        rows = jax.tree.map(lambda x: np.zeros((self.slots, *x.shape), x.dtype), self.call.entries)
        plan = plan_round(cohort, self._layout, self._batches, self._program.loops)
        for slot in plan.queue[0][: len(cohort)]:
            factors = np.float32(weights[slot]), np.float32(scales[slot])
            versions = (sent.received, started[slot]) if self._staleness.mixing else ((), ())
            accumulator, weight = self._add(
                sent.operands, accumulator, tuple(updates[slot]), *factors, np.int32(slot), *versions
            )
            own = {**updates[slot].entries, "weight": weight}
            for all_rows, new in zip(jax.tree.leaves(rows), jax.tree.leaves(own), strict=True):
                all_rows[slot] = new
        return self._ended(state, cohort, sent, accumulator, rows)

    def _ended(self, state: State, cohort: Cohort, sent: Sent, accumulator: Any, rows: Any) -> tuple[State, Any]:
        after, info = self._end(*self._arguments(state, cohort, sent.plan), sent.live, accumulator, rows)
        kept = after._replace(clients=state.clients) if isinstance(state, FederatedState) else after.server
        if isinstance(info, RoundInfo):
            info = info._replace(clients=cut_rows(info.clients, cohort.slots))
        return kept, info

    # The clients.

    def run_clients(self, operands: Operands, cohort: Cohort, memories: ClientRows | None = None) -> tuple[Answer, Any]:
        """Runs clients of a round.

        Args:
          operands: of the call, whose ``clients`` are those of the cohort, leaves ``[n, ...]``, in its order.
          cohort: these clients, of the examples that are in this process.
          memories: what they keep, by the positions in the cohort's population; None if clients keep nothing.

        Returns:
          The answer; and the memories after the round.
        """
        count, data = len(cohort), cohort.data
        plan = plan_round(cohort, self._layout, self._batches, self._program.loops)
        slots, clients = np.asarray(operands.clients.slot)[:count], self._own_clients(operands, plan, count)
        table: Any = ()
        if memories is not None:
            table = jax.tree.map(jnp.asarray, ClientTable(*memories.gather(cohort.clients.astype(np.int64), self.slots)))
        plan = jax.tree.map(jnp.asarray, plan._replace(memory=clients.memory))
        columns = _placement.resident_columns(data, self._mesh)
        given = operands._replace(clients=clients), columns, plan, table
        carry = self._start(*given)
        steps = num_steps(cohort.sizes, self._batches, self.call.batches)
        for window in windows(jax.tree.map(np.asarray, plan), self._layout, np.pad(steps, (0, self.slots - count))):
            carry = self._fold(*given, window, carry)
        accumulator, entries, table = carry
        entries = jax.tree.map(lambda x: np.asarray(x)[slots], entries)
        if memories is not None:
            rows, seen = jax.device_get(tuple(table))
            memories = memories.written(cohort.clients.astype(np.int64), rows, seen[:count])
        return Answer(accumulator, entries), memories

    def run_each(self, operands: Operands, cohort: Cohort, rows: Any, seen: np.ndarray) -> tuple[list[Update], Any, np.ndarray]:
        """Runs clients one after another, and returns the update of each.

        Args:
          operands, cohort: as in `run_clients`.
          rows: what the clients keep, leaves ``[n, ...]``; () if clients keep nothing.
          seen: ``bool [n]``, which of them have kept something before.

        Returns:
          The updates; what the clients keep if their updates count, leaves ``[n, ...]``; and which of them then keep something.
        """
        plan = plan_round(cohort, self._layout, self._batches, self._program.loops)
        clients, columns = self._own_clients(operands, plan, len(cohort)), _placement.resident_columns(cohort.data, self._mesh)
        updates, kept = [], []
        nobody: Any = ()
        shared = operands._replace(clients=nobody)
        for at in range(len(cohort)):
            stored: Any = () if rows == () else ClientTable(jax.tree.map(lambda x, at=at: x[at], rows), seen[at])
            arrived, entries, new = self._client(shared, jax.tree.map(lambda x, at=at: x[at], clients), columns, stored)
            updates.append(Update(*jax.device_get((arrived, entries))))
            kept.append(jax.device_get(tuple(new)))
        if rows == ():
            return updates, (), seen
        rows, seen = jax.tree.map(lambda *x: np.stack(x), *kept)
        return updates, rows, seen

    def update_of(self, leaves: Sequence[Any]) -> Update:
        """Returns the update with these leaves, in the order of `jax.tree.leaves`."""
        return Update(*jax.tree.unflatten(jax.tree.structure((self.call.arrived, self.call.entries)), leaves))

    def _own_clients(self, operands: Operands, plan: RoundPlan, count: int) -> Any:
        """Returns what is known of each client, leaves ``[slots, ...]``, with the places of its examples and memory here."""
        at = np.arange(self.slots)
        memory = np.where(at < count, at, self.slots).astype(np.int32)
        clients = jax.tree.map(functools.partial(_padded, self.slots), operands.clients)
        own = {"start": plan.start, "size": plan.size, "memory": memory}
        return clients._replace(**jax.tree.map(jnp.asarray, own))

    # What is compiled.

    def _plan(self, cohort: Cohort) -> RoundPlan:
        plan = plan_round(cohort, self._layout, self._batches, self._program.loops)
        return jax.tree.map(np.asarray, plan.of_clients())

    def _arguments(self, state: State, cohort: Cohort, plan: RoundPlan) -> tuple[Any, ...]:
        state = state._replace(clients=()) if isinstance(state, FederatedState) else state
        return self._numbers, jax.tree.map(jnp.asarray, state), rng.typed(cohort.key), plan

    def _to_call(self, *arguments: Any) -> tuple[Operands, Any, Any]:
        values = self._started(*arguments)
        self._program.advance(0, values)
        received = self._program.sent(values) if self._staleness == Staleness(bound=0, mixing=True) else ()
        return self._program.operands(0, values), self._program.live_values(0, values), received

    def _to_end(self, *arguments: Any) -> tuple[FederatedState, Any]:
        *given, live, accumulator, entries = arguments
        values = self._started(*given)
        self._program.restore(0, values, live)
        self._program.put(0, values, (accumulator, entries))
        self._program.advance(1, values)
        return self._program.results(values)

    def _started(self, numbers: Any, state: State, key: jax.Array, plan: RoundPlan) -> Values:
        return self._program.start(numbers, parts_of(state), key, plan)

    def _zero(self, operands: Any) -> Any:
        assert self.call.zero is not None
        return self.call.zero(operands, {})

    def _added(
        self, operands: Operands, accumulator: Any, update: Any, factor: Any, scale: Any, slot: Any, current: Any, started: Any
    ) -> tuple[Any, Any]:
        assert self.call.accumulate is not None and self._staleness is not None
        sent, entries = update
        if has_statistics := self.call.statistics != ():
            current, started = (received and received[0] for received in (current, started))
        weight, arrived = arrived_at_server(
            self._staleness, sent, entries["weight"], factor, scale, current, started, has_statistics=has_statistics
        )
        return self.call.accumulate(operands.accumulate, {}, accumulator, arrived, weight, slot), weight

    def _of_client(self, operands: Operands, own: Any, columns: Any, stored: Any) -> Any:
        shared = operands.work, operands.server_memory
        return self.call.run(shared, (own, columns, (), stored), self._program.first_memories)

    def _merged(self, operands: Any, accumulator: Any, other: Any) -> Any:
        assert self.call.merge is not None
        return self.call.merge(operands, {}, accumulator, other)

    def _to_clients(self, operands: Operands, columns: Any, plan: RoundPlan, table: Any) -> Any:
        return self._on_device(columns, plan, table).start(self.call, operands)

    def _window(self, operands: Operands, columns: Any, plan: RoundPlan, table: Any, window: Any, carry: Any) -> Any:
        return self._on_device(columns, plan, table).run_groups(self.call, operands, carry, window)

    def _on_device(self, columns: Any, plan: RoundPlan, table: Any) -> DeviceRound:
        return DeviceRound(self._options, self._program, plan, columns, table)


def _padded(slots: int, rows: Any) -> Any:
    """Returns rows ``[slots, ...]``, the first of which are the given ones, and the others copies of the last one."""
    if is_key := jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        kind, rows = jax.random.key_impl(rows), jax.random.key_data(rows)
    rows = np.asarray(rows)
    rows = jnp.asarray(rows[np.minimum(np.arange(slots), len(rows) - 1)])
    return jax.random.wrap_key_data(rows, impl=kind) if is_key else rows
