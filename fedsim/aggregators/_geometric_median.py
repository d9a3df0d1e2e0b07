"""Geometric median, or RFA: robust federated aggregation.

K. Pillutla, S. M. Kakade, Z. Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on Signal Processing
2022 (the smoothed Weiszfeld algorithm): https://arxiv.org/abs/1912.13445. ``smoothing`` is its ν, ``iterations``
its R. Deviation: it stops by itself when it moves no more, and so by default goes nearer to the median than the paper's R = 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._rows import mean, squared_norms, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed, Update


@dataclasses.dataclass(frozen=True, eq=False)
class GeometricMedian(SideBySide):
    """The point of the least weighted sum of distances (not squared) to the updates.

    Weiszfeld's algorithm from the weighted mean v: again and again v becomes the mean of the updates u_i with weights
    w_i / max(ν, ‖v - u_i‖).

    Attributes:
      iterations: the most of these steps; the paper makes 3.
      smoothing: ν > 0, a distance below which an update's pull grows no more.
      tolerance: >= 0, stops when a step is smaller than this part of the updates' distance to v (its harmonic mean).

    Guarantees:
      - With less than half of the total weight against it, the aggregate is bounded by the honest updates alone, however large
        the others (given the steps to get there: each takes it a fixed part of the way back).

    Raises:
      ValueError: a number out of its range.

    >>> updates = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1e6, 1e6]])
    >>> bool(jnp.all(jnp.abs(GeometricMedian().combine(updates, weights=jnp.ones(5))) < 2))
    True
    """

    iterations: int = 100
    smoothing: float = 1e-6
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        checks.whole(1, iterations=self.iterations)
        checks.positive(smoothing=self.smoothing)
        checks.number(least=0, below=1, tolerance=self.tolerance)

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        updates = jax.tree.map(wide, updates)
        share = weights / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)

        def centre(weights: jax.Array) -> Update:
            return jax.tree.map(lambda rows: mean(rows, weights), updates)

        def step(carry: tuple[jax.Array, Update, jax.Array]) -> tuple[jax.Array, Update, jax.Array]:
            done, v, _ = carry
            distance = jnp.sqrt(summed(squared_norms(jax.tree.map(lambda rows, v: rows - v[None], updates, v))))
            pull = share / jnp.maximum(distance, self.smoothing)
            after = centre(pull)
            moved = jnp.sqrt(summed(tree.squared_norm(tree.subtract(after, v))))
            # Not the arithmetic mean: a single update far away would make any step a small one.
            return done + 1, after, moved * jnp.sum(pull) > self.tolerance

        start = jnp.int32(0), centre(share), jnp.array(True)
        return jax.lax.while_loop(lambda carry: carry[2] & (carry[0] < self.iterations), step, start)[1]
