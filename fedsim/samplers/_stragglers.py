"""Clients that do not get done.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, section 5.2 (systems heterogeneity): https://arxiv.org/abs/1812.06127. In a round of E epochs a fixed share of clients
manages only x of them, x uniform in [1, E). FedProx takes what they have; FedAvg drops them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import jax
import numpy as np

from fedsim import rng
from fedsim.data import Cohort, FederatedData
from fedsim.samplers._sampler import SeededSampler


class Stragglers:
    """Another sampler's cohorts, of which some clients do less work than they were asked for, or are left out.

    Who straggles and by how much is a function of the seed and the round alone: the same for every algorithm and every learning
    rate, as the paper asks for, and the same clients with ``drop`` and without.

    Args:
      sampler: who takes part.
      fraction: the part of each cohort that straggles, rounded to whole clients.
      epochs: E, as the algorithm's ``Batches(epochs=E)``: stragglers manage 1 to E - 1 of them.
      drop: leave stragglers out. Cohorts keep their slots, so no program is compiled anew.

    Attributes:
      data, clients, key: the sampler's.

    Guarantees:
      - Everybody else does all of its work.
      - Cost: O(clients) a round, beside the sampler's.

    Raises:
      ValueError: ``fraction`` is not in [0, 1], or ``epochs`` is below 2, in which nobody can do less.

    >>> from fedsim.samplers import UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> everybody = UniformSampler(data, clients=4, seed=0)
    >>> [(cohort.work * 20).tolist() for cohort in Stragglers(everybody, fraction=0.5, epochs=20).rounds(2)]
    [[14.0, 20.0, 1.0, 20.0], [20.0, 6.0, 20.0, 15.0]]
    >>> [(len(cohort), cohort.slots) for cohort in Stragglers(everybody, fraction=0.5, epochs=20, drop=True).rounds(2)]
    [(2, 4), (2, 4)]
    """

    def __init__(self, sampler: SeededSampler, *, fraction: float = 0.5, epochs: int, drop: bool = False) -> None:
        epochs = operator.index(epochs)
        if not 0 <= fraction <= 1:
            raise ValueError(f"Expected 0 <= fraction <= 1, got fraction={fraction}: the part of a cohort that straggles.")
        if epochs < 2:
            raise ValueError(f"Expected epochs >= 2, got epochs={epochs}: of a single epoch nobody can do less.")
        self.sampler, self.fraction, self.epochs, self.drop = sampler, float(fraction), epochs, drop
        self._words = np.asarray(rng.words(rng.stream(sampler.key, "stragglers")))

    @property
    def data(self) -> FederatedData:
        """The population."""
        return self.sampler.data

    @property
    def clients(self) -> int:
        """The sampler's slots."""
        return self.sampler.clients

    @property
    def key(self) -> jax.Array:
        """The run's root key."""
        return self.sampler.key

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round."""
        everybody = self.sampler.cohort(round)
        draw = np.random.Generator(np.random.Philox(key=self._words.astype(np.uint64), counter=[0, 0, 0, everybody.round]))
        late = draw.permutation(len(everybody))[: int(np.rint(self.fraction * len(everybody)))]
        work = np.ones(len(everybody), np.float32)
        work[late] = draw.integers(1, self.epochs, len(late)) / self.epochs
        stays = work == 1 if self.drop else np.ones(len(everybody), bool)
        if everybody.work is not None:
            work = work * everybody.work
        attackers = None if everybody.attackers is None else everybody.attackers[stays]
        return dataclasses.replace(everybody, clients=everybody.clients[stays], work=work[stays], attackers=attackers)

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """The cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))
