"""`DeployedSteps`: server steps whose updates nodes send, when a synchronization model says."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.configuration import prepared
from fedsim.data import Cohort
from fedsim.deployment._deployed import Deployed
from fedsim.deployment._encoding import decode, encode
from fedsim.deployment._node import leaves_of
from fedsim.deployment._nodes import NodeError
from fedsim.deployment._real_server import Outcome, RealServer
from fedsim.deployment._record import Record, replace_bytes
from fedsim.execution import DividedRound, Update, check_cohorts, cut_rows, remembered, rounded_slots
from fedsim.rounds import FederatedAlgorithm, RoundInfo, State, check_scales, server_state
from fedsim.samplers import Sampler
from fedsim.saved_arrays import checkpoint_rounds
from fedsim.systems import (
    Dispatch,
    Policy,
    Schedule,
    ScheduledSampler,
    ServerSteps,
    Synchronization,
    Synchronous,
    Timeline,
    Totals,
    Updates,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeployedSteps(Deployed):
    """Runs server steps: a synchronization model decides which clients start, and which updates the server aggregates.

    It is the model that runs on a virtual clock, too. The algorithm needs ``Staleness(bound=0)``: the server keeps no older
    models, because clients have received them. Nodes send single updates. In the sum of a server step, these have the order
    of a simulated round on one device.

    Attributes:
      nodes, folder, name: as in `Deployed`. Each line of ``deliveries.jsonl`` has the updates of a server step, and what was
        lost since the last one, see `fedsim.systems.Deliveries`.
      sampler: selects the clients.
      synchronization: the model.
      policy: how long the server waits for a client.
      clock: returns the seconds since any moment.

    Raises:
      NodeError: no node is left, or a node reports an error.
      ValueError: the model does not fit the algorithm or the sampler, or the run cannot go on.

    One node in this process, and a server that aggregates every update that arrives:

    >>> import tempfile, fedsim
    >>> from fedsim.deployment import Node, Nodes, Received
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> sampler, folder = fedsim.UniformSampler(data, clients=2, seed=0), Path(tempfile.mkdtemp())
    >>> class Near(Nodes):
    ...     count, replies = 1, []
    ...     def send(self, number, blobs):
    ...         self.replies.append(Received(f"{len(self.replies)}", number, node.answer(blobs)))
    ...         return self.replies[-1].message
    ...     def receive(self):
    ...         return [self.replies.pop(0)]
    >>> execution = DeployedSteps(
    ...     nodes=Near(), folder=folder, sampler=sampler,
    ...     synchronization=fedsim.systems.Buffered(size=1, concurrency=1, staleness_weight="constant"))
    >>> algorithm = fedsim.algorithms.Histogram(bins=2, staleness=fedsim.Staleness(bound=0), execution=execution)
    >>> node = Node(algorithm, sampler, 0, 1, folder / "node")
    >>> state = algorithm.with_memory(algorithm.init(jax.random.key(0)), data)
    >>> state, info = algorithm.apply(state, sampler.cohort(0))
    >>> state.counts.tolist(), execution.took_part([])[0].client_ids
    ([0, 0, 1, 0], ['1'])
    """

    sampler: Sampler
    synchronization: Synchronization
    policy: Policy = dataclasses.field(default_factory=Policy)
    clock: Callable[[], float] = dataclasses.field(default=time.monotonic, repr=False)
    # What changes during the run: the server and its messages, and the cohorts of the last rounds.
    _steps: list[_Steps] = dataclasses.field(default_factory=list, init=False, repr=False)
    _cohorts: list[Cohort] = dataclasses.field(default_factory=list, init=False, repr=False)

    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        infos = []
        taken: list[Cohort] = []
        for cohort in cohorts:
            state, info = self.run_one(algorithm, state, cohort)
            infos.append(info)
            taken += self._cohorts
        self._cohorts[:] = taken
        return state, jax.tree.map(lambda *rows: jnp.stack(rows), *infos)

    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, [cohort])
        state = remembered(algorithm, state, cohort.data)
        if not self._steps or self._steps[0].version != cohort.round:
            self._steps[:] = [_Steps(self, algorithm, state, cohort)]
        state, info, taken = self._steps[0].run(state)
        self._cohorts[:] = [taken]
        return state, info

    def took_part(self, cohorts: Sequence[Cohort]) -> Sequence[Cohort]:
        return list(self._cohorts)


class _Steps:
    """The server of a run, from some server step on, and its messages.

    Attributes:
      version: the number of the next server step.
    """

    def __init__(self, execution: DeployedSteps, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> None:
        self._own, self._algorithm, self._data, self._key = execution, algorithm, cohort.data, cohort.key
        self._nodes, self._folder = execution.nodes, execution.folder
        self.version = cohort.round
        self._rounds: dict[int, DividedRound] = {}
        self._record = Record(self._folder, self.version, type(execution.synchronization).__name__, self._nodes.first)
        self._node_of = np.zeros(self._data.num_clients, np.int64)
        for node, clients in enumerate(self._nodes.slots_of(np.arange(self._data.num_clients))):
            self._node_of[clients] = node
        self._messages: dict[str, list[Dispatch]] = {}  # without a reply
        self._updates: dict[int, Update] = {}  # by the number of the dispatch
        self._received: dict[int, Any] = {}  # what clients have received, by version, if updates are mixed into the model
        self._lost: list[dict[str, Any]] = []
        round = self._round(state, 1)
        ready = prepared(algorithm, execution.sampler, execution.synchronization)  # type: ignore[arg-type]
        self._server = RealServer(
            execution.sampler, ready.steps, execution.policy, outcomes=self._outcomes, reachable=self._reachable,
            clock=execution.clock, bytes_down=ready.bytes_down, bytes_up=ready.bytes_up, once=round.memory_shapes != (),
        )  # fmt: skip
        self._model = execution.synchronization
        self._model.check(clients=self._data.num_clients, cohort=cohort.slots, fastest=0.0)
        self._check(round)
        self._states = self._folder / "server"
        if self.version and (path := self._states / f"{self.version}").exists():
            self._restore(path, round)
        elif self.version:
            raise ValueError(
                f"Expected the server's state after round {self.version} in {self._states}, got none: the run has been "
                "deployed without a synchronization model, or this file is lost. Start a new run in another folder."
            )
        else:
            self._model.begin(self._server)

    def run(self, state: State) -> tuple[State, RoundInfo, Cohort]:
        """Computes the next server step, when the synchronization model has decided it."""
        self._send(state)
        while not self._server.taken:
            self._server.next_event(self._model)
            self._send(state)
        taken = self._server.taken.popleft()
        cohort = ScheduledSampler(self._own.sampler, taken, start=self.version).cohort(self.version)
        measures = {name: value for name, value in cohort.measures.items() if name != "simulated_seconds"}
        cohort = dataclasses.replace(cohort, measures={"elapsed_seconds": float(taken.steps.time[0]), **measures})
        state, info = self._step(state, cohort, taken)
        self.version += 1
        self._save()
        return state, info, cohort

    def _round(self, state: State, clients: int) -> DividedRound:
        slots = min(rounded_slots(clients), self._data.num_clients)
        if slots not in self._rounds:
            made = DividedRound(self._algorithm, server_state(state), self._data, slots=slots, key=rng.typed(self._key).dtype)
            self._rounds[slots] = made
        return self._rounds[slots]

    def _check(self, round: DividedRound) -> None:
        """Raises ``ValueError`` if the messages of clients depend on what the server has when it aggregates them."""
        name = type(self._own.synchronization).__name__
        is_synchronous = isinstance(self._own.synchronization, Synchronous) and self._own.policy.late == "drop"
        if jax.tree.leaves(round.operand_shapes.server_memory) and not is_synchronous:
            aggregator = type(self._algorithm.aggregator).__name__
            raise ValueError(
                f"{name} cannot be deployed with {aggregator}, because what clients send depends "
                "on what the server keeps for it when it aggregates: use Synchronous(), another aggregator, or simulate it "
                "(fedsim run)."
            )

    # What goes to nodes.

    def _send(self, state: State) -> None:
        """Sends the clients that start from this version to their nodes, in one message for each node."""
        chosen = [dispatch for dispatch in self._server.outbox if dispatch.version == self.version]
        self._server.outbox = [dispatch for dispatch in self._server.outbox if dispatch.version != self.version]
        while chosen:  # A client occurs once in a cohort.
            first = {dispatch.client: dispatch for dispatch in reversed(chosen)}
            self._send_to_nodes(state, list(first.values()))
            chosen = [dispatch for dispatch in chosen if first[dispatch.client] is not dispatch]

    def _send_to_nodes(self, state: State, dispatches: list[Dispatch]) -> None:
        cohort = self._starting(dispatches)
        round = self._round(state, len(dispatches))
        sent = round.begin(state, cohort)
        if self._algorithm.staleness is not None and self._algorithm.staleness.mixing:
            self._received[self.version] = jax.device_get(sent.received)
        shared, of_clients = leaves_of(sent.operands)
        blob = encode(shared, {})
        for node in range(self._nodes.count):
            slots = np.flatnonzero(self._node_of[cohort.clients] == node)
            if not len(slots):
                continue
            own = [leaf[slots] for leaf in of_clients] + ([] if cohort.work is None else [cohort.work[slots]])
            numbers = [dispatches[slot].number for slot in slots]
            facts = {
                "run": self._own.name, "each": numbers, "round": self.version, "slots": round.slots,
                "has_work": cohort.work is not None,
                "first": None if self._nodes.first is None else self._nodes.first[node],
                **self._record.rows(cohort.clients[slots], checkpoint_rounds(self._folder / "checkpoints")),
            }  # fmt: skip
            blobs = {"shared": blob, "clients": encode(own, facts)}
            self._record.bytes_down += sum(map(len, blobs.values()))
            self._messages[self._nodes.send(node, blobs)] = [dispatches[slot] for slot in slots]

    def _starting(self, dispatches: Sequence[Dispatch]) -> Cohort:
        """Returns the cohort of clients that start now, as one of a server step that aggregates their updates at once."""
        numbers, clients, rounds = zip(*((each.number, each.client, each.round) for each in dispatches), strict=True)
        zeros, ones = np.zeros(len(numbers), np.int64), np.ones(len(numbers))
        now = zeros + self.version
        chosen = np.array(numbers), np.array(clients), np.array(rounds)
        updates = Updates(now, *chosen, now, zeros, weight=ones, scale=ones, start=ones, stop=ones)
        step = ServerSteps(*[np.zeros(1, np.int64)] * len(ServerSteps._fields))._replace(updates=np.array([len(numbers)]))
        return ScheduledSampler(self._own.sampler, _schedule(updates, step), start=self.version).cohort(self.version)

    # What comes from nodes.

    def _outcomes(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for message, node, reply, why in self._nodes.receive():
            dispatches = self._messages.pop(message, [])
            if reply is None:
                self._lost += [{"number": each.number, "client": each.client, "node": node, "why": why} for each in dispatches]
                if dispatches:
                    warnings.warn(
                        f"Node {node} did not answer, because {why}: the updates of its {len(dispatches)} clients are lost.",
                        stacklevel=2,
                    )
                outcomes += [Outcome(each.number, False) for each in dispatches]
                continue
            leaves, facts = decode(reply)
            self._record.bytes_up += len(reply)
            if "error" in facts:
                raise NodeError(f"Node {node}: {facts['error']}")
            round = next(iter(self._rounds.values()))
            size = len(leaves) // max(1, len(dispatches))
            for at, dispatch in enumerate(dispatches):
                self._updates[dispatch.number] = round.update_of(leaves[at * size : (at + 1) * size])
                outcomes.append(Outcome(dispatch.number, True))
        return outcomes

    def _reachable(self) -> np.ndarray:
        there = np.array([self._nodes.is_there(node) for node in range(self._nodes.count)])
        return there[self._node_of]

    # The server step.

    def _step(self, state: State, cohort: Cohort, taken: Schedule) -> tuple[State, RoundInfo]:
        check_scales(self._algorithm, taken.updates.weight, taken.updates.scale)
        round, numbers = self._round(state, len(cohort)), taken.updates.number.tolist()
        sent = round.begin(state, cohort)
        updates = [self._updates[number] for number in numbers]
        started = [self._received.get(int(version)) for version in taken.updates.version]
        started = [sent.received if each is None else each for each in started]
        after, info = round.end_each(state, cohort, sent, updates, started)
        counts = np.asarray(info.clients["weight"])[: len(numbers)] != 0
        self._record.write(taken, counts.tolist(), self._lost)
        self._lost = []
        self._forget()
        return after, info._replace(clients=cut_rows(info.clients, cohort.slots))

    def _forget(self) -> None:
        """Deletes what no later server step needs: updates that are not in the buffer or on their way there, and models."""
        server = self._server
        needed = {update.number for update in server.buffer} | {*server.in_flight, *server._given_up}
        needed |= {int(number) for part in server.taken for number in part.updates.number}
        self._updates = {number: update for number, update in self._updates.items() if number in needed}
        versions = {dispatch.version for dispatch in [*server.buffer, *server.in_flight.values(), *server._given_up.values()]}
        versions |= {int(version) for part in server.taken for version in part.updates.version}
        self._received = {version: sent for version, sent in self._received.items() if version in versions}

    # The state of the server, which a later process goes on with.

    def _save(self) -> None:
        """Stores the server's state before the next step, and deletes those that no checkpoint needs."""
        saved = checkpoint_rounds(self._folder / "checkpoints")
        numbers, versions = list(self._updates), list(self._received)
        arrays = [*jax.tree.leaves([tuple(self._updates[number]) for number in numbers])]
        arrays += jax.tree.leaves([self._received[version] for version in versions])
        taken = [[[column.tolist() for column in part] for part in (step.updates, step.steps)] for step in self._server.taken]
        facts = {"server": self._server.state(), "numbers": numbers, "versions": versions, "taken": taken, "lost": self._lost}
        self._states.mkdir(exist_ok=True)
        replace_bytes(self._states / f"{self.version}", encode(arrays, facts))
        for path in self._states.iterdir():
            if path.name.isdecimal() and int(path.name) not in saved and int(path.name) < max(saved, default=0):
                path.unlink()

    def _restore(self, path: Path, round: DividedRound) -> None:
        arrays, facts = decode(path.read_bytes())
        size = len(jax.tree.leaves((round.call.arrived, round.call.entries)))
        for at, number in enumerate(facts["numbers"]):
            self._updates[number] = round.update_of(arrays[at * size : (at + 1) * size])
        rest = arrays[size * len(facts["numbers"]) :]
        if facts["versions"]:
            has_statistics = round.call.statistics != ()
            like = jax.tree.structure((round.call.shared, round.call.statistics) if has_statistics else round.call.shared)
            count = len(rest) // len(facts["versions"])
            for at, version in enumerate(facts["versions"]):
                self._received[version] = jax.tree.unflatten(like, rest[at * count : (at + 1) * count])
        self._lost = facts["lost"]
        self._server.restore(facts["server"], at_hand=facts["numbers"])
        for updates, steps in facts["taken"]:
            part = _schedule(Updates(*map(np.array, updates)), ServerSteps(*map(np.array, steps)))
            self._server.taken.append(part)


def _schedule(updates: Updates, steps: ServerSteps) -> Schedule:
    nothing = Timeline(*[np.zeros(0)] * len(Timeline._fields))
    return Schedule(updates, steps, nothing, Totals(*[0] * len(Totals._fields)), 0.0)
