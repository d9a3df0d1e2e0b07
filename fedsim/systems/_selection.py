"""The stream of clients that a sampler selects: those of its cohorts, one cohort after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.samplers import Observation, Sampler, checked_cohort, is_steered

_MOST_EMPTY_COHORTS = 10_000


class Selection:
    """The clients of a sampler's cohorts, in order. Cohorts without clients are passed over.

    Args:
      sampler: the sampler.
      steps: ``int64 [population]``, the local steps of each client. A cohort's ``work`` reduces them.

    Attributes:
      round: the round of the present cohort; -1 before the first one.
      position: the position of the next client in it.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> selection = Selection(fedsim.samplers.ScheduleSampler(data, [["2"], [], ["0", "1"]], seed=0), np.full(4, 5))
    >>> [selection.next() for _ in range(3)]
    [(2, 0, 5), (0, 2, 5), (1, 2, 5)]
    """

    def __init__(self, sampler: Sampler, steps: np.ndarray) -> None:
        self._sampler, self._steps = sampler, steps
        self._first = checked_cohort(sampler, 0)
        self.round, self.position = -1, 0
        self._cohort: list[tuple[int, int]] = []

    def next(self) -> tuple[int, int, int]:
        """Returns the next client, its round and its number of steps."""
        if self.position >= len(self._cohort):
            self.begin_cohort()
        client, steps = self._cohort[self.position]
        self.position += 1
        return client, self.round, steps

    def begin_cohort(self) -> int:
        """Goes to the start of the next cohort that has clients, and returns their number.

        Raises:
          ValueError: very many cohorts in a row have none.
        """
        for round in range(self.round + 1, self.round + 1 + _MOST_EMPTY_COHORTS):
            self.go_to(round, 0)
            if self._cohort:
                return len(self._cohort)
        raise ValueError(
            f"The sampler {type(self._sampler).__name__} gave {_MOST_EMPTY_COHORTS} cohorts without clients: give a sampler "
            "that selects clients."
        )

    @property
    def is_steered(self) -> bool:
        """Whether the sampler observes values of the clients."""
        return is_steered(self._sampler)

    def observe(self, observation: Observation) -> None:
        """Lets the sampler observe the values of the present cohort; it observes earlier ones without values."""
        self._observe_nothing_until(self.round)
        self._sampler = self._sampler.observe(observation)  # type: ignore[attr-defined]

    def _observe_nothing_until(self, round: int) -> None:
        sampler: Any = self._sampler
        nothing = Observation(np.zeros(0, np.int32), {name: np.zeros(0) for name in sampler.observes})
        while len(sampler.observations) < round:
            sampler = sampler.observe(nothing)
        self._sampler = sampler

    def go_to(self, round: int, position: int) -> None:
        """Continues at a position of a cohort; round -1 is the start."""
        self.round, self.position = round, position
        if round >= 0:
            if self.is_steered:
                self._observe_nothing_until(round)
            cohort = checked_cohort(self._sampler, round, self._first)
            steps = cohort.partial_steps(self._steps[cohort.clients])
            self._cohort = list(zip(cohort.clients.tolist(), steps.tolist(), strict=True))
