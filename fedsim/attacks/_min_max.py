"""Min-max.

V. Shejwalkar, A. Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for federated
learning", NDSS 2021, equation 5: https://doi.org/10.14722/ndss.2021.24498. ``direction`` is the paper's ∇^p: inverse unit
vector, inverse standard deviation or inverse sign. Deviations: γ is the exact solution of a quadratic equation for each honest
client, which the paper's algorithm 1 approximates by repeated halving. The attackers know the updates of the honest clients; in
the paper they may also estimate them from those that they would send without the attack.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import squared_distances
from fedsim.attacks._attack import Update
from fedsim.attacks._collusion import Collusion, HonestStatistics

DIRECTIONS = "unit", "deviation", "sign"


def perturbation(honest: HonestStatistics, direction: str) -> Update:
    """Returns the direction in which attackers move away from the honest mean, of norm 1, or 0 if there is none."""
    if direction == "deviation":
        towards = honest.deviation
    else:
        towards = jax.tree.map(jnp.sign, honest.mean) if direction == "sign" else honest.mean
    square = tree.squared_norm(towards)
    return tree.scale(towards, jnp.where(square > 0, -1 / jnp.sqrt(jnp.where(square > 0, square, 1)), 0))


def differences(honest: HonestStatistics) -> Update:
    """Returns the mean minus each honest update, leaves ``[n, ...]``, and zeros for all other clients."""

    def leaf(mean: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.where(tree.per_row(honest.is_honest, rows), mean[None] - rows.astype(mean.dtype), 0)

    return jax.tree.map(leaf, honest.mean, honest.updates)


@dataclasses.dataclass(frozen=True)
class MinMax(Collusion):
    """All attackers send mean + γ p, at most as far from every honest update as the two most distant ones from each other.

    γ is the largest number for which this holds, and p is a direction away from the mean of the honest updates. So a defense
    that removes outliers by their distances cannot tell attackers from the most distant honest clients. All updates of a cohort
    are stored, as for aggregators that need all of them at once.

    Attributes:
      direction: p: "unit" is -mean, "deviation" is minus the standard deviation of every coordinate, and "sign" is the sign of
        -mean. The length of p has no effect.

    Raises:
      ValueError: ``direction`` is none of these.

    >>> updates = jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    >>> honest = HonestStatistics.of(updates, is_honest=jnp.array([True, True, False]))
    >>> [round(x, 4) for x in MinMax("deviation").collude(honest).tolist()]  # the distance of the honest updates is 2
    [1.0, 0.0]
    """

    needs_updates: ClassVar[bool] = True

    direction: str = "unit"

    def __post_init__(self) -> None:
        checks.one_of(*DIRECTIONS, direction=self.direction)

    def collude(self, honest: HonestStatistics) -> Update:
        p, away = perturbation(honest, self.direction), differences(honest)
        distances = squared_distances(honest.updates, honest.is_honest)
        largest = jnp.max(jnp.where(jnp.isinf(distances), 0, distances))
        # ‖mean + γ p - u_i‖² = largest is γ² + 2 b_i γ = c_i, because p has norm 1. Its positive root is computed without a
        # difference of two numbers of almost equal size.
        c = jnp.maximum(largest - jax.vmap(tree.squared_norm)(away), 0)
        b = jax.vmap(tree.dot, (None, 0))(p, away)
        root = tree.root(jnp.square(b) + c)
        gammas = jnp.where(b > 0, c / jnp.where(b > 0, b + root, 1), root - b)
        gamma = jnp.min(jnp.where(honest.is_honest, gammas, jnp.inf))
        return tree.add(honest.mean, tree.scale(p, jnp.where(jnp.any(honest.is_honest), gamma, 0)))
