"""Divide and conquer.

V. Shejwalkar, A. Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for federated
learning", NDSS 2021, algorithm 2 (DnC): https://doi.org/10.14722/ndss.2021.24498. ``attackers`` is the paper's m, ``factor``
its c, ``iterations`` its niters, and ``coordinates`` its b. Deviation: the paper averages the updates that remain in all
iterations. If there are none, here those count that were removed least often.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.aggregators._aggregator import Memory, Update
from fedsim.aggregators._rows import mean, widen
from fedsim.aggregators._stack import StackAggregator, StackedUpdates


@dataclasses.dataclass(frozen=True, eq=False)
class DivideAndConquer(StackAggregator):
    """The mean without the factor * f updates that deviate most along the direction in which the updates differ most.

    Attackers that shift the mean cause most of the variance. In each iteration ``coordinates`` random coordinates are drawn
    from the round's key. There, an update's score is its squared projection, after the mean was subtracted, on the first
    principal component of the updates. Those with the ceil(factor * f) largest scores are removed. Clients count equally,
    whatever the algorithm's ``weighting``.

    Attributes:
      attackers: f, the largest number of attackers in a cohort, at least 0. With 0, the aggregate is the mean.
      factor: c, how many updates are removed per attacker, positive.
      iterations: the number of times that coordinates are drawn, at least 1.
      coordinates: the number of coordinates of a draw, at least 1; all, if an update has fewer.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: cohorts have no more clients than are removed.

    >>> updates = jnp.array([[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [0.9, 1.0], [9.0, -5.0]])
    >>> chosen = DivideAndConquer(attackers=1).remaining(updates, jnp.ones(5), jax.random.key(0))
    >>> chosen.tolist()
    [True, True, True, True, False]
    """

    not_differentiable = "selects updates"

    attackers: int
    factor: float = 1.0
    iterations: int = 1
    coordinates: int = 10_000

    def __post_init__(self) -> None:
        checks.whole(0, attackers=self.attackers)
        checks.positive(factor=self.factor, remedy="how many updates are removed per attacker")
        checks.whole(1, iterations=self.iterations, coordinates=self.coordinates)

    @property
    def _removed(self) -> int:
        # The product may be above a whole number by rounding, as 1.1 * 10 is.
        return math.ceil(self.factor * self.attackers - 1e-9)

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        if slots <= self._removed:
            raise ValueError(
                f"DivideAndConquer(attackers={self.attackers}, factor={self.factor}) removes {self._removed} updates, and "
                f"needs cohorts of more clients, got cohorts of {slots}: use larger cohorts, or fewer attackers."
            )

    def remaining(self, updates: Update, weights: jax.Array, key: jax.Array) -> jax.Array:
        """Returns which of the updates, leaves ``[slots, ...]``, are averaged, ``bool [slots]``.

        Args:
          updates: the updates; those of weight 0 do not count.
          weights: ``float32 [slots]``.
          key: the key of the draws of coordinates.
        """
        exists = weights != 0
        kept = jnp.maximum(jnp.sum(exists) - self._removed, 1)

        def remove(iteration: jax.Array, times: jax.Array) -> jax.Array:
            rows = _drawn_coordinates(updates, self.coordinates, rng.words(key), iteration)
            rows = jnp.where(exists[:, None], rows - mean(rows, exists.astype(jnp.float32))[None], 0)
            rows = rows / jnp.maximum(jnp.max(jnp.abs(rows)), jnp.finfo(rows.dtype).tiny)  # Otherwise squares may overflow.
            # The projections on the first right singular vector are proportional to the first left one, which is an eigenvector
            # of the small matrix of inner products.
            products = jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)
            scores = jnp.square(jnp.linalg.eigh(products)[1][:, -1])
            place = jnp.argsort(jnp.argsort(jnp.where(exists, scores, jnp.inf)))
            return times + (place >= kept).astype(jnp.int32)

        times = jax.lax.fori_loop(0, self.iterations, remove, jnp.zeros(len(weights), jnp.int32))
        return exists & (times == jnp.min(jnp.where(exists, times, self.iterations)))

    def finish_round(self, accumulator: StackedUpdates, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        updates, weights = self.stacked(accumulator)
        chosen = self.remaining(updates, weights, rng.stream(key, "coordinates")).astype(jnp.float32)
        return jax.tree.map(lambda rows: mean(widen(rows), chosen), updates), memory


def _drawn_coordinates(updates: Update, most: int, words: jax.Array, draw: jax.Array) -> jax.Array:
    """Returns ``most`` random coordinates of every row, without replacement, ``float32 [slots, coordinates]``."""
    leaves = [widen(rows).reshape(len(rows), -1) for rows in jax.tree.leaves(updates) if rows.size]
    size = sum(leaf.shape[1] for leaf in leaves)
    at = rng.permute(words, draw, size, jnp.arange(min(most, size), dtype=jnp.int32)).astype(jnp.int32)
    drawn, first = jnp.zeros((len(leaves[0]), len(at)), jnp.float32), 0
    for leaf in leaves:
        inside = (at >= first) & (at < first + leaf.shape[1])
        drawn = jnp.where(inside[None], leaf[:, jnp.where(inside, at - first, 0)].astype(jnp.float32), drawn)
        first += leaf.shape[1]
    return drawn
