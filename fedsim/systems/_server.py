"""The server that synchronization models act on, on a virtual clock, and the base class of these models."""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.samplers import Observation, Sampler
from fedsim.systems._dispatch import Clients, Dispatch, Policy, Spans
from fedsim.systems._faults import TimeSpan
from fedsim.systems._records import OUTCOMES, Records, Schedule, Totals
from fedsim.systems._selection import Selection

# After so many clients of the cohorts that are busy or offline, it is worth looking at the whole population.
_FEW_SKIPPED = 50
# After so many, the server asks again when something else happens. If nothing will, it looks at so many per client.
_MOST_SKIPPED = 2_000
_MOST_SKIPPED_PER_CLIENT = 20
# So many losses, late updates, timers and so on, while the buffer has no more updates than before, mean that the run does not
# go on.
_MOST_IDLE_EVENTS = 10_000
# So does passing over so many clients, which takes most of the time if few are available.
_MOST_PASSED_OVER = 250_000

_NUMBERS = ("now", "version", "_dispatched", "_caused", "_idle_events", "_passed_over", "_most_buffered", "_wake")
_DISPATCHES = ("in_flight", "_given_up")


class Synchronization:
    """Base class of synchronization models: methods that are called when something happens on the server.

    A model is a frozen value: what it keeps during a run is in ``server.memory``. The methods act on the server by `dispatch`,
    `aggregate` and the other methods of `Server`.

    >>> class OneByOne(Synchronization):  # The next client starts when the last one has answered.
    ...     def begin(self, server):
    ...         server.dispatch(1)
    ...
    ...     def received(self, server, update):
    ...         server.aggregate()
    ...         server.dispatch(1)
    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> fedsim.systems.schedule(sampler, 3, steps=np.full(4, 2), synchronization=OneByOne()).steps.time
    array([2., 4., 6.])
    """

    def check(self, *, clients: int, cohort: int, fastest: float) -> None:
        """Raises ``ValueError`` if no run of this model is possible.

        Args:
          clients: the size of the population.
          cohort: the number of slots of the sampler's cohorts.
          fastest: the shortest time in seconds in which any client may answer.
        """

    def begin(self, server: Server) -> None:
        """Is called once, at the start of the run."""
        raise NotImplementedError

    def received(self, server: Server, update: Dispatch) -> None:
        """Is called when an update has arrived that the server waited for; it is the last one in ``server.buffer``.

        A late update takes the place of one for which the server waits as long as no client is available, see `Policy`.
        """
        raise NotImplementedError

    def lost(self, server: Server, dispatch: Dispatch) -> None:
        """Is called when the server stops waiting for a client (see `Policy`); by default another client is sent the model."""
        server.dispatch(1)

    def timer(self, server: Server, name: str) -> None:
        """Is called at the time that the model has set with ``server.call_at(time, name)``."""


