"""`ClockedSampler`: synchronous rounds on a virtual clock whose sampler sees the values of the rounds before."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from typing import Any

from fedsim.data import Cohort
from fedsim.samplers import Observation, SteeredSampler, checked_cohort, not_observed
from fedsim.systems._records import Schedule
from fedsim.systems._sampler import ScheduledSampler
from fedsim.systems._simulator import Simulator


class ClockedSampler:
    """The cohorts of synchronous rounds on a virtual clock, if values steer the sampler that selects the clients.

    The events of a round are simulated when the values of the round before are known. The sampler also observes ``seconds``,
    the time from the dispatch of the model to each client until its update arrived. Its rounds are the cohorts that it was
    asked for: a cohort whose clients only replaced others, or none of whose updates counted, is observed without values.

    Args:
      sampler: selects the clients.
      **arguments: those of `Simulator`.

    Attributes:
      data, key, observes: those of ``sampler``.
      clients: the largest number of updates in a server step.
      observations: those of the server steps so far.

    Raises:
      ValueError: as `Simulator` does, also while a run goes on; the cohort of a round whose earlier rounds were not observed.

    >>> import fedsim, numpy as np
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1, 1, 1, 1])
    >>> sampler = ClockedSampler(fedsim.samplers.Oort(data, clients=2, seed=0), steps=np.array([5, 5, 5, 5]))
    >>> first = sampler.cohort(0)
    >>> later = sampler.observe(Observation(first.clients, {"loss": np.ones(2)}))
    >>> [later.cohort(round).measures["simulated_seconds"] for round in (0, 1)]
    [5.0, 10.0]
    """

    def __init__(self, sampler: SteeredSampler, **arguments: Any) -> None:
        first = checked_cohort(sampler, 0)
        self.sampler, self.data, self.key, self.observes = sampler, first.data, first.key, tuple(sampler.observes)
        self.observations: tuple[Observation, ...] = ()
        self._begin = functools.partial(_Events, sampler, arguments)
        self._events = self._begin()
        self.clients = self._events.simulator.most_updates

    def observe(self, observation: Observation) -> ClockedSampler:
        """Returns the sampler after one more round."""
        after = copy.copy(self)
        after.observations = (*after.observations, observation)
        return after

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a server step, at most the one after the last that was observed."""
        if operator.index(round) > len(self.observations):
            raise not_observed(self.sampler, round, len(self.observations))
        if round < 0:
            raise ValueError(f"Expected round >= 0, got round={round}: rounds count from 0.")
        alone = ScheduledSampler(self.sampler, self._simulated(round + 1)[round]).cohort(0)
        return dataclasses.replace(alone, round=round, slots=self.clients)

    @property
    def schedule(self) -> Schedule:
        """The events of the rounds that were observed; of the first one if none was."""
        count = max(1, len(self.observations))
        return Schedule.joined(self._simulated(count)[:count])

    def _simulated(self, count: int) -> list[Schedule]:
        """Returns the events of each server step, of at least ``count``."""
        if any(mine is not other for mine, other in zip(self.observations, self._events.observed, strict=False)):
            self._events = self._begin()  # of another run, which this sampler was copied from
        while len(self._events.steps) < count:
            self._events.advance(self.observations)
        return self._events.steps


class _Events:
    """The events of a run so far: of each server step, ``steps``, and the observations that led to them, ``observed``."""

    def __init__(self, sampler: SteeredSampler, arguments: dict[str, Any]) -> None:
        self.simulator, self.steps = Simulator(sampler, **arguments), list[Schedule]()
        self.observed: list[Observation] = []

    def advance(self, observations: tuple[Observation, ...]) -> None:
        """Simulates one more server step."""
        if self.steps:
            known, updates = observations[len(self.observed)], self.steps[-1].updates
            self.observed.append(known)
            values = {**known.values, "seconds": updates.stop - updates.start}
            self.simulator.observe(known._replace(values=values))
        self.steps.append(self.simulator.advance(len(self.steps) + 1))
