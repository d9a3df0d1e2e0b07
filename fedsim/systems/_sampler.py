"""`ScheduledSampler`: the cohorts of a schedule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import numpy as np

from fedsim.data import Arrivals, Cohort
from fedsim.samplers import Sampler, checked_cohort
from fedsim.systems._records import Schedule, Updates

# The names in the metrics of a round, by the name in `ServerSteps`.
_MEASURES = {
    "in_flight": "clients_in_flight",
    "late": "updates_late",
    "lost": "updates_lost",
    "dropped": "updates_dropped",
    "downloads": "messages_down",
    "uploads": "messages_up",
    "messages_lost": "messages_lost",
    "messages_doubled": "messages_doubled",
    "bytes_down": "bytes_down",
    "bytes_up": "bytes_up",
    "steps": "client_steps",
    "steps_wasted": "client_steps_wasted",
}


class ScheduledSampler:
    """The cohorts of a schedule: those of a round are the clients whose updates the server step of that number aggregates.

    Args:
      sampler: the sampler that the schedule was made with.
      schedule: all server steps of the run, or some that follow one another.
      start: the number of the first of them.

    Attributes:
      data, key: those of ``sampler``.
      clients: the largest number of updates in a server step.

    Raises:
      ValueError: clients of ``sampler`` have only a part of their examples in a round (`fedsim.data.Arriving`).

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1, 1, 1, 1])
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> plan = fedsim.systems.schedule(sampler, 2, steps=np.array([1, 2, 3, 4]))
    >>> [cohort.measures["simulated_seconds"] for cohort in ScheduledSampler(sampler, plan).rounds(2)]
    [2.0, 4.0]
    """

    def __init__(self, sampler: Sampler, schedule: Schedule, start: int = 0) -> None:
        first = checked_cohort(sampler, 0)
        if first.rows is not None:
            raise ValueError("Expected a sampler whose clients have all of their examples, got Arriving: leave it out.")
        self.sampler, self.schedule, self.data, self.key = sampler, schedule, first.data, first.key
        self.clients, self._start = int(schedule.steps.updates.max()), start
        self._has_roles = first.attack is not None or first.work is not None  # attackers or stragglers
        self._attack, self._bounds = first.attack, np.concatenate([[0], np.cumsum(schedule.steps.updates)])
        self._selected = functools.lru_cache(maxsize=64)(lambda round: checked_cohort(sampler, round, first))

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a server step."""
        round = operator.index(round)
        stop = self._start + len(self.schedule.steps.time)
        if not self._start <= round < stop:
            raise ValueError(f"Expected a round in [{self._start}, {stop}), the schedule, got round={round}.")
        at = round - self._start
        stretch = slice(self._bounds[at], self._bounds[at + 1])
        updates = Updates(*(field[stretch] for field in self.schedule.updates))
        chosen = zip(updates.client, updates.round, strict=True)
        found = [self._find(int(client), int(number)) for client, number in chosen] if self._has_roles else []
        work = np.array([1.0 if cohort.work is None else cohort.work[place] for cohort, place in found])
        attackers = None if self._attack is None else np.array([_is_attacker(*one) for one in found])
        arrivals = Arrivals.of(
            updates.staleness, round=round, key_rounds=updates.round, weights=updates.weight, scales=updates.scale
        )
        return Cohort(
            self.data,
            updates.client,
            round,
            self.key,
            slots=self.clients,
            work=work if self._has_roles and np.any(work < 1) else None,
            attack=self._attack,
            attackers=attackers,
            arrivals=arrivals,
            measures=self._measures(at),
        )

    def _find(self, client: int, round: int) -> tuple[Cohort, int]:
        """Returns the cohort that says whether a client is a straggler or an attacker, and its place there."""
        cohort = self._selected(round)
        places = np.flatnonzero(cohort.clients == client)
        if not len(places):
            raise ValueError(
                f"Client {self.data.client_ids[client]!r} is not in the sampler's cohort of round {round}, so it is not known "
                "whether it is a straggler or an attacker: use a sampler without them, or a synchronization model that keeps "
                "the rounds of the sampler."
            )
        return cohort, int(places[0])

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """Returns the cohorts of server steps ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _measures(self, at: int) -> dict[str, float]:
        steps = self.schedule.steps
        counts = {_MEASURES[name]: int(getattr(steps, name)[at]) for name in _MEASURES}
        return {"simulated_seconds": float(steps.time[at]), **counts}


def _is_attacker(cohort: Cohort, place: int) -> bool:
    assert cohort.attackers is not None  # as in every cohort with an attack
    return bool(cohort.attackers[place])
