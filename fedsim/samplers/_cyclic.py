"""A sampler in whose rounds the clients take turns in a fixed order, as correlated noise for differential privacy assumes."""

from __future__ import annotations

import numpy as np

from fedsim import rng
from fedsim.samplers._sampler import SeededSampler


class CyclicSampler(SeededSampler):
    """Selects the clients in turns: the order is shuffled once, and is the same in every epoch.

    So a client takes part once in every ``epoch`` rounds, exactly that far apart. This is the participation with a minimum
    separation of C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private
    training", NeurIPS 2023: https://arxiv.org/abs/2306.08153, for which `fedsim.aggregators.MatrixMechanism` correlates its
    noise.

    Args:
      data: the population.
      clients: the cohort size. The last cohort of an epoch may be smaller.
      seed: the run's seed, or its root key.

    Attributes:
      epoch: the number of rounds after which a client takes part again, ``ceil(population / clients)``.

    Guarantees:
      - The cohorts of rounds r and r + epoch have the same clients.
      - Cost: O(clients), independent of the population, because the order is never stored.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population.

    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_arrays({"x": np.zeros(5)}, sizes=[1] * 5)
    >>> sampler = CyclicSampler(data, clients=2, seed=0)
    >>> first, second, last, again = [cohort.client_ids for cohort in sampler.rounds(4)]
    >>> sampler.epoch, sorted(first + second + last), again == first
    (3, ['0', '1', '2', '3', '4'], True)
    """

    @property
    def epoch(self) -> int:
        """The number of rounds after which a client takes part again."""
        return -(-self.data.num_clients // self.clients)

    def _draw(self, round: int) -> np.ndarray:
        population, step = self.data.num_clients, round % self.epoch
        index = np.arange(step * self.clients, min((step + 1) * self.clients, population), dtype=np.int32)
        return rng.permute(self._words, 0, population, index, np)
