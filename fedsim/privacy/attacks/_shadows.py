"""`ShadowSampler`: runs in which a random half of the population takes part, for membership inference of clients."""

from __future__ import annotations

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData
from fedsim.samplers import UniformSampler


class ShadowSampler(UniformSampler):
    """Samples distinct clients uniformly from the half of the population that its seed draws.

    With `fedsim.population`, one seed is the run that is attacked and the others are the shadow runs of
    `likelihood_ratios`, all in one program.

    Args:
      data: the population.
      clients: the cohort size, at most half of the population.
      seed: draws the half; the cohorts, and all else that a run draws, follow from it, too.

    Attributes:
      members: ``bool [num_clients]``, who takes part.

    Raises:
      ValueError: ``clients`` is not positive, or larger than half of the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(10)}, sizes=[1] * 10)
    >>> sampler = ShadowSampler(data, clients=3, seed=0)
    >>> int(sampler.members.sum()), all(sampler.members[sampler.cohort(round).clients].all() for round in range(9))
    (5, True)
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        super().__init__(data, clients=clients, seed=seed)
        half = data.num_clients // 2
        checks.whole(1, half, clients=clients, remedy="half of the population takes part")
        words = np.asarray(rng.words(rng.stream(self.key, "members")))
        self._half = np.sort(rng.permute(words, 0, data.num_clients, np.arange(half, dtype=np.int32), np))
        self.members = np.isin(np.arange(data.num_clients), self._half)

    def _draw(self, round: int) -> np.ndarray:
        index = np.arange(self.clients, dtype=np.int32)
        return self._half[rng.permute(self._words, round, len(self._half), index, np)].astype(np.int32)
