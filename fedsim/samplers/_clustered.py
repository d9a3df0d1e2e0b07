"""Clustered sampling, by the clients' sizes.

Y. Fraboni, R. Vidal, L. Kameni, M. Lorenzi, "Clustered sampling: low-variance and improved representativity for clients
selection in federated learning", ICML 2021: https://arxiv.org/abs/2105.05883, algorithm 1. The clients, the largest first,
are laid on a line, each with m times its number of examples, and the line is cut into m urns of equal length. Each urn draws
one client, with probability proportional to its part of the urn, and the server takes the plain mean of the m updates. The
mean is that of all clients weighted by size, as if m clients were drawn with replacement by size, its variance is at most as
large, and no client is drawn more often than its length in urns, rounded up, plus one. Deviations: none. Algorithm 2, whose
urns are clusters of similar updates, is not here, because it needs the updates of all clients.
"""

from __future__ import annotations

import jax
import numpy as np

from fedsim import checks
from fedsim.data import Arrivals, FederatedData
from fedsim.samplers._sampler import SeededSampler


class ClusteredSampling(SeededSampler):
    """Draws one client from each of some groups of clients of equal total size (Fraboni et al. 2021, algorithm 1).

    A client that is drawn from two groups is in the cohort once and has twice the weight, as ``Cohort.arrivals`` says, so the
    algorithm needs ``staleness=fedsim.Staleness(bound=0)``, and ``weighting="uniform"``, because clients are drawn by size.
    `SCAFFOLD`, `FedDC` and `FedDyn` cannot be run with it, because of what their clients keep.

    Args:
      data: the population.
      clients: m, the number of groups, and so the largest number of clients in a cohort.
      seed: the run's seed, or its root key.

    Attributes:
      weighting: ``"uniform"``, that of the algorithm with which the mean is unbiased.

    Guarantees:
      - The expected weights of the clients in a cohort are ``clients`` times their shares of the examples.
      - Cost: O(clients log(population)) per round.

    Raises:
      ValueError: no client has examples; ``clients`` is not positive, or larger than the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(8)}, sizes=[4, 1, 1, 1, 1])
    >>> sampler = ClusteredSampling(data, clients=2, seed=0)
    >>> ["0" in cohort.client_ids for cohort in sampler.rounds(3)], len(sampler.cohort(0))  # half of the examples are its own
    ([True, True, True], 2)
    """

    weighting = "uniform"
    repeats = True  # A client may be drawn twice for a round.

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        super().__init__(data, clients=clients, seed=seed)
        checks.whole(1, examples=data.num_examples, remedy="give clients with examples")
        self._order = np.argsort(-data.sizes, kind="stable")
        self._ends = np.cumsum(data.sizes[self._order].astype(np.int64)) * self.clients

    def _drawn(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the clients of a round without duplicates, and from how many groups each was drawn."""
        total = self.data.num_examples
        places = np.arange(self.clients) * total + self._generator(round).integers(0, total, self.clients)
        return np.unique(self._order[np.searchsorted(self._ends, places, side="right")], return_counts=True)

    def _draw(self, round: int) -> np.ndarray:
        return self._drawn(round)[0]

    def _arrivals(self, round: int, chosen: np.ndarray) -> Arrivals:
        return Arrivals.of(np.zeros(len(chosen)), round=round, weights=self._drawn(round)[1])
