"""The server of a simulation, as synchronization models see it."""

from __future__ import annotations

import array
import copy
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort
from fedsim.systems._dispatch import Clients, Dispatch, Policy, Spans
from fedsim.systems._faults import TimeSpan

OUTCOMES = ("aggregated", "late", "lost", "dropped")

# After so many clients of the cohorts that are busy or offline, it is worth looking at the whole population.
_FEW_SKIPPED = 50
# After so many, the server asks again when the next client becomes available.
_MOST_SKIPPED = 2_000
_MOST_EMPTY_COHORTS = 10_000


class Updates(NamedTuple):
    """The aggregated updates, in the order of their aggregation; every field has one entry per update.

    Attributes:
      step: ``int32``, the server step that aggregated it, from 0. Its result is version ``step + 1``.
      number: ``int64``, the number of the dispatch.
      client: ``int32``, position in the population.
      round: ``int32``, the round of the sampler; (round, client) determines the keys of the client's training.
      version: ``int32``, the version of the model that the client started from.
      staleness: ``int32``, ``step - version``: the server steps since then, before this one.
      weight, scale: ``float64``; the server step's update is the sum of weight * scale * update over the sum of weight, where
        the weights are multiplied by those of the algorithm.
      start: ``float64``, when the server sent the model, in seconds.
      stop: ``float64``, when the update arrived.
    """

    step: np.ndarray
    number: np.ndarray
    client: np.ndarray
    round: np.ndarray
    version: np.ndarray
    staleness: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class ServerSteps(NamedTuple):
    """The server steps; every field has one entry per step.

    Attributes:
      time: ``float64``, in seconds.
      updates: ``int32``, the number of updates that were aggregated.
    """

    time: np.ndarray
    updates: np.ndarray


class Timeline(NamedTuple):
    """The dispatches whose outcome is known, in the order in which it became known; every field has one entry per dispatch.

    Attributes:
      client: ``int32``, position in the population.
      start, stop: ``float64``, from the dispatch until the update arrived or was lost, in seconds.
      version: ``int32``, the version of the model that the client started from.
      outcome: ``int8``, an index of `OUTCOMES`: aggregated, late, lost or dropped.
    """

    client: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    version: np.ndarray
    outcome: np.ndarray


_NUMBERS = ("now", "version", "dispatched", "idle_events", "_sequence", "_wake", "_round", "_position")
# The type codes of Python's arrays, which grow without an object per entry: int8, int32, int64 and float64.
_CODES: dict[type, str] = {Updates: "iqiiiidddd", ServerSteps: "di", Timeline: "iddib"}