class Server:
    """The server of a simulation: what it knows, and what a synchronization model can let it do.

    The server of a deployment, `fedsim.deployment.RealServer`, is a subclass in which updates arrive when nodes have sent them.

    Attributes:
      now: the time in seconds.
      version: the number of server steps so far.
      buffer: the updates that were received and not yet aggregated or dropped, in the order of their arrival.
      in_flight: the dispatches for whose updates the server waits, by number.
      waiting: one entry for each dispatch for which no client is available yet: the round that the model gave, or None.
      reserved: the clients that `dispatch` does not select, because the model will send to them by `dispatch_to`.
      memory: what the synchronization model keeps, by name; JSON can represent it.
    """

    def __init__(self, sampler: Sampler, steps: np.ndarray, clients: Clients, policy: Policy, down: Sequence[TimeSpan]) -> None:
        self._selection, self._steps, self._clients, self._policy = Selection(sampler, steps), steps, clients, policy
        self._down, self._records = Spans(down), Records(clients.bytes_down, clients.bytes_up)
        self.now, self.version = self._down.end(0.0), 0
        self.buffer: list[Dispatch] = []
        self.in_flight: dict[int, Dispatch] = {}
        # Of clients that have trained in rounds that the synchronization model gave: the next round, of which no key was used.
        self._next_round: dict[int, int] = {}
        self.waiting: list[int | None] = []
        self.reserved: set[int] = set()
        self.memory: dict[str, Any] = {}
        self._given_up: dict[int, Dispatch] = {}
        # The numbers of late updates in the buffer, of which the synchronization model has not been told.
        self._late: list[int] = []
        self._events: list[tuple[float, bool, int, str, Any]] = []
        self._busy_until: dict[int, float] = {}
        # Clients whose update is on its way or in the buffer. They are not selected, so that no server step has two of their
        # updates.
        self._sending: set[int] = set()
        self._dispatched, self._caused, self._wake = 0, 0, math.inf
        # Of a sampler that sees values: the server steps whose values it has seen, and whether a round waits for them to begin.
        self._observed, self._begins = 0, False
        # The most updates that the buffer has had since the last server step, and what has happened since it had so many.
        self._most_buffered, self._idle_events, self._passed_over = 0, 0, 0

    @property
    def expected(self) -> int:
        """The number of updates for which the server waits, including those of clients that are not available yet."""
        return len(self.in_flight) + len(self.waiting)

    @property
    def late(self) -> list[Dispatch]:
        """The late updates in the buffer, except for those that took the place of a client, see `Policy`."""
        return [update for update in self.buffer if update.number in self._late]

    @property
    def next_time(self) -> float:
        """The time of the next event; minus infinity if there is none, which `next_event` reports."""
        return self._events[0][0] if self._events else -math.inf

    @property
    def steps_to_observe(self) -> int | None:
        """The number of server steps whose values the sampler has not seen yet; None if it sees none."""
        return self.version - self._observed if self._selection.is_steered else None

    def dispatch(self, count: int = 1, round: int | None = None) -> None:
        """Sends the current model to the next available clients of the sampler's cohorts.

        Clients that are busy, offline or reserved are passed over. If too few clients are available, the others follow, with
        the model that is then current, as soon as a client is available.

        Args:
          count: the number of clients.
          round: the round that determines the keys of the training; None: that of the cohort. A client that was sent a model
            with this round or a later one gets the round after its last one, so that it uses no key twice.
        """
        self.waiting.extend([round] * count)
        self._fill()

    def dispatch_cohort(self, round: int | None = None) -> int:
        """Begins the sampler's next cohort that is not empty, dispatches as many clients as it has, and returns how many."""
        count = self._selection.begin_cohort()
        self.dispatch(count, round)
        return count

    def next_round(self, model: Synchronization) -> None:
        """Begins the next round by ``model.begin``; if the sampler sees values of this one, when they are known."""
        if self.steps_to_observe:
            self._begins = True
        else:
            model.begin(self)

    def observe(self, model: Synchronization, observation: Observation) -> None:
        """Gives the sampler the values of the last server step, after which the next round can begin, for `Simulator`."""
        self._selection.observe(observation)
        self._observed += 1
        if self._begins:
            self._begins = False
            model.begin(self)

    def dispatch_to(self, client: int, round: int) -> None:
        """Sends the current model to a given client, which receives it as soon as it is online and has ended earlier work.

        ``round`` is that of `dispatch`.
        """
        self._send_in(round, client, int(self._steps[client]))

    def aggregate(
        self,
        updates: Sequence[Dispatch] | None = None,
        weights: Sequence[float] | np.ndarray | None = None,
        scales: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        """Takes a server step: aggregates updates of the buffer, which increases the version by one.

        Args:
          updates: the updates; None: all of the buffer, but a second update of a client stays there for the next server step.
          weights, scales: one number per update; None: 1. The server step's update is the sum of weight * scale * update over
            the sum of weight.

        Raises:
          ValueError: there are no updates, or two of one client; an update is not in the buffer; ``weights`` or ``scales`` are
            not one finite number of at least 0 per update.
        """
        first = {update.client: update for update in reversed(self.buffer)}
        chosen = [update for update in self.buffer if first[update.client] is update] if updates is None else list(updates)
        if not chosen:
            raise ValueError("aggregate got no updates: a server step needs at least one; wait for one to be received.")
        self._take(chosen)
        if len({update.client for update in chosen}) < len(chosen):
            raise ValueError("aggregate got two updates of one client: aggregate them in two server steps.")
        numbers = [_factors(len(chosen), name, values) for name, values in (("weights", weights), ("scales", scales))]
        for update, weight, scale in zip(chosen, *numbers, strict=True):
            self._records.update(update, self.version, weight, scale)
        self._records.step(self.now, len(chosen), len(self.in_flight) + len(self._given_up))
        self.version += 1
        self._most_buffered = self._idle_events = self._passed_over = 0

    def staleness(self, updates: Sequence[Dispatch] | None = None) -> np.ndarray:
        """Returns the server steps since the dispatch of each update, ``int64 [n]``; None: of all updates in the buffer."""
        return self.version - np.array([update.version for update in (self.buffer if updates is None else updates)], np.int64)

    def drop(self, update: Dispatch) -> None:
        """Removes an update from the buffer without using it."""
        self._take([update])
        self._records.outcome(update, "dropped")
        self._idle_events += 1

    def give_up(self) -> None:
        """Stops waiting for all updates: those that are in flight will be late, and no more clients are looked for."""
        self._given_up |= self.in_flight
        self.in_flight.clear()
        self.waiting.clear()

    def call_at(self, time: float, name: str) -> None:
        """Lets the synchronization model's ``timer(server, name)`` be called at a time, or when the server is up again."""
        self._push(time, "timer", name)

    def next_event(self, model: Synchronization) -> None:
        """Goes to the time of the next event and handles it, for `Simulator`.

        Raises:
          ValueError: there is none, or very many have not led to a server step. The message says why.
        """
        most_passed_over = _MOST_PASSED_OVER + 2 * _MOST_SKIPPED_PER_CLIENT * len(self._steps)
        idle = self._idle_events > _MOST_IDLE_EVENTS + 10 * self.expected or self._passed_over > most_passed_over
        if not idle:
            self._wait_for_event()
        if idle or not self._events:
            raise ValueError(self._why_it_cannot_go_on(model))
        self.now, *_, kind, payload = heapq.heappop(self._events)
        self._idle_events += 1
        if kind == "timer":
            model.timer(self, payload)
        elif kind == "wake":
            self._wake = math.inf
        elif kind == "arrival" and payload in self.in_flight:
            update = self._answered(self.in_flight.pop(payload))
            self.buffer.append(update)
            self._idle_events -= 1
            if len(self.buffer) > self._most_buffered:  # This has brought a server step nearer.
                self._most_buffered, self._idle_events, self._passed_over = len(self.buffer), 0, 0
            model.received(self, update)
        elif kind == "arrival" and payload in self._given_up:
            update = self._answered(self._given_up.pop(payload))
            if self._policy.late == "use":
                self.buffer.append(update)
                self._late.append(update.number)
            else:
                self._sending.discard(update.client)
                self._records.outcome(update, "late")
        elif kind == "loss" and payload in self.in_flight:
            dispatch = self._answered(self.in_flight.pop(payload))
            self._records.outcome(dispatch, "lost")
            model.lost(self, dispatch)
        elif kind == "loss":
            self._records.outcome(self._answered(self._given_up.pop(payload)), "lost")
        elif kind == "timeout" and payload in self.in_flight:
            self._given_up[payload] = dispatch = self.in_flight.pop(payload)
            model.lost(self, dispatch)
        # Otherwise the update has arrived before, and this is its second copy, or the server has stopped waiting for it.
        self._fill()
        while self.waiting and self._late:
            self._stand_in(model)

    def schedule(self) -> Schedule:
        """Returns what happened since the last call, for `Simulator`."""
        totals = Totals(
            dispatched=self._dispatched,
            buffered=len(self.buffer),
            in_flight=len(self.in_flight) + len(self._given_up),
            **self._records.counts,
        )
        return Schedule(*self._records.take(), totals, self.now)

    def state(self) -> dict[str, Any]:
        """Returns the state without what was recorded, of numbers, strings, lists and dicts, for `Simulator`."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: [list(dispatch) for dispatch in getattr(self, name).values()] for name in _DISPATCHES},
            "buffer": [list(update) for update in self.buffer],
            "late": list(self._late),
            "waiting": list(self.waiting),
            "reserved": sorted(self.reserved),
            "next_round": [[client, round] for client, round in self._next_round.items()],
            "events": [[time, cause, kind, payload] for time, _, cause, kind, payload in self._events],
            "busy_until": [[client, until] for client, until in self._busy_until.items() if until > self.now],
            "selection": [self._selection.round, self._selection.position],
            "counts": [dict(self._records.counts), dict(self._records.before)],
            "memory": copy.deepcopy(self.memory),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `state`."""
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in _DISPATCHES:
            setattr(self, name, {row[0]: Dispatch(*row) for row in state[name]})
        self.buffer = [Dispatch(*row) for row in state["buffer"]]
        self.waiting, self.memory = list(state["waiting"]), copy.deepcopy(state["memory"])
        self.reserved, self._late = set(state["reserved"]), list(state.get("late", []))
        self._events = [(time, kind == "timer", cause, kind, payload) for time, cause, kind, payload in state["events"]]
        heapq.heapify(self._events)
        self._busy_until, self._next_round = dict(state["busy_until"]), dict(state.get("next_round", []))
        dispatches = [*self.in_flight.values(), *self._given_up.values(), *self.buffer]
        self._sending = {dispatch.client for dispatch in dispatches if dispatch.arrives}
        self._selection.go_to(*state["selection"])
        self._records = Records(self._clients.bytes_down, self._clients.bytes_up)
        self._records.counts, self._records.before = map(dict, state["counts"])

    def _stand_in(self, model: Synchronization) -> None:
        """Lets a late update take the place of a client that is waited for, because none is available.

        Otherwise the clients whose updates are in the buffer might be all that there are.
        """
        number = self._late.pop(0)
        (update,) = (each for each in self.buffer if each.number == number)
        self.buffer.remove(update)
        self.buffer.append(update)
        self.waiting.remove(update.clock if update.clock in self.waiting else self.waiting[0])
        model.received(self, update)
        self._fill()

    def _take(self, updates: Sequence[Dispatch]) -> None:
        numbers = {update.number for update in updates}
        left = [update for update in self.buffer if update.number not in numbers]
        if len(left) + len(updates) != len(self.buffer):
            raise ValueError("Expected different updates that are in server.buffer: each can be aggregated or dropped once.")
        self.buffer[:] = left
        self._late = [number for number in self._late if number not in numbers]
        self._sending.difference_update(update.client for update in updates)

    def _wait_for_event(self) -> None:
        """Waits until the next event has happened. On a virtual clock all events are known before they happen."""

    def _push(self, time: float, kind: str, payload: Any) -> None:
        # While the server is down, nothing happens on it.
        # A timer comes after all else at its time, so that an update that arrives at a deadline is in time.
        heapq.heappush(self._events, (max(self.now, self._down.end(time)), kind == "timer", self._caused, kind, payload))
        self._caused += 1

    def _send_in(self, given: int, client: int, steps: int) -> None:
        """Sends in the round that the synchronization model gave, or in the first one after it whose keys are not used."""
        round = max(given, self._next_round.get(client, 0))
        self._next_round[client] = round + 1
        self._send(client, round, steps, round - given)

    def _send(self, client: int, round: int, steps: int, ahead: int = 0) -> None:
        number = self._dispatched
        self._dispatched += 1
        start = max(self.now, self._busy_until.get(client, self.now))
        if math.isinf(start):  # A client that has failed for good does not answer.
            dispatch = Dispatch(number, client, round, self.version, self.now, self.now, start, False, 0, 1, 0, 1, 0, math.inf)
        else:
            dispatch = self._clients.dispatch(number, client, round, self.version, start, steps)
        dispatch = dispatch._replace(ahead=ahead)
        self._busy_until[client] = dispatch.free
        if dispatch.arrives:
            self._sending.add(client)
        self.in_flight[number] = dispatch
        timeout, outcome = self._policy.timeout, "arrival" if dispatch.arrives else "loss"
        noticed = dispatch.stop if timeout is None else self.now + timeout
        if dispatch.stop > noticed:
            self._push(noticed, "timeout", number)
        # Without an answer, the server knows of a loss only when the time is over.
        self._push(dispatch.stop if dispatch.arrives else max(dispatch.stop, noticed), outcome, number)
        if dispatch.copy < math.inf:
            self._push(dispatch.copy, "arrival", number)

    def _answered(self, dispatch: Dispatch) -> Dispatch:
        if self._busy_until.get(dispatch.client, math.inf) <= self.now:
            del self._busy_until[dispatch.client]
        return dispatch

    def _fill(self) -> None:
        """Dispatches the clients that are waited for, as far as clients are available."""
        while self.waiting:
            found = self._next_available()
            if found is None:
                self._wake_later()
                return
            client, round, steps = found
            given = self.waiting.pop(0)
            if given is None:
                self._send(client, round, steps)
            else:
                self._send_in(given, client, steps)

    def _next_available(self) -> tuple[int, int, int] | None:
        """Returns the next available client of the cohorts, its round and its steps; None if none is found."""
        devices, available = self._clients.devices, None
        for skipped in range(max(_MOST_SKIPPED, 0 if self._events else _MOST_SKIPPED_PER_CLIENT * len(self._steps))):
            if skipped == _FEW_SKIPPED:
                available = devices.available(self._ready(), self.now)
                if not available.any():
                    return None
            found = self._selection.next()
            self._passed_over += 1
            if self._is_available(found[0]) if available is None else available[found[0]]:
                return found
        return None

    def _is_available(self, client: int) -> bool:
        is_free = self._busy_until.get(client, self.now) <= self.now
        is_taken = client in self._sending or client in self.reserved
        return is_free and not is_taken and self._clients.devices.online(client, self.now)

    def _wake_later(self) -> None:
        """Looks for clients again when the next one comes online or is free."""
        time = self._clients.devices.next_available(self._ready(), self.now)
        if time < self._wake:
            self._wake = time
            self._push(time, "wake", None)

    def _ready(self) -> np.ndarray:
        """Returns when each client has ended its work, ``float64 [population]``; infinity if that is not known."""
        ready = np.full(len(self._steps), self.now)
        ready[list(self._busy_until)] = list(self._busy_until.values())
        ready[list(self._sending | self.reserved)] = math.inf
        return ready

    def _why_it_cannot_go_on(self, model: Synchronization) -> str:
        outcomes = ", ".join(f"{self._records.counts[outcome]} {outcome}" for outcome in OUTCOMES)
        what = (
            f"The run cannot go on after {self.version} server steps, at {self.now:.6g} seconds: of {self._dispatched} "
            f"dispatches, {outcomes}, {len(self.buffer)} in the buffer and {self.expected} expected. "
        )
        gone = sum(math.isinf(until) for until in self._busy_until.values())
        if self._events:
            return what + (
                f"In a row, {self._idle_events} losses, late updates and other events have brought the next server step no "
                f"nearer, and the server has looked at {self._passed_over} clients, of whom most were busy or offline: give a "
                "later deadline or timeout, a smaller minimum, more clients that are free and online, or fewer faults."
            )
        if self.waiting:
            rest = ", and the rest stay offline, have sent an update or are reserved" if gone < len(self._steps) else ""
            return what + (
                f"No other client will ever be available: {gone} of {len(self._steps)} have failed or gone offline for good "
                f"in their work{rest}: give "
                "Faults(recovery=...), fewer failures, traces with a period, or a synchronization model that aggregates sooner."
            )
        return what + (
            f"{type(model).__name__} waits for nothing: it must dispatch clients, or set a timer with server.call_at."
        )


def _factors(updates: int, name: str, values: Sequence[float] | np.ndarray | None) -> list[float]:
    """Returns the factors of some updates, by default 1; raises ``ValueError`` if they are no such factors."""
    factors = np.ones(updates) if values is None else np.asarray(values, np.float64)
    if factors.shape != (updates,) or not np.all((factors >= 0) & (factors < math.inf)):
        raise ValueError(
            f"Expected {name} to be a finite number of at least 0 for each of {updates} updates, got {factors.tolist()}: a "
            "staleness weight, for example, maps an array of stalenesses to an array of that length."
        )
    return factors.tolist()
