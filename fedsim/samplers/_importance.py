"""Optimal client sampling: independent, by the norms of updates, with weights that make the mean unbiased.

W. Chen, S. Horváth, P. Richtárik, "Optimal client sampling for federated learning", 2020: https://arxiv.org/abs/2010.13723.
With n clients, weights w_i and updates U_i, the estimate G = sum over the cohort of w_i U_i / p_i is unbiased for any
probabilities p_i > 0. Among those with sum m, its variance is least for

    p_i = (m + l - n) |w_i U_i| / sum over j <= l of |w_j U_j|    if i <= l,    and 1 otherwise,

where the norms |w_i U_i| increase with i, and l is the largest number with 0 < m + l - n <= sum over i <= l of |w_i U_i| /
|w_l U_l|.

Deviations: In the paper all available clients train, and then send the norms of their updates of this round. Here a norm is
that of the last update that the server has had of a client, so no others train; the estimate stays unbiased, and its variance
is larger than the least. Clients without one count with the mean of the known norms. The probabilities are mixed with equal
ones, so that they are positive.
"""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np

from fedsim import checks
from fedsim.data import Arrivals, FederatedData
from fedsim.samplers._observation import Observation
from fedsim.samplers._poisson import poisson_slots
from fedsim.samplers._power_of_choice import known_or
from fedsim.samplers._steered import SteeredSampler


class ImportanceByNorm(SteeredSampler):
    """Selects each client independently, more likely after large updates, with weights 1 / p (Chen et al. 2020).

    The updates of a cohort are scaled such that their mean is an unbiased estimate of the mean update of the population, as
    ``Cohort.arrivals`` says. So the algorithm needs ``staleness=fedsim.Staleness(bound=0)``, ``update_norms=True``, the same
    ``weighting``, and an aggregator that takes the mean. A cohort may be empty; the round then changes nothing. An update
    that is dropped biases its round.

    Args:
      data: the population.
      clients: m, the expected cohort size.
      seed: the run's seed, or its root key.
      weighting: that of the algorithm: the weight of a client is its number of examples, or 1.
      exploration: the share of equal probabilities, in (0, 1]; 1 is Poisson sampling with unbiased weights.

    Attributes:
      observes: ``("update_norm",)``.
      clients: the number of slots, as that of `PoissonSampler`.
      expected: the expected cohort size.

    Guarantees:
      - Clients are independent within a round, given the rounds before. Clients without examples are not selected.
      - Cost: O(population log(population)) per round.

    Raises:
      ValueError: there are fewer clients with examples than ``clients``; ``exploration`` is outside (0, 1]; see
      `SteeredSampler`.

    >>> data = FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1, 1, 1, 1])
    >>> sampler = ImportanceByNorm(data, clients=2, seed=0, exploration=0.2)
    >>> sampler.probabilities(0).tolist()
    [0.5, 0.5, 0.5, 0.5]
    >>> seen = Observation(np.arange(4), {"update_norm": np.array([1.0, 1.0, 2.0, 9.0])})
    >>> np.round(sampler.observe(seen).probabilities(1), 3).tolist()
    [0.3, 0.3, 0.5, 0.9]
    """

    observes = ("update_norm",)

    def __init__(
        self,
        data: FederatedData,
        *,
        clients: int,
        seed: int | jax.Array,
        weighting: Literal["examples", "uniform"] = "examples",
        exploration: float = 0.1,
    ) -> None:
        checks.whole(1, clients=clients, remedy="give the expected number of clients per round")
        checks.one_of("examples", "uniform", weighting=weighting)
        checks.number(above=0, most=1, exploration=exploration, remedy="it is a share, and every client needs a chance")
        sizes = np.asarray(data.sizes, np.float64)
        weights = sizes if weighting == "examples" else (sizes > 0).astype(np.float64)
        self._trainable = np.flatnonzero(weights)
        if clients > (most := len(self._trainable)):
            raise ValueError(f"Expected clients <= {most}, the clients with examples, got clients={clients}: give fewer.")
        super().__init__(data, clients=poisson_slots(clients / most, most), seed=seed)
        self.expected, self.weighting, self.exploration = int(clients), weighting, float(exploration)
        self._weights = weights / weights.sum()

    def begin(self) -> np.ndarray:
        """Returns the norm of each client's last update, NaN."""
        return np.full(self.data.num_clients, np.nan)

    def learn(self, memory: np.ndarray, round: int, observation: Observation) -> np.ndarray:
        """Replaces the norms of a round's clients."""
        memory[observation.clients] = known_or(observation.values["update_norm"], memory[observation.clients])
        return memory

    def probabilities(self, round: int) -> np.ndarray:
        """Returns the probability of each client to take part in a round, ``float64 [population]``."""
        return self._probabilities(self.memory(round))

    def _probabilities(self, norms: np.ndarray) -> np.ndarray:
        clients = self._trainable
        known = norms[np.isfinite(norms)]
        filled = known_or(norms, np.full(len(norms), known.mean() if len(known) else 1.0))
        equal, mixed = self.expected / len(clients), np.zeros(len(norms))
        best = least_variance(filled[clients] * self._weights[clients], self.expected)
        mixed[clients] = (1 - self.exploration) * best + self.exploration * equal
        return mixed

    def choose(self, round: int, memory: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Returns clients that are selected independently."""
        return np.flatnonzero(draw.random(len(memory)) < self._probabilities(memory))

    def _arrivals(self, round: int, chosen: np.ndarray) -> Arrivals:
        # The aggregator divides by the total weight of the cohort, and the estimate by that of the population.
        scales = self._weights[chosen].sum() / self.probabilities(round)[chosen]
        return Arrivals.of(np.zeros(len(chosen)), round=round, scales=scales)


def least_variance(norms: np.ndarray, total: float) -> np.ndarray:
    """Returns the optimal probabilities, ``[n]``, with a given sum, for the norms of weighted updates.

    >>> least_variance(np.array([1.0, 1.0, 10.0]), 2).tolist()
    [0.5, 0.5, 1.0]
    """
    order, n = np.argsort(norms, kind="stable"), len(norms)
    ordered, sums = norms[order], np.cumsum(norms[order])
    numbers = np.arange(1, n + 1)
    fits = (total + numbers - n > 0) & ((total + numbers - n) * ordered <= sums * (1 + 1e-12))
    last = int(numbers[fits][-1])
    probabilities = np.ones(n)
    share = ordered[:last] / sums[last - 1] if sums[last - 1] > 0 else np.full(last, 1 / last)
    probabilities[order[:last]] = np.minimum((total + last - n) * share, 1.0)
    return probabilities
