"""Uniform sampling without replacement."""

from __future__ import annotations

import numpy as np

from fedsim import rng
from fedsim.samplers._sampler import SeededSampler

# The number of clients drawn in one call, for one round or for several: NumPy takes as long for ten clients as for 500.
_CLIENTS_PER_DRAW = 512


class UniformSampler(SeededSampler):
    """Samples a fixed number of distinct clients per round, uniformly at random and independently between rounds.

    A round takes the first entries of a permutation of the population that is keyed by the round and never stored.

    Args:
      data: the population.
      clients: the cohort size.
      seed: the run's seed, or its root key.

    Guarantees:
      - A cohort has exactly ``clients`` distinct clients, and all sets of this size are equally likely.
      - Cost: O(clients), independent of the population. Small cohorts are drawn for several rounds at once.

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
        rounds = max(1, _CLIENTS_PER_DRAW // self.clients)
        first = round - round % rounds
        if self._drawn[0] != first:
            epoch, index = np.divmod(np.arange(rounds * self.clients), self.clients)
            drawn = rng.permute(self._words, first + epoch, self.data.num_clients, index, np)
            self._drawn = first, drawn.reshape(rounds, self.clients)
        return self._drawn[1][round - first].copy()
