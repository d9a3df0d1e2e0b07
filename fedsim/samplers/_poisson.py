"""Poisson sampling, which privacy accounting for differential privacy assumes.

Poisson subsampling: B. Balle, G. Barthe, M. Gaboardi, "Privacy amplification by subsampling: tight analyses via couplings
and divergences", NeurIPS 2018; in federated learning H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially
private recurrent language models", ICLR 2018: https://arxiv.org/abs/1807.01647, https://arxiv.org/abs/1710.06963.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler

# The probability that a round has more clients than slots is at most this.
_OVERFLOW = 1e-12


class PoissonSampler(SeededSampler):
    """Selects every client independently with the same probability, so the cohort size varies.

    A cohort may be empty; the round then changes nothing, unless the aggregator acts nevertheless, as a mechanism of
    differential privacy does. A cohort is never truncated, because that would invalidate the privacy accounting.

    Args:
      data: the population.
      probability: the probability that a client takes part in a round.
      seed: the run's seed, or its root key.

    Attributes:
      clients: the number of slots. It is chosen by Bernstein's inequality such that a round has more clients than slots less
        often than once in 10**12 rounds. Such a round gets more slots, and a separate program is compiled for it.

    Guarantees:
      - Clients are independent, within a round and between rounds.
      - Cost: O(probability * population), the expected cohort size.

    Raises:
      ValueError: ``probability`` is not in (0, 1].

    >>> data = FederatedData.from_arrays({"x": np.zeros(1000)}, sizes=[1] * 1000)
    >>> sampler = PoissonSampler(data, probability=0.003, seed=0)
    >>> [len(cohort) for cohort in sampler.rounds(6)], sampler.clients
    ([1, 5, 1, 6, 4, 4], 29)
    """

    def __init__(self, data: FederatedData, *, probability: float, seed: int | jax.Array) -> None:
        checks.number(
            above=0, most=1, probability=probability, remedy="it is the probability that a client takes part in a round"
        )
        super().__init__(data, clients=poisson_slots(probability, data.num_clients), seed=seed)
        self.probability = float(probability)

    def _draw(self, round: int) -> np.ndarray:
        population = self.data.num_clients
        if self.probability == 1:
            return np.arange(population)
        # The number of clients between two selected ones is geometric, so clients that are not selected cost nothing.
        draw, rate = self._generator(round), math.log1p(-self.probability)
        chosen, last = [], -1.0
        while last < population:
            skipped = np.floor(np.log1p(-draw.random(self.clients)) / rate)
            chosen.append(last + np.cumsum(np.minimum(skipped, population) + 1))
            last = chosen[-1][-1]
        positions = np.concatenate(chosen)
        return positions[positions < population].astype(np.int32)


def poisson_slots(probability: float, population: int) -> int:
    """Returns a number of slots that is too small less often than once in 10**12 rounds, by Bernstein's inequality.

    Args:
      probability: the mean of the clients' probabilities; their number varies most if all have this one.
      population: the number of clients, which are selected independently.
    """
    mean, log = probability * population, -math.log(_OVERFLOW)
    spread = log / 3 + math.sqrt(log**2 / 9 + 2 * log * mean * (1 - probability))
    return min(population, math.ceil(mean + spread))
