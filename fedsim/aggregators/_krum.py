"""Krum and Multi-Krum.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NeurIPS 2017: https://arxiv.org/abs/1703.02757. ``attackers`` is the paper's f, and ``selected`` its m. Deviation: at
least two neighbours count. This makes a difference only for f = 0 and n = 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._rows import check_attackers, mean, squared_distances, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator, Update


def num_neighbours(exists: jax.Array, attackers: int) -> jax.Array:
    """Returns how many nearest updates count in a score: n - f - 2, and at least 2 if there are that many, ``int32 []``.

    With one neighbour, the two updates that are nearest to each other would always have the same score.
    """
    n = jnp.sum(exists)
    return jnp.clip(n - attackers - 2, jnp.minimum(2, n - 1), n)


@dataclasses.dataclass(frozen=True, eq=False)
class Krum(StackAggregator):
    """Selects the update with the smallest sum of squared distances to its n - f - 2 nearest updates.

    With ``selected`` m > 1 it is Multi-Krum: the mean of the m updates with the smallest sums. Clients count equally, whatever
    the algorithm's ``weighting``. In a round with fewer than 2f + 3 clients there is no guarantee.

    Attributes:
      attackers: f, the largest number of attackers in a cohort, at least 0.
      selected: m, the number of updates that are averaged, from 1 to the size of the cohort minus f. With ``attackers=0`` and
        all updates selected, the aggregate is the mean.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: cohorts have fewer than 2f + 3 or than f + m
        clients.

    >>> updates = jnp.array([[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [0.9, 1.3], [1e6, -1e6]])
    >>> Krum(attackers=1).combine(updates, weights=jnp.ones(5)).tolist() in updates[:4].tolist()
    True
    """

    not_differentiable = "selects updates"

    attackers: int
    selected: int = 1

    def __post_init__(self) -> None:
        checks.whole(0, attackers=self.attackers)
        checks.whole(1, selected=self.selected, remedy="the number of updates to average")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_attackers("Krum", self.attackers, slots, per_attacker=2)
        if self.selected > slots - self.attackers:
            raise ValueError(
                f"Expected selected <= {slots - self.attackers}, the cohort of {slots} minus attackers={self.attackers}, got "
                f"selected={self.selected}: a larger number would always include updates of attackers."
            )

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        exists = weights != 0
        nearest = jnp.sort(squared_distances(updates, exists, all_reduce), axis=1)
        counts = jnp.arange(len(weights)) < num_neighbours(exists, self.attackers)
        score = jnp.where(exists, jnp.sum(jnp.where(counts, nearest, 0), axis=1), jnp.inf)
        # If some clients of the cohort sent no update, at most n - f of the n updates are selected.
        most = jnp.maximum(jnp.sum(exists) - self.attackers, 1)
        place = jnp.argsort(jnp.argsort(score))
        chosen = (place < jnp.minimum(self.selected, most)) & exists
        return jax.tree.map(lambda rows: mean(widen(rows), chosen.astype(jnp.float32)), updates)
