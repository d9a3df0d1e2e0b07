"""Geometric median, or RFA: robust federated aggregation.

K. Pillutla, S. M. Kakade, Z. Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on Signal Processing
2022 (the smoothed Weiszfeld algorithm): https://arxiv.org/abs/1912.13445. ``smoothing`` is the paper's ν, and ``iterations``
its R. Deviation: the algorithm stops at convergence, so by default the result is closer to the median than with the paper's
R = 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._rows import fixed_point, mean, squared_norms, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator, Update


@dataclasses.dataclass(frozen=True, eq=False)
class GeometricMedian(StackAggregator):
    """The point that minimizes the weighted sum of the Euclidean distances (not squared) to the updates.

    It is computed by Weiszfeld's algorithm. v starts at the weighted mean. Each iteration sets v to the mean of the updates
    u_i with weights w_i / max(ν, ‖v - u_i‖).

    Attributes:
      iterations: the largest number of iterations. The paper uses 3.
      smoothing: ν, from 1e-18 to 1e18: its square is a ``float32``. At distances below ν the weight of an update no longer
        increases.
      tolerance: in [0, 1). Iterations stop when a step is shorter than ``tolerance`` times the harmonic mean of the distances
        of the updates to v.

    Guarantees:
      - If attackers have less than half of the total weight, the honest updates alone bound the aggregate, however large the
        other updates are. This needs enough iterations, because each one removes a fixed fraction of the error.

    Raises:
      ValueError: an attribute is out of its range.

    >>> updates = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1e6, 1e6]])
    >>> bool(jnp.all(jnp.abs(GeometricMedian().combine(updates, weights=jnp.ones(5))) < 2))
    True
    """

    iterations: int = 100
    smoothing: float = 1e-6
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        checks.whole(1, iterations=self.iterations)
        checks.number(least=1e-18, most=1e18, smoothing=self.smoothing)
        checks.number(least=0, below=1, tolerance=self.tolerance)

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        updates = jax.tree.map(widen, updates)
        share = weights / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)

        def centre(weights: jax.Array) -> Update:
            return jax.tree.map(lambda rows: mean(rows, weights), updates)

        def scaled(v: Update) -> jax.Array:
            squares = all_reduce(squared_norms(jax.tree.map(lambda rows, v: rows - v[None], updates, v)))
            return share / jnp.sqrt(jnp.maximum(squares, jnp.square(self.smoothing)))

        def step(carry: tuple[jax.Array, Update, jax.Array, jax.Array]) -> tuple[jax.Array, Update, jax.Array, jax.Array]:
            done, v, _, _ = carry
            weights = scaled(v)
            after = centre(weights)
            step_length = jnp.sqrt(all_reduce(tree.squared_norm(tree.subtract(after, v))))
            # With the arithmetic mean of the distances, a single distant update would make every step look short.
            return done + 1, after, weights, step_length * jnp.sum(weights) > self.tolerance

        first = jnp.int32(0), *jax.lax.stop_gradient((centre(share), share)), jnp.array(True)
        found = jax.lax.while_loop(lambda carry: carry[3] & (carry[0] < self.iterations), step, first)[2]
        return centre(fixed_point(lambda weights: scaled(centre(weights)), found))
