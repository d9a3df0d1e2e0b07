"""Bulyan.

E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The hidden vulnerability of distributed learning in Byzantium", ICML 2018:
https://arxiv.org/abs/1802.07927. ``attackers`` is the paper's f. The paper does not specify what Krum does if so few updates
remain that n - f - 2 is below 2. Here at least two neighbours count. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._krum import num_neighbours
from fedsim.aggregators._rows import check_attackers, median_of_sorted, sort_rows, squared_distances, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator, Update


@dataclasses.dataclass(frozen=True, eq=False)
class Bulyan(StackAggregator):
    """Selects θ = n - 2f updates by repeated Krum, and averages the θ - 2f values nearest to the median in every coordinate.

    Krum may select a malicious update that differs from the others in only a few coordinates. The average in each coordinate
    limits the influence of such an update. Clients count equally, whatever the algorithm's ``weighting``. In a round with
    fewer than 4f + 3 clients there is no guarantee; at least one update is selected and at least one value averaged.

    Attributes:
      attackers: f, the largest number of attackers in a cohort, at least 0. With 0, the aggregate is the mean.

    Raises:
      ValueError: ``attackers`` is negative. Before the first round: cohorts have fewer than 4f + 3 clients.

    >>> updates = jnp.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [1e6]])
    >>> 2 <= Bulyan(attackers=1).combine(updates, weights=jnp.ones(7)).item() <= 5
    True
    """

    not_differentiable = "selects updates"

    attackers: int

    def __post_init__(self) -> None:
        checks.whole(0, attackers=self.attackers)

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_attackers("Bulyan", self.attackers, slots, per_attacker=4)

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        exists = weights != 0
        chosen = self._choose(squared_distances(updates, exists, all_reduce), exists)
        theta = jnp.sum(chosen)
        kept = jnp.maximum(theta - 2 * self.attackers, 1)

        def leaf(rows: jax.Array) -> jax.Array:
            ordered = sort_rows(widen(rows), chosen)
            median = median_of_sorted(ordered, theta)

            # The values nearest to the median are consecutive in sorted order. This finds where they start.
            def compare(place: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                far = jnp.maximum(median - ordered[place], ordered[place + kept - 1] - median)
                return jnp.where(far < best[1], place, best[0]), jnp.minimum(far, best[1])

            def add(place: jax.Array, sum: jax.Array) -> jax.Array:
                return jnp.where((place >= start) & (place < start + kept), sum + ordered[place], sum)

            none = jnp.zeros(median.shape, jnp.int32), jnp.full_like(median, jnp.inf)
            start, _ = jax.lax.fori_loop(0, theta - kept + 1, compare, none)
            return jax.lax.fori_loop(0, theta, add, jnp.zeros_like(median)) / kept.astype(ordered.dtype)

        return jax.tree.map(leaf, updates)

    def _choose(self, distances: jax.Array, exists: jax.Array) -> jax.Array:
        """Returns which updates Krum selects, ``bool [slots]``, one after another among the remaining ones."""
        order = jnp.argsort(distances, axis=1)
        nearest = jnp.take_along_axis(distances, order, axis=1)

        def choose(_: jax.Array, chosen: jax.Array) -> jax.Array:
            left = exists & ~chosen
            near = left[order]
            counts = near & (jnp.cumsum(near, axis=1) <= num_neighbours(left, self.attackers))
            score = jnp.where(left, jnp.sum(jnp.where(counts, nearest, 0), axis=1), jnp.inf)
            first = jnp.argmin(jnp.where(left, jnp.minimum(score, jnp.finfo(jnp.float32).max), jnp.inf))
            return chosen.at[first].set(left[first] | chosen[first])

        theta = jnp.clip(jnp.sum(exists) - 2 * self.attackers, 1, len(exists))
        return jax.lax.fori_loop(0, theta, choose, jnp.zeros_like(exists))
