"""Clients in proportion to their sizes, or to any weights.

Successive sampling: a client is drawn with probability in proportion to its weight, then another of those left, and so on
(B. Rosén, "Asymptotic theory for successive sampling with varying probabilities without replacement", 1972). The same
law as the weighted reservoir of P. S. Efraimidis and P. G. Spirakis, "Weighted random sampling with a reservoir", Information
Processing Letters 97(5), 2006, whose exponential keys take over here where drawing again would take long.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler

# Times that a little more than a cohort is drawn, before keys over the whole population are cheaper than drawing the same
# clients again.
_BATCHES = 4


class WeightedSampler(SeededSampler):
    """The same number of distinct clients every round, the heavier the likelier: by default in proportion to their examples.

    The first client drawn is i with probability w_i / sum of w, each next one likewise among those left. So the chance to
    be in a cohort of more than one grows with w_i, but not in proportion. Who samples by size and wants every example to
    count alike gives the algorithm ``weighting="uniform"``.

    Args:
      data: the population.
      clients: cohort size.
      seed: the run's seed, or its root key.
      weights: ``[population]``, not negative; default: the clients' sizes.

    Guarantees:
      - Exactly ``clients`` different clients, none of weight 0, by the law of successive sampling.
      - Cost: O(clients log(population)); O(population) in a round in which a few clients hold nearly all the weight.

    Raises:
      ValueError: weights that are negative, not finite, not one per client, or of which fewer than ``clients`` are
        positive; ``clients`` is not positive, or larger than the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(12)}, sizes=[5, 0, 4, 3])
    >>> sorted(WeightedSampler(data, clients=3, seed=0).cohort(0).client_ids)
    ['0', '2', '3']
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array, weights: Any = None) -> None:
        super().__init__(data, clients=clients, seed=seed)
        weights = np.asarray(data.sizes if weights is None else weights, np.float64)
        if weights.shape != (data.num_clients,):
            raise ValueError(f"Expected one weight for each of {data.num_clients} clients, got shape {list(weights.shape)}.")
        if not np.all(np.isfinite(weights)) or weights.min() < 0:
            worst = int(np.argmin(np.where(np.isfinite(weights), weights, -np.inf)))
            raise ValueError(f"Expected finite weights >= 0, got {weights[worst]} for client {data.client_ids[worst]!r}.")
        positive = np.flatnonzero(weights)
        if len(positive) < clients:
            raise ValueError(f"Only {len(positive)} clients have a weight above 0, too few for a cohort of clients={clients}.")
        self._weights, self._cumulative, self._last = weights, np.cumsum(weights), positive[-1]

    def _draw(self, round: int) -> np.ndarray:
        draw = self._generator(round)
        chosen = np.zeros(0, np.int64)
        for _ in range(_BATCHES):
            targets = draw.random(self.clients + self.clients // 8 + 4) * self._cumulative[-1]
            # A product may round up to the sum itself, which belongs to nobody.
            picks = np.minimum(np.searchsorted(self._cumulative, targets, side="right"), self._last)
            picks = np.concatenate([chosen, picks])
            _, first = np.unique(picks, return_index=True)
            chosen = picks[np.sort(first)]
            if len(chosen) >= self.clients:
                return chosen[: self.clients]
        return np.concatenate([chosen, self._others(draw, chosen)])

    def _others(self, draw: np.random.Generator, chosen: np.ndarray) -> np.ndarray:
        """The rest of the cohort: exponentials of rate w_i end in the order in which successive sampling draws."""
        weights = self._weights.copy()
        weights[chosen] = 0
        with np.errstate(divide="ignore"):
            ends = draw.standard_exponential(len(weights)) / weights
        missing = self.clients - len(chosen)
        first = np.argpartition(ends, missing - 1)[:missing]
        return first[np.argsort(ends[first])]
