"""Coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML
2018, definition 2: https://arxiv.org/abs/1803.01498. ``trim`` is its β. Deviation: what is left is averaged by the clients'
weights, which in the paper are equal (``weighting="uniform"``).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.aggregators._rows import in_order, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed, Update


class _Sums(NamedTuple):
    """Of a coordinate's values inside the borders: sum and weight; beyond and at either border: number and weight."""

    value: jax.Array
    weight: jax.Array
    below: jax.Array
    at_low: jax.Array
    low_weight: jax.Array
    above: jax.Array
    at_high: jax.Array
    high_weight: jax.Array


def _share(beyond: jax.Array, at: jax.Array, cut: jax.Array, n: jax.Array) -> jax.Array:
    """The part of the values at a border that are on its inner side, when ``cut`` of n are left out at either end."""
    return (jnp.minimum(beyond + at, n - cut) - cut) / jnp.maximum(at, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class TrimmedMean(SideBySide):
    """In every coordinate, the weighted mean without the largest and the smallest values: floor(trim * n) of each.

    Values are left out by their number and not by their weight, so a client gains no say over what is left out by claiming
    many examples. Equal values at the border, of which some are left out, share what is left of their places alike.

    Attributes:
      trim: the part of the clients at either end, in [0, 0.5). 0 is the mean.

    Guarantees:
      - With at most floor(trim * n) of the clients against it, every coordinate lies between two honest clients' values.

    Raises:
      ValueError: ``trim`` out of its range.

    >>> trimmed = TrimmedMean(0.25)
    >>> trimmed.combine(jnp.array([1.0, 2.0, 4.0, 1e6]), weights=jnp.ones(4)).item()
    3.0
    """

    trim: float = 0.1

    def __post_init__(self) -> None:
        checks.number(least=0, below=0.5, trim=self.trim, remedy="the part to leave out at either end")

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        exists = weights != 0
        n = jnp.sum(exists)
        # By a table, for 0.29 of 100 is 29 whatever float32 makes of it.
        cut = jnp.asarray(np.floor(self.trim * np.arange(len(weights) + 1) + 1e-9), jnp.int32)[n]

        def leaf(rows: jax.Array) -> jax.Array:
            rows = wide(rows)
            ordered = in_order(rows, exists)
            low, high = ordered[cut], ordered[jnp.maximum(n - 1 - cut, 0)]

            # One client after another: XLA's sum along the first axis goes value by value on a CPU.
            def add(slot: jax.Array, sums: _Sums) -> _Sums:
                x, weight, there = rows[slot], weights[slot].astype(rows.dtype), exists[slot]
                inside, at_low, at_high = there & (x > low) & (x < high), there & (x == low), there & (x == high)
                return _Sums(
                    jnp.where(inside, sums.value + weight * x, sums.value),
                    jnp.where(inside, sums.weight + weight, sums.weight),
                    sums.below + (there & (x < low)).astype(jnp.int32),
                    sums.at_low + at_low.astype(jnp.int32),
                    jnp.where(at_low, sums.low_weight + weight, sums.low_weight),
                    sums.above + (there & (x > high)).astype(jnp.int32),
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
            # Divided first: no product of a weight and a value at the end of the range overflows.
            kept = sums.value / weight + low * (low_weight / weight) + high * (high_weight / weight)
            return jnp.where(n == 0, 0, jnp.clip(kept, low, high))

        return jax.tree.map(leaf, updates)
