"""`RealServer`: the server of a deployment, on which the same synchronization models act as in a simulation."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.samplers import Sampler
from fedsim.systems import Dispatch, Policy, Schedule, Server


class Outcome(NamedTuple):
    """What came of a dispatch.

    Attributes:
      number: of the dispatch.
      arrived: whether the update has arrived; otherwise it is certain that it will not.

    >>> Outcome(number=3, arrived=True).number
    3
    """

    number: int
    arrived: bool


class RealServer(Server):
    """A server whose clients are at nodes: what it dispatches is sent, and what it waits for arrives over a network.

    Times are seconds since the start of the run in which the server has waited: its clock stands still while the server itself
    works, for a server step or an evaluation, so that this time counts against no client. Before a deadline or a timeout is
    over, everything that has come is taken, and is in time. A client is available if its node is, and if it has no work and its
    last update has been aggregated or dropped. A synchronization model sees no difference to a simulation.

    Args:
      sampler: selects the clients.
      steps: ``int64 [population]``, the local steps of each client.
      policy: what is done when there is no answer; messages are not sent again.
      bytes_down, bytes_up: the sizes of the model and of an update, for the metrics.
      outcomes: returns what came of dispatches since the last call, and may wait a moment.
      reachable: returns which clients' nodes are there, ``bool [population]``.
      clock: returns the seconds since any moment.
      once: whether a client must not be dispatched again before its last update has been aggregated or dropped.

    Attributes:
      outbox: the dispatches that have not been sent. Whoever sends them takes them out.
      taken: the server steps that were decided and not computed yet, each as a schedule of one step.

    Here every update arrives at once:

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> server = RealServer(
    ...     fedsim.UniformSampler(data, clients=2, seed=0), np.ones(4, int), Policy(),
    ...     outcomes=lambda: [Outcome(dispatch.number, True) for dispatch in server.outbox],
    ...     reachable=lambda: np.ones(4, bool), clock=lambda: 0.0)
    >>> model = fedsim.systems.Synchronous()
    >>> model.begin(server)
    >>> while not server.taken:
    ...     server.next_event(model)
    >>> server.version, server.taken[0].updates.client.tolist()
    (1, [1, 0])
    """

    def __init__(
        self, sampler: Sampler, steps: np.ndarray, policy: Policy, *, outcomes: Callable[[], Sequence[Outcome]],
        reachable: Callable[[], np.ndarray], clock: Callable[[], float], bytes_down: int = 0, bytes_up: int = 0,
        once: bool = False,
    ) -> None:  # fmt: skip
        clients: Any = _Reachable(bytes_down, bytes_up, reachable)
        super().__init__(sampler, steps, clients, policy, ())
        self._outcomes, self._reachable, self._clock, self._once = outcomes, reachable, clock, once
        # While the clock runs, `_began` is what `clock` said at time 0. While it stands still, `_began` is None, and `_stopped`
        # is the time. `_looked` is the time at which the last look at what has come began.
        self._stopped, self._looked = 0.0, -math.inf
        self._began: float | None = None
        self._known = reachable()
        self.outbox: list[Dispatch] = []
        self.taken: deque[Schedule] = deque()

    @property
    def time(self) -> float:
        """The seconds since the start of the run in which the server has waited."""
        return self._stopped if self._began is None else self._clock() - self._began

    def aggregate(self, *arguments: Any, **keywords: Any) -> None:
        super().aggregate(*arguments, **keywords)
        self.taken.append(self.schedule())

    def state(self) -> dict[str, Any]:
        return super().state() | {"outbox": [dispatch.number for dispatch in self.outbox]}

    def restore(self, state: Mapping[str, Any], at_hand: Sequence[int] = ()) -> None:
        """Continues from a state of `state`, in another process.

        Args:
          state: the state.
          at_hand: the numbers of the dispatches whose updates are still there. Others that had been sent are lost.
        """
        super().restore(state)
        self._stopped = self.now
        self.outbox = [self.in_flight[number] for number in state["outbox"]]
        for number in [*self.in_flight, *self._given_up]:
            if number not in state["outbox"] and number not in at_hand:
                self._over(number, arrived=False)

    def _send(self, client: int, round: int, steps: int, ahead: int = 0) -> None:
        if self._once and client in self._sending:
            raise ValueError(
                "The synchronization model has dispatched a client whose last update is not aggregated, and these clients keep "
                "something between rounds that depends on it: let the model aggregate or drop the update first."
            )
        number = self._dispatched
        self._dispatched += 1
        dispatch = Dispatch(
            number, client, round, self.version, self.now, math.inf, math.inf, True, steps, 1, 1, 0, 0, math.inf, ahead
        )
        self._busy_until[client] = math.inf
        self._sending.add(client)
        self.in_flight[number] = dispatch
        self.outbox.append(dispatch)
        if self._policy.timeout is not None:
            self._push(self.now + self._policy.timeout, "timeout", number)

    def _wait_for_event(self) -> None:
        self._began = self._clock() - self._stopped
        while not self._is_due():
            self._looked = self.time
            for number, arrived in self._outcomes():
                self._over(number, arrived)
            known, self._known = self._known, self._reachable()
            if np.any(self._known & ~known):
                self._push(self._found, "wake", None)
            comes = self._events or self.in_flight or self._given_up or (self.waiting and not self._known.all())
            if not comes:
                break
        # What the server does next begins at the time of the event, and not when the server has seen it.
        self._stopped = self.next_time if self._events else self.time
        self._looked, self._began = min(self._looked, self._stopped), None

    @property
    def _found(self) -> float:
        """The time of what a look finds: that of the next event, if it is over, and otherwise now."""
        return min(self.time, self.next_time) if self._events else self.time

    def _is_due(self) -> bool:
        """Returns whether the next event has happened; for a deadline or a timeout, whether all is known that came before."""
        if not self._events:
            return False
        time, *_, kind, _ = self._events[0]
        return time <= (self._looked if kind in ("timer", "timeout") else self.time)

    def _over(self, number: int, arrived: bool) -> None:
        """Lets the answer to a dispatch, or its loss, be the next event. The second answer to a dispatch changes nothing."""
        table = self.in_flight if number in self.in_flight else self._given_up
        if number not in table or math.isfinite(table[number].stop):
            return
        self._events = [event for event in self._events if event[-2:] != ("timeout", number)]
        heapq.heapify(self._events)
        now = max(self.now, self._found)
        own = table[number]
        table[number] = own._replace(
            stop=now, free=now, arrives=arrived, steps=own.steps * arrived, uploads=int(arrived), lost=int(not arrived)
        )
        others = [*self.in_flight.values(), *self._given_up.values()]
        if not any(other.client == own.client and math.isinf(other.stop) for other in others):
            self._busy_until[own.client] = now
            if not arrived:
                self._sending.discard(own.client)
        self._push(now, "arrival" if arrived else "loss", number)


class _Reachable:
    """What `Server` asks of clients and their devices, where nothing is known of the future."""

    def __init__(self, bytes_down: int, bytes_up: int, reachable: Callable[[], np.ndarray]) -> None:
        self.bytes_down, self.bytes_up, self._reachable, self.devices = bytes_down, bytes_up, reachable, self

    def online(self, client: int, time: float) -> bool:
        return bool(self._reachable()[client])

    def available(self, ready: np.ndarray, now: float) -> np.ndarray:
        return (ready <= now) & self._reachable()

    def next_available(self, ready: np.ndarray, now: float) -> float:
        return math.inf
