"""Coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML
2018, definition 2: https://arxiv.org/abs/1803.01498. ``trim`` is its β. Deviation: what is left is averaged by the clients'
weights, which in the paper are equal (``weighting="uniform"``).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.aggregators._rows import as_rows, in_order, wide
from fedsim.aggregators._side_by_side import SideBySide, Update


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
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"Expected 0 <= trim < 0.5, got trim={self.trim}: the part to leave out at either end.")

    def combine(self, updates: Update, weights: jax.Array) -> Update:
        exists = weights != 0
        n = jnp.sum(exists)
        # By a table, for 0.29 of 100 is 29 whatever float32 makes of it.
        cut = jnp.asarray(np.floor(self.trim * np.arange(len(weights) + 1) + 1e-9), jnp.int32)[n]

        def leaf(rows: jax.Array) -> jax.Array:
            rows = wide(rows)
            there, weight = as_rows(exists, rows), as_rows(weights, rows).astype(rows.dtype)
            ordered = in_order(rows, exists)
            low, high = ordered[cut][None], ordered[jnp.maximum(n - 1 - cut, 0)][None]

            def count(those: jax.Array) -> jax.Array:
                return jnp.sum(those & there, axis=0, keepdims=True)

            # How many of those that equal the border are on this side of the cut, as a share of all that equal it.
            low_share = (jnp.minimum(count(rows <= low), n - cut) - cut) / jnp.maximum(count(rows == low), 1)
            high_share = (jnp.minimum(count(rows >= high), n - cut) - cut) / jnp.maximum(count(rows == high), 1)
            share = jnp.where(rows == low, low_share, jnp.where(rows == high, high_share, 1)).astype(rows.dtype)
            share = jnp.where(there & (rows >= low) & (rows <= high), share * weight, 0)
            weight = jnp.maximum(jnp.sum(share, axis=0), jnp.finfo(rows.dtype).tiny)
            kept = jnp.sum(jnp.where(share == 0, 0, share * rows), axis=0) / weight
            return jnp.where(n == 0, 0, jnp.clip(kept, low[0], high[0]))

        return jax.tree.map(leaf, updates)
