"""Robust mixing: what nodes do with the values of neighbours of which some may be Byzantine.

Self-centred clipping: L. He, S. P. Karimireddy, M. Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022:
https://arxiv.org/abs/2202.01545. Trimmed mean: C. Fang, Z. Yang, W. U. Bajwa, "BRIDGE: Byzantine-resilient decentralized
gradient descent", IEEE TSIPN 2022 (BRIDGE-T): https://arxiv.org/abs/1908.08098.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators._rows import sort_rows
from fedsim.decentralized._mixing import Matrix
from fedsim.names import by_name


class RobustMixing:
    """Base class of rules that replace the weighted mean of a node's own value and those of its neighbours.

    A rule is a function of one node's values. It runs for all nodes at the same time (`jax.vmap`).

    >>> @dataclasses.dataclass(frozen=True)
    ... class KeepOwn(RobustMixing):
    ...     def __call__(self, own, received, weights): return own
    >>> KeepOwn()(jnp.ones(2), jnp.zeros([3, 2]), jnp.ones(3)).tolist()
    [1.0, 1.0]
    """

    def check(self, matrices: Sequence[Matrix]) -> None:
        """Raises ``ValueError`` if the rule cannot work with these mixing matrices."""

    def __call__(self, own: Any, received: Any, weights: jax.Array) -> Any:
        """Returns the new value of a node, like ``own``.

        Args:
          own: the node's own value, a pytree of floats.
          received: what the node receives, leaves ``[most neighbours of a node, ...]``.
          weights: the mixing weights, floats ``[most neighbours of a node]``; 0 where it has fewer neighbours.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__.")


@dataclasses.dataclass(frozen=True)
class ClippedMixing(RobustMixing):
    """Self-centred clipping: x_i becomes x_i + sum_j W_ij (x_j - x_i) min(1, radius / ‖x_j - x_i‖).

    A neighbour moves a node by at most its weight times the radius. The norm is over all leaves. The paper also derives radii
    that follow the distances to the honest neighbours, which nodes do not know; here the radius is fixed.

    Attributes:
      radius: τ, positive. If it exceeds all distances, this is the usual mixing.

    Raises:
      ValueError: ``radius`` is not positive and finite.

    >>> rule = ClippedMixing(radius=1.0)
    >>> rule(jnp.zeros(2), jnp.array([[0.0, 8.0]]), jnp.array([0.5])).tolist()
    [0.0, 0.5]
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(radius=self.radius, remedy="how far a neighbour's value may be from a node's own")

    def __call__(self, own: Any, received: Any, weights: jax.Array) -> Any:
        def step(received: Any, weight: jax.Array) -> Any:
            difference = tree.clip(tree.subtract(received, own), self.radius)
            # The difference to a value that is not finite is not finite, and then the neighbour is left out.
            finite = jnp.isfinite(tree.squared_norm(difference))
            return tree.select(finite, tree.scale(difference, weight), jax.tree.map(jnp.zeros_like, own))

        return jax.tree.map(lambda x, moves: x + jnp.sum(moves, axis=0), own, jax.vmap(step)(received, weights))


@dataclasses.dataclass(frozen=True)
class TrimmedMixing(RobustMixing):
    """Trimmed mean: a node drops the largest and the smallest values of its neighbours, and averages the others with its own.

    This is done for every coordinate on its own. The mixing weights only say who the neighbours are.

    Attributes:
      trim: b, how many values are dropped at either end, and so how many Byzantine neighbours a node tolerates, at least 1.

    Raises:
      ValueError: ``trim`` is not a whole number of at least 1. When an algorithm is made: a node has at most 2 ``trim``
        neighbours, so that nothing would be left.

    >>> TrimmedMixing(trim=1)(jnp.float32(1), jnp.array([100.0, 1, 3, 2]), jnp.full(4, 0.2)).tolist()  # of 1, and 2 and 3
    2.0
    """

    trim: int = 1

    def __post_init__(self) -> None:
        checks.whole(1, trim=self.trim, remedy="how many values are dropped at either end")

    def check(self, matrices: Sequence[Matrix]) -> None:
        for number, matrix in enumerate(matrices):
            entries = matrix.tocoo()
            neighbours = np.bincount(entries.row[entries.row != entries.col], minlength=matrix.shape[0])
            node = int(neighbours.argmin())
            if neighbours[node] <= 2 * self.trim:
                raise ValueError(
                    f"TrimmedMixing(trim={self.trim}) drops {2 * self.trim} values, but node {node} has {neighbours[node]} "
                    f"neighbours in round {number}: give a topology in which every node has at least {2 * self.trim + 1}, such "
                    f"as random_regular(degree={2 * self.trim + 2})."
                )

    def __call__(self, own: Any, received: Any, weights: jax.Array) -> Any:
        present = weights > 0
        count = jnp.sum(present)

        def trimmed(own: jax.Array, received: jax.Array) -> jax.Array:
            ordered = sort_rows(jnp.where(jnp.isfinite(received), received, jnp.inf), present)

            # One value after another, because XLA's sum along the first axis is not vectorized on a CPU.
            def add(rank: jax.Array, total: jax.Array) -> jax.Array:
                kept = (rank >= self.trim) & (rank < count - self.trim)
                return total + jnp.where(kept, ordered[rank], 0)

            total = jax.lax.fori_loop(0, len(received), add, own)
            return total / (count - 2 * self.trim + 1).astype(own.dtype)

        return jax.tree.map(trimmed, own, received)


ROBUST_MIXING: dict[str, type[RobustMixing]] = by_name(ClippedMixing, TrimmedMixing)
