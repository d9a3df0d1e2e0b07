"""Coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML
2018, definition 2: https://arxiv.org/abs/1803.01498. ``trim`` is the paper's β. Deviation: the remaining values are weighted by
the clients' weights. In the paper all weights are equal (``weighting="uniform"``).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.aggregators._rows import sort_rows, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator, Update


class _Sums(NamedTuple):
    """Sums over the values of each coordinate, relative to the smallest and the largest value that is kept (the bounds).

    Attributes:
      value, weight: the weighted sum, and the sum of the weights, of the values strictly between the bounds.
      below, above: the number of values below the lower bound, and above the upper bound.
      at_low, at_high: the number of values equal to each bound.
      low_weight, high_weight: the sum of the weights of the values equal to each bound.
    """

    value: jax.Array
    weight: jax.Array
    below: jax.Array
    at_low: jax.Array
    low_weight: jax.Array
    above: jax.Array
    at_high: jax.Array
    high_weight: jax.Array


def _share(beyond: jax.Array, at: jax.Array, cut: jax.Array, n: jax.Array) -> jax.Array:
    """Returns the fraction of the values at a bound that are kept, if ``cut`` of n values are removed at each end."""
    return (jnp.minimum(beyond + at, n - cut) - cut) / jnp.maximum(at, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class TrimmedMean(StackAggregator):
    """The weighted mean without the floor(trim * n) largest and the floor(trim * n) smallest values, in every coordinate.

    Values are removed by number and not by weight, so a client has no more influence on what is removed if it reports many
    examples. If only some of several equal values have to be removed, the weight of each of them is reduced by the same factor.

    Attributes:
      trim: the fraction of the clients that is removed at each end, in [0, 0.5). With 0, the aggregate is the mean. A warning
        says if the fraction of the largest cohort is less than one client, so that nobody is removed.

    Guarantees:
      - If at most floor(trim * n) clients are attackers, every coordinate lies between the values of two honest clients.

    Raises:
      ValueError: ``trim`` is out of its range.

    >>> trimmed = TrimmedMean(0.25)
    >>> trimmed.combine(jnp.array([1.0, 2.0, 4.0, 1e6]), weights=jnp.ones(4)).item()
    3.0
    """

    not_differentiable = "sorts the updates"

    trim: float = 0.1

    def __post_init__(self) -> None:
        checks.number(least=0, below=0.5, trim=self.trim, remedy="the fraction of the clients to remove at each end")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        if self.trim and not self._removed(slots)[-1]:
            warnings.warn(
                f"TrimmedMean(trim={self.trim}) removes floor({self.trim} * {slots}) = 0 of {slots} updates at each end, so it "
                f"is the mean: give trim >= {1 / slots:.3g}, or larger cohorts.",
                stacklevel=2,
            )

    def _removed(self, slots: int) -> np.ndarray:
        """Returns how many of 0 to ``slots`` updates are removed at each end, ``float64 [slots + 1]``."""
        # In float64, because in float32 the product of 0.29 and 100 may be below 29.
        return np.floor(self.trim * np.arange(slots + 1) + 1e-9)

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        exists = weights != 0
        n = jnp.sum(exists)
        cut = jnp.asarray(self._removed(len(weights)), jnp.int32)[n]

        def leaf(rows: jax.Array) -> jax.Array:
            rows = widen(rows)
            ordered = sort_rows(rows, exists)
            low, high = ordered[cut], ordered[jnp.maximum(n - 1 - cut, 0)]

            # One client after another, because XLA's sum along the first axis is not vectorized on a CPU.
            def add(slot: jax.Array, sums: _Sums) -> _Sums:
                x, weight, valid = rows[slot], weights[slot].astype(rows.dtype), exists[slot]
                inside, at_low, at_high = valid & (x > low) & (x < high), valid & (x == low), valid & (x == high)
                return _Sums(
                    jnp.where(inside, sums.value + weight * x, sums.value),
                    jnp.where(inside, sums.weight + weight, sums.weight),
                    sums.below + (valid & (x < low)).astype(jnp.int32),
                    sums.at_low + at_low.astype(jnp.int32),
                    jnp.where(at_low, sums.low_weight + weight, sums.low_weight),
                    sums.above + (valid & (x > high)).astype(jnp.int32),
                    sums.at_high + at_high.astype(jnp.int32),
                    jnp.where(at_high, sums.high_weight + weight, sums.high_weight),
                )

            value, counts = jnp.zeros_like(low), jnp.zeros(low.shape, jnp.int32)
            sums = _Sums(value, value, counts, counts, value, counts, counts, value)
            sums = jax.lax.fori_loop(0, len(weights), add, sums)
            low_weight = sums.low_weight * _share(sums.below, sums.at_low, cut, n).astype(rows.dtype)
            high_weight = sums.high_weight * _share(sums.above, sums.at_high, cut, n).astype(rows.dtype)
            high_weight = jnp.where(high > low, high_weight, 0)
            weight = jnp.maximum(sums.weight + low_weight + high_weight, jnp.finfo(rows.dtype).tiny)
            # Weights are divided first, so that no product of a weight and a large value overflows.
            kept = sums.value / weight + low * (low_weight / weight) + high * (high_weight / weight)
            return jnp.where(n == 0, 0, jnp.clip(kept, low, high))

        return jax.tree.map(leaf, updates)
