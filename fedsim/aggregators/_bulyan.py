"""Bulyan.

E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The hidden vulnerability of distributed learning in Byzantium", ICML 2018:
https://arxiv.org/abs/1802.07927. ``attackers`` is its f. It leaves open what Krum does where few are left, and
n - f - 2 of them none or one: here it looks at two neighbours at least. No deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._krum import neighbours
from fedsim.aggregators._rows import check_attackers, in_order, middle, squared_distances, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed, Update


@dataclasses.dataclass(frozen=True, eq=False)
class Bulyan(SideBySide):
    """Krum, time after time, chooses θ = n - 2f updates; of these, each coordinate's θ - 2f nearest to the median are averaged.

    An attacker that Krum takes for one of many, since it differs in a few coordinates only, has little to say in these.
    Unweighted, whatever the algorithm's ``weighting``. In a round with fewer than 4f + 3 clients nothing is promised, and at
    least one update is chosen, and one value averaged.

    Attributes:
      attackers: f >= 0, the most that a cohort may hold. 0 is the mean.

    Raises:
      ValueError: a negative number; before the first round, cohorts of less than 4f + 3 clients.

    >>> updates = jnp.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [1e6]])
    >>> 2 <= Bulyan(attackers=1).combine(updates, weights=jnp.ones(7)).item() <= 5
    True
    """

    attackers: int

    def __post_init__(self) -> None:
        checks.whole(0, attackers=self.attackers)

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_attackers("Bulyan", self.attackers, slots, per_attacker=4)

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        exists = weights != 0
        chosen = self._choose(squared_distances(updates, exists, summed), exists)
        theta = jnp.sum(chosen)
        kept = jnp.maximum(theta - 2 * self.attackers, 1)

        def leaf(rows: jax.Array) -> jax.Array:
            ordered = in_order(wide(rows), chosen)
            median = middle(ordered, theta)

            # The nearest to the median stand side by side in order: from which place on do they reach least far?
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
        """Whom Krum chooses in turn, each time among those that are left, ``bool [slots]``."""
        order = jnp.argsort(distances, axis=1)
        nearest = jnp.take_along_axis(distances, order, axis=1)

        def choose(_: jax.Array, chosen: jax.Array) -> jax.Array:
            left = exists & ~chosen
            near = left[order]
            counts = near & (jnp.cumsum(near, axis=1) <= neighbours(left, self.attackers))
            score = jnp.where(left, jnp.sum(jnp.where(counts, nearest, 0), axis=1), jnp.inf)
            first = jnp.argmin(jnp.where(left, jnp.minimum(score, jnp.finfo(jnp.float32).max), jnp.inf))
            return chosen.at[first].set(left[first] | chosen[first])

        theta = jnp.clip(jnp.sum(exists) - 2 * self.attackers, 1, len(exists))
        return jax.lax.fori_loop(0, theta, choose, jnp.zeros_like(exists))
