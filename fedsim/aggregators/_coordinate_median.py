"""Coordinate-wise median.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML
2018, definition 1: https://arxiv.org/abs/1803.01498. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim.aggregators._rows import median_of_sorted, sort_rows, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator, Update


@dataclasses.dataclass(frozen=True, eq=False)
class CoordinateMedian(StackAggregator):
    """The median over the clients, in every coordinate.

    For an even number of clients, it is the mean of the two middle values. Clients count equally, whatever the algorithm's
    ``weighting`` (a client of weight 0 does not count), so a client gains no influence by reporting many examples.

    Guarantees:
      - If fewer than half of the clients are attackers, every coordinate lies between the values of two honest clients.

    >>> median = CoordinateMedian()
    >>> updates = jnp.array([[1.0, 5.0], [2.0, 6.0], [9.0, -1e6]])
    >>> median.combine(updates, weights=jnp.array([1.0, 1.0, 50.0])).tolist()
    [2.0, 5.0]
    """

    not_differentiable = "sorts the updates"

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        exists = weights != 0
        return jax.tree.map(lambda rows: median_of_sorted(sort_rows(widen(rows), exists), jnp.sum(exists)), updates)
