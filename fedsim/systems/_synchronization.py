"""Synchronization models: when clients are sent a model, and when the server aggregates what it received.

- Synchronous rounds with over-selection and a deadline: K. Bonawitz et al., "Towards federated learning at scale: system
  design", MLSys 2019, https://arxiv.org/abs/1902.01046.
- Stale synchronous parallel: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
  NeurIPS 2013.
- FedAsync: C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization", 2019, https://arxiv.org/abs/1903.03934.
- FedBuff: J. Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022,
  https://arxiv.org/abs/2106.06639.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from fedsim import checks
from fedsim.systems._dispatch import Dispatch
from fedsim.systems._server import Server, Synchronization
from fedsim.systems._staleness_weights import ConstantWeight, PolynomialWeight, as_staleness_weight

_CONSTANT, _INVERSE_SQUARE_ROOT = ConstantWeight(), PolynomialWeight(0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synchronous(Synchronization):
    """Rounds: a cohort starts from the same version, and the server aggregates when enough of its updates have arrived.

    A round takes the next cohort of the sampler, n clients, and ends with the first ``n / over_selection`` updates, rounded up:
    10 of 13 for 1.3. The rest are late. Clients that are busy, offline or lost are replaced by the next ones of the sampler.

    Attributes:
      over_selection: the number of clients in a cohort for each update that the server needs, at least 1.
      deadline: the seconds after which a round ends with the updates that are there; None: there is no deadline.
      minimum: with fewer updates at its deadline, a round does not count: its updates are dropped, and another round begins
        from the same version. Late updates of earlier rounds that are used (`Policy`) wait for the next server step.

    Raises:
      ValueError: ``over_selection`` is below 1, ``deadline`` is not positive, or ``minimum`` is below 1; in a run, ``minimum``
        is larger than what the server waits for, or no client can be as fast as ``deadline``.

    >>> Synchronous(over_selection=1.3, deadline=600.0)
    Synchronous(over_selection=1.3, deadline=600.0, minimum=1)
    """

    over_selection: float = 1.0
    deadline: float | None = None
    minimum: int = 1

    def __post_init__(self) -> None:
        checks.number(least=1, over_selection=self.over_selection, remedy="1.3 selects 13 clients for 10 updates")
        checks.positive(or_none=True, deadline=self.deadline)
        checks.whole(1, minimum=self.minimum)

    def check(self, *, clients: int, cohort: int, fastest: float) -> None:
        """Raises ``ValueError`` if a round can never have ``minimum`` updates, or never ends in time."""
        if self.minimum > self._needed(cohort):
            raise ValueError(
                f"Expected minimum <= {self._needed(cohort)}, the updates that end a round of {cohort} clients with "
                f"over_selection={self.over_selection}, got minimum={self.minimum}: no round would ever count; give a smaller "
                "minimum, or a sampler with more clients."
            )
        if self.deadline is not None and self.deadline < fastest:
            raise ValueError(
                f"Expected deadline >= {fastest!r} seconds, in which the fastest client answers, got deadline="
                f"{self.deadline}: no update would ever arrive in time; give a later deadline, or faster devices."
            )

    def begin(self, server: Server) -> None:
        """Begins the first round."""
        server.give_up()
        server.memory["attempt"] = server.memory.get("attempt", 0) + 1
        server.memory["received"] = 0
        server.memory["needed"] = self._needed(server.dispatch_cohort())
        if self.deadline is not None:
            server.call_at(server.now + self.deadline, str(server.memory["attempt"]))

    def received(self, server: Server, update: Dispatch) -> None:
        """Ends the round if it has enough updates."""
        server.memory["received"] += 1
        if server.memory["received"] >= server.memory["needed"]:
            server.aggregate()
            server.next_round(self)

    def timer(self, server: Server, name: str) -> None:
        """Ends the round at its deadline."""
        if name != str(server.memory["attempt"]):
            return  # This is the deadline of a round that has ended earlier.
        if server.memory["received"] >= self.minimum:
            server.aggregate()
        late = {update.number for update in server.late}
        for update in [update for update in server.buffer if update.number not in late]:
            server.drop(update)
        server.next_round(self)

    def most_updates(self, cohort: int) -> int:
        """Returns the number of updates with which a round of so many clients ends."""
        return self._needed(cohort)

    def _needed(self, cohort: int) -> int:
        # In floats 13 / 1.3 may be slightly larger than 10, and it must not be rounded up to 11.
        return math.ceil(cohort / self.over_selection - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaleSynchronous(Synchronization):
    """Stale synchronous parallel: no worker is more than ``bound`` local rounds ahead of the slowest one.

    The workers are the sampler's first cohort. A worker that has done c local rounds goes on as soon as the slowest has done at
    least c - bound. Whenever a worker is about to start, the server aggregates what it has received since its last step, so
    every update counts as soon as any worker can see it. A worker that is lost is replaced by the next available client of the
    sampler that is no worker, which repeats its local round, with random keys that this client has not used before.

    Attributes:
      bound: s, at least 0. With 0, all workers start together: the server steps are synchronous rounds of the same clients.
      versions: the largest staleness of an update, in server steps: workers also wait until the server can take a step
        without making an update that is still computed staler than that. None: no bound. Late updates (`Policy`) may be staler.

    Raises:
      ValueError: ``bound`` or ``versions`` is not a whole number of at least 0.

    >>> StaleSynchronous(bound=2, versions=10)
    StaleSynchronous(bound=2, versions=10)
    """

    bound: int
    versions: int | None = None

    def __post_init__(self) -> None:
        checks.whole(0, bound=self.bound, remedy="0 means that all workers wait for each other")
        checks.whole(0, or_none=True, versions=self.versions, remedy="0 means that all updates are of the current version")

    def begin(self, server: Server) -> None:
        """Starts all workers."""
        server.memory["blocked"] = []
        server.dispatch_cohort(round=0)

    def received(self, server: Server, update: Dispatch) -> None:
        """Starts the worker, and those that waited for it, if the bounds allow it."""
        # A worker's clock is the number of its next local round, which is the round that was given for the dispatch.
        server.memory["blocked"].append([update.clock + 1, update.client])
        self._start_workers(server)

    def lost(self, server: Server, dispatch: Dispatch) -> None:
        """Lets another client take over the worker's local round, from the current version."""
        server.dispatch(1, round=dispatch.clock)
        self._start_workers(server)

    def _start_workers(self, server: Server) -> None:
        blocked = server.memory["blocked"]
        working = [dispatch.clock for dispatch in server.in_flight.values()] + [int(r or 0) for r in server.waiting]
        slowest = min(working + [clock for clock, _ in blocked])
        oldest = min((dispatch.version for dispatch in server.in_flight.values()), default=math.inf)
        may_step = self.versions is None or server.version + 1 - oldest <= self.versions
        ready = sorted(worker for worker in blocked if may_step and worker[0] - slowest <= self.bound)
        server.memory["blocked"] = [worker for worker in blocked if worker not in ready]
        server.reserved = {client for _, client in server.memory["blocked"]}  # They do not take over the work of others.
        if ready and server.buffer:
            server.aggregate()
        for clock, client in ready:
            server.dispatch_to(client, round=clock)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffered(Synchronization):
    """Some clients are always in flight, and the server takes a step with every ``size`` updates, as in FedBuff.

    The mean staleness is (concurrency - 1) / size for any law of the durations, and the clients answer at the rate concurrency
    / (mean duration). Both need a population of at least concurrency + size - 1 clients, because a client whose update is in
    the buffer is not selected.

    The algorithm weights the updates, too, and FedAvg does so by numbers of examples. The paper's mean over the K updates, in
    which each counts by its staleness alone, is that of `FedBuff`, or of ``FedAvg(weighting="uniform")``.

    Attributes:
      size: K, the number of updates in a server step. Late updates (`Policy`) count among them; those that arrive when K - 1
        are there already come in addition.
      concurrency: C, the number of clients in flight.
      staleness_weight: a function from the staleness of updates to their weights, or its name, such as "hinge(a=10, b=4)"; the
        paper's is 1 / sqrt(1 + staleness).
      divide_by: "size": a server step's update is the algorithm's mean of the updates times their staleness weights; with
        uniform weighting it is their sum over their number, as in the paper. "weights": the staleness weights multiply the
        weights of that mean, so stale updates make no server step shorter.

    Raises:
      ValueError: ``size`` or ``concurrency`` is below 1; ``divide_by`` is none of the two; ``staleness_weight`` is neither;
        in a run, ``size`` or ``concurrency`` is larger than the population, or a weight is negative or not finite.

    >>> Buffered(size=10, concurrency=30).staleness_weight
    PolynomialWeight(a=0.5)
    """

    size: int
    concurrency: int
    staleness_weight: Any = _INVERSE_SQUARE_ROOT
    divide_by: str = "size"

    def __post_init__(self) -> None:
        checks.whole(1, size=self.size, concurrency=self.concurrency)
        object.__setattr__(self, "staleness_weight", as_staleness_weight(self.staleness_weight))
        checks.one_of("size", "weights", divide_by=self.divide_by)

    def check(self, *, clients: int, cohort: int, fastest: float) -> None:
        """Raises ``ValueError`` if there are fewer clients than ``concurrency`` or ``size``."""
        _check_concurrency(self.concurrency, clients)
        if self.size > clients:
            raise ValueError(
                f"Expected size <= {clients}, the clients of the population, got size={self.size}: a server step has one "
                f"update of a client at most; give at most size={clients}."
            )

    def begin(self, server: Server) -> None:
        """Starts ``concurrency`` clients."""
        server.dispatch(self.concurrency)

    def received(self, server: Server, update: Dispatch) -> None:
        """Takes a server step if the buffer is full, and starts another client."""
        if len(server.buffer) >= self.size:
            weights = self.staleness_weight(server.staleness())
            if self.divide_by == "size":
                server.aggregate(scales=weights)
            else:
                server.aggregate(weights=weights)
        server.dispatch(self.concurrency - server.expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedBuff(Buffered):
    """`Buffered` with the paper's mean over the K updates of a server step: the algorithm's clients have equal weights.

    A run with it replaces the ``weighting`` of the algorithm by ``"uniform"``.

    >>> FedBuff(size=10, concurrency=30).divide_by
    'size'
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asynchronous(Synchronization):
    """FedAsync: some clients are always in flight, and the server mixes each model that arrives into its own.

    With x_new the model of a client, the server's model x becomes (1 - alpha) x + alpha x_new, where alpha is ``mixing`` times
    the staleness weight (Algorithm 1). alpha is the ``scale`` of the update in the schedule.

    Attributes:
      concurrency: the number of clients in flight.
      mixing: alpha of an update without staleness, in (0, 1].
      staleness_weight: a function from the staleness of updates to their weights, or its name, such as "hinge(a=10, b=4)".

    Raises:
      ValueError: ``concurrency`` is below 1, ``mixing`` is outside (0, 1], or ``staleness_weight`` is neither; in a run,
        ``concurrency`` is larger than the population, or a weight is negative or not finite.

    >>> Asynchronous(concurrency=30).mixing
    0.6
    """

    concurrency: int
    mixing: float = 0.6
    staleness_weight: Any = _CONSTANT

    def __post_init__(self) -> None:
        checks.whole(1, concurrency=self.concurrency)
        object.__setattr__(self, "staleness_weight", as_staleness_weight(self.staleness_weight))
        checks.number(above=0, most=1, mixing=self.mixing, remedy="it is the weight of a client's model in the server's")

    def check(self, *, clients: int, cohort: int, fastest: float) -> None:
        """Raises ``ValueError`` if there are fewer clients than ``concurrency``."""
        _check_concurrency(self.concurrency, clients)

    def begin(self, server: Server) -> None:
        """Starts ``concurrency`` clients."""
        server.dispatch(self.concurrency)

    def received(self, server: Server, update: Dispatch) -> None:
        """Takes a server step with each update that is there, and starts another client."""
        for each in list(server.buffer):  # More than one only if a late update is used.
            server.aggregate([each], scales=self.mixing * self.staleness_weight(server.staleness([each])))
        server.dispatch(self.concurrency - server.expected)


def _check_concurrency(concurrency: int, clients: int) -> None:
    if concurrency > clients:
        raise ValueError(
            f"Expected concurrency <= {clients}, the clients of the population, got concurrency={concurrency}: give at most "
            f"concurrency={clients}, or more clients."
        )
