"""A sampler that goes through the population in shuffled epochs."""

from __future__ import annotations

import numpy as np

from fedsim import rng
from fedsim.samplers._sampler import SeededSampler


class ShuffledSampler(SeededSampler):
    """Selects every client once per epoch, in an order that is shuffled for every epoch.

    An epoch has ``ceil(population / clients)`` rounds. Its last cohort has the remaining clients, so it may be smaller. A
    cohort never spans two epochs, because it could then contain a client twice.

    Args:
      data: the population.
      clients: the cohort size. The last cohort of an epoch may be smaller.
      seed: the run's seed, or its root key.

    Guarantees:
      - The cohorts of an epoch contain every client exactly once.
      - Every epoch has its own order.
      - Cost: O(clients), independent of the population, because the order is never stored.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population.

    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_arrays({"x": np.zeros(5)}, sizes=[1] * 5)
    >>> sampler = ShuffledSampler(data, clients=2, seed=0)
    >>> epoch = [cohort.client_ids for cohort in sampler.rounds(3)]
    >>> [len(ids) for ids in epoch], sorted(sum(epoch, []))
    ([2, 2, 1], ['0', '1', '2', '3', '4'])
    """

    def _draw(self, round: int) -> np.ndarray:
        population = self.data.num_clients
        epoch, step = divmod(round, -(-population // self.clients))
        index = np.arange(step * self.clients, min((step + 1) * self.clients, population), dtype=np.int32)
        return rng.permute(self._words, epoch, population, index, np)
