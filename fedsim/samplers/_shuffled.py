"""Each client once an epoch."""

from __future__ import annotations

import numpy as np

from fedsim import rng
from fedsim.samplers._sampler import SeededSampler


class ShuffledSampler(SeededSampler):
    """The population in an order drawn anew for every epoch, a cohort after another: each client once an epoch.

    An epoch is ``ceil(population / clients)`` rounds. Its last cohort has whoever is left, so it may be smaller; none
    straddles two epochs, in which a client could come twice.

    Args:
      data: the population.
      clients: cohort size; an epoch's last may be smaller.
      seed: the run's seed, or its root key.

    Guarantees:
      - The cohorts of an epoch have every client exactly once.
      - Every epoch has an order of its own.
      - Cost: O(clients), whatever the population: no order is written down.

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
        epoch, part = divmod(round, -(-population // self.clients))
        index = np.arange(part * self.clients, min((part + 1) * self.clients, population), dtype=np.int32)
        return rng.permute(self._words, epoch, population, index, np)
