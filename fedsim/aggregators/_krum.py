"""Krum and Multi-Krum.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NeurIPS 2017: https://arxiv.org/abs/1703.02757. ``attackers`` is its f, ``selected`` its m.
Deviation: at least two neighbours are looked at, which differs for f = 0 and n = 3 only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._rows import check_attackers, mean, squared_distances, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed, Update


def neighbours(exists: jax.Array, attackers: int) -> jax.Array:
    """How many of a client's nearest are looked at: n - f - 2, but two if there are, ``int32 []``.

    By one alone, the two that are nearest to each other would always be equally good.
    """
    n = jnp.sum(exists)
    return jnp.clip(n - attackers - 2, jnp.minimum(2, n - 1), n)


@dataclasses.dataclass(frozen=True, eq=False)
class Krum(SideBySide):
    """The update that lies closest to the others: the least sum of squared distances to its n - f - 2 nearest.

    With ``selected`` m > 1, Multi-Krum: the mean of the m updates of the least such sums. Unweighted, whatever the algorithm's
    ``weighting``. In a round with fewer than 2f + 3 clients nothing is promised.

    Attributes:
      attackers: f >= 0, the most that a cohort may hold.
      selected: m >= 1, how many updates are averaged; at most the cohort less the attackers. ``attackers=0`` with all
        selected is the mean.

    Raises:
      ValueError: a number out of its range; before the first round, cohorts of less than 2f + 3 clients, or of less than
        f + m.

    >>> updates = jnp.array([[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [0.9, 1.3], [1e6, -1e6]])
    >>> Krum(attackers=1).combine(updates, weights=jnp.ones(5)).tolist() in updates[:4].tolist()
    True
    """

    attackers: int
    selected: int = 1

    def __post_init__(self) -> None:
        checks.whole(0, attackers=self.attackers)
        checks.whole(1, selected=self.selected, remedy="how many updates to average")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_attackers("Krum", self.attackers, slots, per_attacker=2)
        if self.selected > slots - self.attackers:
            raise ValueError(
                f"Expected selected <= {slots - self.attackers}, the cohort of {slots} less attackers={self.attackers}, got "
                f"selected={self.selected}: more would take in attackers for sure."
            )

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        exists = weights != 0
        nearest = jnp.sort(squared_distances(updates, exists, summed), axis=1)
        counts = jnp.arange(len(weights)) < neighbours(exists, self.attackers)
        score = jnp.where(exists, jnp.sum(jnp.where(counts, nearest, 0), axis=1), jnp.inf)
        # In a round that not all have come to, no more than n - f.
        most = jnp.maximum(jnp.sum(exists) - self.attackers, 1)
        place = jnp.argsort(jnp.argsort(score))
        chosen = (place < jnp.minimum(self.selected, most)) & exists
        return jax.tree.map(lambda rows: mean(wide(rows), chosen.astype(jnp.float32)), updates)
