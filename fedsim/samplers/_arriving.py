"""Examples that arrive while a run goes on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import Cohort
from fedsim.samplers._protocol import Sampler
from fedsim.samplers._sampler import WrappedSampler


class Arriving(WrappedSampler):
    """Lets clients train on the examples that have arrived until the round, so that their data grow, or drift.

    A client without examples yet may be in a cohort. It takes no step, and its update has no weight.

    Args:
      sampler: the sampler that chooses the cohorts.
      arrival: ``int [num_examples]``, the first round in which each example of ``sampler.data`` exists, in the order of its
        columns. It must not decrease within a client: sort the examples of a client by it before the population is made.
      last: the examples of the last ``last`` rounds exist, the present one included; older ones are forgotten. None keeps all.

    Attributes:
      data, clients, key: those of ``sampler``.

    Guarantees:
      - Which examples exist is a function of ``arrival`` and the round alone, and nothing else in the cohort changes. Samplers
        that weight clients by their sizes, and counts of the whole population in an algorithm, take all examples.
      - Shapes do not change, so one compiled program runs all rounds.
      - Cost: O(clients log examples) per round, in addition to that of ``sampler``.

    Raises:
      ValueError: ``arrival`` has another shape or dtype, or decreases within a client; ``last`` is not positive. In a round:
        the clients of ``sampler`` start from models of earlier rounds, or it has an `Arriving` already. When the round runs:
        the algorithm reads examples in the order of an earlier round (`DiLoCo`).

    >>> from fedsim import FederatedData, UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.arange(6)}, sizes=[4, 2])
    >>> uniform = UniformSampler(data, clients=2, seed=0)
    >>> arriving = Arriving(uniform, [0, 0, 1, 2, 1, 2])
    >>> for cohort in arriving.rounds(3):
    ...     print({client: dataset["x"].tolist() for client, dataset, _ in sorted(cohort, key=lambda each: each[0])})
    {'0': [0, 1], '1': []}
    {'0': [0, 1, 2], '1': [4]}
    {'0': [0, 1, 2, 3], '1': [4, 5]}
    """

    def __init__(self, sampler: Sampler, arrival: Any, *, last: int | None = None) -> None:
        super().__init__(sampler)
        checks.whole(1, or_none=True, last=last, remedy="a number of rounds, or None for all of them")
        checks.unmasked(arrival=arrival)
        rounds = np.asarray(arrival)
        if rounds.shape != (self.data.num_examples,) or rounds.dtype.kind not in "iu":
            raise ValueError(
                f"Expected arrival int [{self.data.num_examples}], a round for each example, got {rounds.dtype} "
                f"{list(rounds.shape)}: give the number of the round in which an example arrives, from 0."
            )
        self.arrival, self.last = rounds.astype(np.int64), last
        owner = np.repeat(np.arange(self.data.num_clients), self.data.sizes)
        wrong = np.flatnonzero((np.diff(self.arrival) < 0) & (np.diff(owner) == 0))
        if len(wrong):
            client = self.data.client_ids[int(owner[wrong[0]])]
            raise ValueError(
                f"Expected arrival that does not decrease within a client, got {self.arrival[wrong[0]]} and then "
                f"{self.arrival[wrong[0] + 1]} of client {client!r}: sort the examples of each client by it first."
            )

    def _transform(self, cohort: Cohort) -> Cohort:
        if cohort.rows is not None:
            raise ValueError("Expected a sampler whose clients have all of their examples, got Arriving: leave one out.")
        if cohort.arrivals is not None:
            raise ValueError(
                f"Expected a sampler that neither scales updates nor starts clients from earlier models, got "
                f"{type(self.sampler).__name__}: use fedsim.UniformSampler, for example."
            )
        return dataclasses.replace(cohort, rows=self.rows(cohort.clients, cohort.round))

    def rows(self, clients: np.ndarray, round: int) -> np.ndarray:
        """Returns the first of its own examples that each of these clients has in a round, and the one after the last.

        Args:
          clients: ``int [n]``, positions in ``data``.
          round: from 0.

        Returns:
          ``int64 [n, 2]``, as in `Cohort.rows`.
        """
        rows = np.zeros((len(clients), 2), np.int64)
        for at, client in enumerate(clients):
            own = self.arrival[self.data.offsets[client] : self.data.offsets[client + 1]]
            rows[at, 1] = np.searchsorted(own, round, side="right")
            if self.last is not None:
                rows[at, 0] = np.searchsorted(own, round - self.last, side="right")
        return rows
