"""Coordinate-wise median.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML
2018, definition 1: https://arxiv.org/abs/1803.01498. No deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim.aggregators._rows import in_order, middle, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed, Update


@dataclasses.dataclass(frozen=True, eq=False)
class CoordinateMedian(SideBySide):
    """The median of every coordinate over the clients; the mean of the middle two where their number is even.

    Unweighted, whatever the algorithm's ``weighting``: a client of any weight but 0 counts once, so none gains by claiming
    many examples.

    Guarantees:
      - With fewer than half of the clients against it, every coordinate lies between two honest clients' values.

    >>> median = CoordinateMedian()
    >>> updates = jnp.array([[1.0, 5.0], [2.0, 6.0], [9.0, -1e6]])
    >>> median.combine(updates, weights=jnp.array([1.0, 1.0, 50.0])).tolist()
    [2.0, 5.0]
    """

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        exists = weights != 0
        return jax.tree.map(lambda rows: middle(in_order(wide(rows), exists), jnp.sum(exists)), updates)
