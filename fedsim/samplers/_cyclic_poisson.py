"""Poisson sampling of groups that take turns, as the amplification of banded noise for differential privacy assumes."""

from __future__ import annotations

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData
from fedsim.samplers._poisson import poisson_slots
from fedsim.samplers._sampler import SeededSampler


class CyclicPoissonSampler(SeededSampler):
    """Divides the clients into groups that take turns, and selects each client of the group with the same probability.

    It is algorithm 2 of C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private
    training", NeurIPS 2023: https://arxiv.org/abs/2306.08153. A client's rounds are a multiple of ``cycle`` apart, as
    `fedsim.aggregators.BandedToeplitz` needs it. The accountant assumes that nobody sees in which of them it takes part.

    Args:
      data: the population.
      clients: the expected number of clients in a round.
      cycle: the number of groups, and so of rounds until a group has its next turn.
      seed: the run's seed, or its root key.

    Attributes:
      clients: the number of slots, see `PoissonSampler`.
      cycle: the number of groups.
      probability: with which a client of the group takes part, ``clients * cycle / population``.

    Guarantees:
      - The groups are the same in all cycles, and their sizes differ by at most one.
      - Clients are independent, within a round and between rounds.
      - Cost: O(population / cycle), because the order is never stored.

    Raises:
      ValueError: an argument is not positive, or a group has fewer than ``clients`` clients.

    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> sampler = CyclicPoissonSampler(data, clients=5, cycle=4, seed=0)
    >>> cohorts = [set(cohort.client_ids) for cohort in sampler.rounds(5)]
    >>> sampler.probability, any(cohorts[0] & cohorts[i] for i in (1, 2, 3)), bool(cohorts[0] & cohorts[4])
    (0.2, False, True)
    """

    def __init__(self, data: FederatedData, *, clients: int, cycle: int, seed: int | jax.Array) -> None:
        checks.whole(1, clients=clients, remedy="give the expected number of clients in a round")
        checks.whole(1, cycle=cycle, remedy="give the number of groups that take turns")
        population = data.num_clients
        if clients * cycle > population:
            raise ValueError(
                f"Expected groups of at least clients={clients} of the {population:,} clients, got cycle={cycle} groups: give "
                "fewer clients in a round, or fewer groups."
            )
        self.cycle, self.probability = int(cycle), clients * cycle / population
        super().__init__(data, clients=poisson_slots(self.probability, -(-population // cycle)), seed=seed)

    def _draw(self, round: int) -> np.ndarray:
        population, turn = self.data.num_clients, round % self.cycle
        first, last = (place * population // self.cycle for place in (turn, turn + 1))
        group = rng.permute(self._words, 0, population, np.arange(first, last, dtype=np.int32), np)
        return group[self._generator(round).random(len(group)) < self.probability]