class Server:
    """The server of a simulation: what it knows, and what a synchronization model can let it do.

    Attributes:
      now: the time in seconds.
      version: the number of server steps so far.
      buffer: the updates that were received and not yet aggregated or dropped, in the order of their arrival.
      in_flight: the dispatches for whose updates the server waits, by number.
      waiting: one entry for each dispatch for which no client is available yet: the round that the model gave, or None.
      memory: what the synchronization model keeps, by name; JSON can represent it.
      policy: what is done when there is no answer.
    """

    def __init__(self, sampler: Sampler, clients: Clients, steps: np.ndarray, policy: Policy, down: Sequence[TimeSpan]) -> None:
        self._sampler, self._clients, self._steps, self.policy, self._down = sampler, clients, steps, policy, Spans(down)
        self._rows = _empty_rows()
        self.now, self.version, self.dispatched, self.idle_events = self._down.end(0.0), 0, 0, 0
        self.buffer: list[Dispatch] = []
        self.in_flight: dict[int, Dispatch] = {}
        self.given_up: dict[int, Dispatch] = {}
        self.waiting: list[int | None] = []
        self.memory: dict[str, Any] = {}
        self.counts = dict.fromkeys(
            (*OUTCOMES, "downloads", "uploads", "messages_lost", "messages_doubled", "steps", "steps_wasted"), 0
        )
        self.events: list[tuple[float, int, str, Any]] = []
        self._sequence, self._wake = 0, math.inf
        self._busy_until: dict[int, float] = {}
        self._first = self._cohort = checked_cohort(sampler, 0)
        self._cohort_steps = np.zeros(0, np.int64)
        self._round, self._position = -1, len(self._cohort)

    @property
    def expected(self) -> int:
        """The number of updates for which the server waits, including those of clients that are not available yet."""
        return len(self.in_flight) + len(self.waiting)

    def dispatch(self, count: int = 1, round: int | None = None) -> None:
        """Sends the current model to the next available clients of the sampler's cohorts.

        Clients that are busy or offline are passed over. If too few clients are available, the others follow, with the model
        that is then current, as soon as a client is available.

        Args:
          count: the number of clients.
          round: the round that determines the keys of the training; None: that of the cohort.
        """
        self.waiting.extend([round] * count)
        self.fill()

    def dispatch_cohort(self, round: int | None = None) -> int:
        """Begins the sampler's next cohort that is not empty, dispatches as many clients as it has, and returns how many."""
        self._begin_cohort()
        count = len(self._cohort)
        self.dispatch(count, round)
        return count

    def dispatch_to(self, client: int, round: int) -> None:
        """Sends the current model to a given client, which receives it as soon as it is online and has ended earlier work."""
        self._send(client, round, int(self._steps[client]))

    def aggregate(
        self,
        updates: Sequence[Dispatch] | None = None,
        weights: Sequence[float] | None = None,
        scales: Sequence[float] | None = None,
    ) -> None:
        """Takes a server step: aggregates updates of the buffer, which increases the version by one.

        Args:
          updates: the updates; None: all of the buffer.
          weights, scales: one number per update; None: 1. The server step's update is the sum of weight * scale * update over
            the sum of weight.

        Raises:
          ValueError: there are no updates; an update is not in the buffer; there is not one number per update.
        """
        chosen = list(self.buffer if updates is None else updates)
        if not chosen:
            raise ValueError("aggregate got no updates: a server step needs at least one; wait for one to be received.")
        self._take(chosen)
        ones = [1.0] * len(chosen)
        weights, scales = ones if weights is None else weights, ones if scales is None else scales
        for update, weight, scale in zip(chosen, weights, scales, strict=True):
            self._record(
                Updates, self.version, update.number, update.client, update.round, update.version,
                self.version - update.version, weight, scale, update.start, update.stop,
            )  # fmt: skip
            self.settle(update, "aggregated")
        self._record(ServerSteps, self.now, len(chosen))
        self.version += 1
        self.idle_events = 0

    def staleness(self, updates: Sequence[Dispatch] | None = None) -> np.ndarray:
        """Returns the server steps since the dispatch of each update, ``int64 [n]``; None: of all updates in the buffer."""
        return self.version - np.array([update.version for update in (self.buffer if updates is None else updates)], np.int64)

    def drop(self, update: Dispatch) -> None:
        """Removes an update from the buffer without using it."""
        self._take([update])
        self.settle(update, "dropped")
        self.idle_events += 1

    def give_up(self) -> None:
        """Stops waiting for all updates: those that are in flight will be late, and no more clients are looked for."""
        self.given_up |= self.in_flight
        self.in_flight.clear()
        self.waiting.clear()

    def call_at(self, time: float, name: str) -> None:
        """Lets the synchronization model's ``timer(server, name)`` be called at a time, or when the server is up again."""
        self._push(time, "timer", name)

    def settle(self, dispatch: Dispatch, outcome: str) -> None:
        """Counts a dispatch whose outcome is known."""
        counts = self.counts
        counts[outcome] += 1
        counts["downloads"] += dispatch.downloads
        counts["uploads"] += dispatch.uploads
        counts["messages_lost"] += dispatch.lost
        counts["messages_doubled"] += dispatch.doubled
        counts["steps"] += dispatch.steps
        counts["steps_wasted"] += dispatch.steps * (outcome != "aggregated")
        self._record(Timeline, dispatch.client, dispatch.start, dispatch.stop, dispatch.version, OUTCOMES.index(outcome))
        if self._busy_until.get(dispatch.client, math.inf) <= self.now:
            del self._busy_until[dispatch.client]

    def next_event(self) -> tuple[str, Any]:
        """Advances the time to the next event, and returns its kind and the number of the dispatch or the name of the timer."""
        self.now, _, kind, payload = heapq.heappop(self.events)
        if kind == "wake":
            self._wake = math.inf
        return kind, payload

    def clients_gone(self) -> int:
        """Returns the number of clients that have failed or gone offline for good."""
        return sum(math.isinf(until) for until in self._busy_until.values())

    def fill(self) -> None:
        """Dispatches the clients that are waited for, as far as clients are available."""
        while self.waiting:
            found = self._next_available()
            if found is None:
                self._wake_later()
                return
            client, round, steps = found
            given = self.waiting.pop(0)
            self._send(client, round if given is None else given, steps)

    def state(self) -> dict[str, Any]:
        """Returns the server's state without what was recorded, of numbers, strings, lists and dicts."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: [list(dispatch) for dispatch in getattr(self, name).values()] for name in ("in_flight", "given_up")},
            "buffer": [list(update) for update in self.buffer],
            "waiting": list(self.waiting),
            "events": [list(event) for event in self.events],
            "busy_until": [[client, until] for client, until in self._busy_until.items()],
            "counts": dict(self.counts),
            "memory": copy.deepcopy(self.memory),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `state`."""
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in ("in_flight", "given_up"):
            setattr(self, name, {row[0]: Dispatch(*row) for row in state[name]})
        self.buffer = [Dispatch(*row) for row in state["buffer"]]
        self.waiting = list(state["waiting"])
        self.events = [(time, sequence, kind, payload) for time, sequence, kind, payload in state["events"]]
        self._busy_until = dict(state["busy_until"])
        self.counts, self.memory = dict(state["counts"]), copy.deepcopy(state["memory"])
        if self._round >= 0:
            position = self._position
            self._load_cohort()
            self._position = position

    def take_rows(self) -> tuple[Updates, ServerSteps, Timeline]:
        """Returns what was recorded since the last call."""
        updates, steps, timeline = ([np.array(column) for column in columns] for columns in self._rows.values())
        self._rows = _empty_rows()
        return Updates(*updates), ServerSteps(*steps), Timeline(*timeline)

    def _record(self, kind: type, *values: float) -> None:
        for column, value in zip(self._rows[kind], values, strict=True):
            column.append(value)

    def _take(self, updates: Sequence[Dispatch]) -> None:
        numbers = {update.number for update in updates}
        left = [update for update in self.buffer if update.number not in numbers]
        if len(left) + len(updates) != len(self.buffer):
            raise ValueError("Expected different updates that are in server.buffer: each can be aggregated or dropped once.")
        self.buffer[:] = left

    def _push(self, time: float, kind: str, payload: Any) -> None:
        # While the server is down, nothing happens on it.
        heapq.heappush(self.events, (max(self.now, self._down.end(time)), self._sequence, kind, payload))
        self._sequence += 1

    def _send(self, client: int, round: int, steps: int) -> None:
        number = self.dispatched
        self.dispatched += 1
        start = max(self.now, self._busy_until.get(client, self.now))
        if math.isinf(start):  # A client that has failed for good does not answer.
            dispatch = Dispatch(number, client, round, self.version, self.now, self.now, start, False, 0, 1, 0, 1, 0, math.inf)
        else:
            dispatch = self._clients.dispatch(number, client, round, self.version, start, steps)
        self._busy_until[client] = dispatch.free
        self.in_flight[number] = dispatch
        timeout, outcome = self.policy.timeout, "arrival" if dispatch.arrives else "loss"
        noticed = dispatch.stop if timeout is None else self.now + timeout
        if dispatch.stop > noticed:
            self._push(noticed, "timeout", number)
        # Without an answer, the server knows of a loss only when the time is over.
        self._push(dispatch.stop if dispatch.arrives else max(dispatch.stop, noticed), outcome, number)
        if dispatch.copy < math.inf:
            self._push(dispatch.copy, "arrival", number)

    def _available(self, client: int) -> bool:
        return self._busy_until.get(client, self.now) <= self.now and self._clients.devices.online(client, self.now)

    def _next_available(self) -> tuple[int, int, int] | None:
        """Returns the next available client of the sampler's cohorts, its round and its steps; None if none is found."""
        for skipped in range(_MOST_SKIPPED):
            if skipped == _FEW_SKIPPED and not self._clients.devices.anyone_available(self._ready(), self.now):
                return None
            if self._position >= len(self._cohort):
                self._begin_cohort()
            position = self._position
            self._position += 1
            if self._available(client := int(self._cohort.clients[position])):
                return client, self._round, int(self._cohort_steps[position])
        return None

    def _begin_cohort(self) -> None:
        for _ in range(_MOST_EMPTY_COHORTS):
            self._round += 1
            self._load_cohort()
            if len(self._cohort):
                return
        raise ValueError(
            f"The sampler {type(self._sampler).__name__} gave {_MOST_EMPTY_COHORTS} cohorts without clients: give a sampler "
            "that selects clients."
        )

    def _load_cohort(self) -> None:
        self._cohort = checked_cohort(self._sampler, self._round, self._first)
        self._cohort_steps = self._cohort.partial_steps(self._steps[self._cohort.clients])
        self._position = 0

    def _wake_later(self) -> None:
        """Looks for clients again when the next one comes online or is free."""
        time = self._clients.devices.next_available(self._ready(), self.now)
        if time < self._wake:
            self._wake = time
            self._push(time, "wake", None)

    def _ready(self) -> np.ndarray:
        """Returns when each client has ended its work, ``float64 [population]``; infinity if it has failed for good."""
        ready = np.full(len(self._steps), self.now)
        ready[list(self._busy_until)] = list(self._busy_until.values())
        return ready


def _empty_rows() -> dict[type, list[array.array[Any]]]:
    return {kind: [array.array(code) for code in codes] for kind, codes in _CODES.items()}
