"""Sampling without replacement in proportion to the clients' sizes, or to any weights.

Successive sampling: a client is drawn with probability proportional to its weight, then another one from the remaining clients,
and so on (B. Rosén, "Asymptotic theory for successive sampling with varying probabilities without replacement", 1972). The
distribution is that of the weighted reservoir of P. S. Efraimidis and P. G. Spirakis, "Weighted random sampling with a
reservoir", Information Processing Letters 97(5), 2006, whose exponential keys are used here when rejection would be slow.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler

# After this many attempts to draw a cohort with replacement, exponential keys of the whole population are cheaper than drawing
# the same clients again.
_ATTEMPTS = 4


class WeightedSampler(SeededSampler):
    """Samples a fixed number of distinct clients per round by weight, by default in proportion to their numbers of examples.

    The first client is i with probability w_i / sum of w, and every further client is drawn in the same way from the remaining
    ones. For cohorts of more than one client, the probability to take part increases with w_i, but not in proportion to it.
    When sampling by size, give the algorithm ``weighting="uniform"``, so that every example has the same influence.

    Args:
      data: the population.
      clients: the cohort size.
      seed: the run's seed, or its root key.
      weights: ``[population]``, not negative. Default: the clients' numbers of examples.

    Guarantees:
      - A cohort has exactly ``clients`` distinct clients of positive weight, by successive sampling.
      - Cost: O(clients log(population)); O(population) in a round in which a few clients have nearly all the weight.

    Raises:
      ValueError: a weight is negative or not finite; there is not one weight per client; fewer than ``clients`` weights are
        positive; ``clients`` is not positive, or larger than the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(12)}, sizes=[5, 0, 4, 3])
    >>> sorted(WeightedSampler(data, clients=3, seed=0).cohort(0).client_ids)
    ['0', '2', '3']
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array, weights: Any = None) -> None:
        super().__init__(data, clients=clients, seed=seed)
        checks.unmasked(weights=weights)
        weights = np.asarray(data.sizes if weights is None else weights, np.float64)
        if weights.shape != (data.num_clients,):
            raise ValueError(
                f"Expected weights of shape [{data.num_clients}], one per client, got shape {list(weights.shape)}."
            )
        if not np.all(np.isfinite(weights)) or weights.min() < 0:
            worst = int(np.argmin(np.where(np.isfinite(weights), weights, -np.inf)))
            raise ValueError(f"Expected finite weights >= 0, got {weights[worst]} for client {data.client_ids[worst]!r}.")
        positive = np.flatnonzero(weights)
        if len(positive) < clients:
            raise ValueError(
                f"Only {len(positive)} clients have a weight above 0, too few for a cohort of clients={clients}: give at most "
                f"clients={len(positive)}, or more positive weights."
            )
        self._weights, self._cumulative, self._last = weights, np.cumsum(weights), positive[-1]

    def _draw(self, round: int) -> np.ndarray:
        draw = self._generator(round)
        chosen = np.zeros(0, np.int64)
        for _ in range(_ATTEMPTS):
            targets = draw.random(self.clients + self.clients // 8 + 4) * self._cumulative[-1]
            # A product may round up to the sum itself, which is outside every client's interval.
            picks = np.minimum(np.searchsorted(self._cumulative, targets, side="right"), self._last)
            picks = np.concatenate([chosen, picks])
            _, first = np.unique(picks, return_index=True)
            chosen = picks[np.sort(first)]
            if len(chosen) >= self.clients:
                return chosen[: self.clients]
        return np.concatenate([chosen, self._draw_remaining(draw, chosen)])

    def _draw_remaining(self, draw: np.random.Generator, chosen: np.ndarray) -> np.ndarray:
        """Completes the cohort: sorted exponentials of rate w_i have the order of successive sampling."""
        weights = self._weights.copy()
        weights[chosen] = 0
        return successive(draw, weights, self.clients - len(chosen))


def successive(draw: np.random.Generator, weights: np.ndarray, count: int) -> np.ndarray:
    """Returns ``count`` of some positions by successive sampling with these weights; those of weight 0 come last."""
    if not count:
        return np.zeros(0, np.int64)
    with np.errstate(divide="ignore", over="ignore"):
        keys = draw.standard_exponential(len(weights)) / weights
    first = np.argpartition(keys, count - 1)[:count]
    return first[np.argsort(keys[first])]
