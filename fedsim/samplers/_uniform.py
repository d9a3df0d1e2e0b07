"""The same number of clients every round, all alike."""

from __future__ import annotations

import numpy as np

from fedsim import rng
from fedsim.samplers._sampler import SeededSampler

# Clients drawn at a time, of one round or of several: drawing ten costs NumPy as much as drawing five hundred.
_TOGETHER = 512


class UniformSampler(SeededSampler):
    """The same number of distinct clients every round, uniformly at random, independent between rounds.

    A round takes the first entries of its own permutation of the population, which is never written down.

    Args:
      data: the population.
      clients: cohort size.
      seed: the run's seed, or its root key.

    Guarantees:
      - Exactly ``clients`` different clients; every set of them is as likely as any other.
      - Cost: O(clients), whatever the population; small cohorts are drawn some hundred clients at a time.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population.

    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> sampler = UniformSampler(data, clients=3, seed=0)
    >>> [cohort.round for cohort in sampler.rounds(4, start=2)]
    [2, 3]
    >>> sampler.cohort(7).client_ids == sampler.cohort(7).client_ids
    True
    """

    _drawn: tuple[int, np.ndarray] = -1, np.zeros([0, 0], np.int32)

    def _draw(self, round: int) -> np.ndarray:
        rounds = max(1, _TOGETHER // self.clients)
        first = round - round % rounds
        if self._drawn[0] != first:
            epoch, index = np.divmod(np.arange(rounds * self.clients), self.clients)
            drawn = rng.permute(self._words, first + epoch, self.data.num_clients, index, np)
            self._drawn = first, drawn.reshape(rounds, self.clients)
        return self._drawn[1][round - first].copy()
