"""The shortest combination of the clients' directions.

Z. Hu, K. Shaloudegi, G. Zhang, Y. Yu, "Federated learning meets multi-objective optimization", 2020 (FedMGDA+, Algorithm 1),
IEEE Transactions on Network Science and Engineering, 2022: https://arxiv.org/abs/2006.11489. The paper's ε is ``epsilon``, and
its λ₀ are the clients' shares by weight. The quadratic program is solved by accelerated projected gradients with restarts (B.
O'Donoghue, E. Candès, "Adaptive restart for accelerated gradient schemes", 2012: https://arxiv.org/abs/1204.3982); the paper
leaves open how. Deviation: an update of zeros, which has no direction, counts as zeros.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._aggregator import Update
from fedsim.aggregators._rows import inner_products, total, wide
from fedsim.aggregators._side_by_side import SideBySide, Summed

_STEPS = 300
_STILL = 2.0**-23  # How far shares, whose sum is 1, may go in a last step.
# Of 2^30, more than a float32 tells apart.
_CUTS, _PARTS = 6, 32


@dataclasses.dataclass(frozen=True, eq=False)
class MinNorm(SideBySide):
    """The combination Σ λ_k u_k / |u_k| of least norm, of all λ in the simplex that differ from the shares by weight by at most
    ``epsilon`` each.

    With 0 it is the mean of the updates' directions; with 1 no client's direction is left out, whatever its weight: the
    aggregate d has <d, u_k> >= |d|² |u_k| for all k, so that nobody loses from a small step along it.

    Attributes:
      epsilon: in [0, 1].

    >>> two = {"w": jnp.array([[2.0, 0.0], [0.0, 5.0]])}
    >>> [(100 * MinNorm(epsilon).combine(two, jnp.array([3.0, 1.0]))["w"]).round().tolist() for epsilon in (0.0, 0.1, 1.0)]
    [[75.0, 25.0], [65.0, 35.0], [50.0, 50.0]]
    """

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        checks.number(least=0, most=1, epsilon=self.epsilon)

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        weight = jnp.sum(weights)
        shares = weights / jnp.where(weight == 0, 1, weight)
        products = summed(inner_products(updates, lambda rows: rows))
        norms = jnp.sqrt(jnp.diagonal(products))
        per_norm = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
        products = per_norm[:, None] * products * per_norm[None, :]
        low = jnp.maximum(shares - self.epsilon, 0)
        high = jnp.where(weights > 0, jnp.minimum(shares + self.epsilon, 1), 0)
        shares = _shortest(products, shares, low, high).here if self.epsilon else shares
        return jax.tree.map(lambda rows: total(wide(rows), shares * per_norm), updates)


class _At(NamedTuple):
    """Shares, the point that the next step starts from, how far ahead that is, how many steps came, and whether the
    last went nowhere: then it started from the answer."""

    here: jax.Array
    ahead: jax.Array
    momentum: jax.Array
    steps: jax.Array
    there: jax.Array


def _shortest(products: jax.Array, start: jax.Array, low: jax.Array, high: jax.Array) -> _At:
    """``here``: the λ of least λ' products λ, among those between ``low`` and ``high`` that have the sum of ``start``."""
    mass = jnp.sum(start)
    # All allowed λ have one sum. So of the gradient only what differs from client to client counts (in what does not it would
    # drown), and steps may be as long as the curvature across the simplex allows: where directions are alike, it is a fraction
    # of what it is along the sum.
    free = jnp.asarray(high > 0, jnp.float32)
    across = free / jnp.maximum(jnp.sum(free), 1)
    means = products @ across
    curvature = (products - means[:, None] - means[None, :] + across @ means) * free[:, None] * free[None, :]
    slope = mass * (means - across @ means) * free
    # Of the fourth power the largest sum of a row bounds it more closely: to a fifth, where that of a row itself does to 2.
    fourth = jnp.linalg.matrix_power(curvature, 4)
    rate = 1 / jnp.maximum(jnp.max(jnp.sum(jnp.abs(fourth), axis=1)) ** 0.25, 1e-6)

    def nearest(point: jax.Array) -> jax.Array:
        """The allowed λ nearest to a point: the point less a number that is sought by cutting its range, within the bounds."""
        least = jnp.min(point - high)
        width = jnp.max(point - low) - least
        for _ in range(_CUTS):  # Into many parts at once: on so few numbers it is the operations that take time.
            width = width / _PARTS
            tried = least + width * jnp.arange(1, _PARTS, dtype=jnp.float32)
            totals = jnp.sum(jnp.clip(point[None] - tried[:, None], low[None], high[None]), axis=1)
            least = least + width * jnp.sum(totals > mass, dtype=jnp.float32)
        return jnp.clip(point - (least + width / 2), low, high)

    def step(at: _At) -> _At:
        here, ahead, momentum, steps, _ = at
        new = nearest(ahead - rate * (curvature @ ahead + slope))
        restart = jnp.vdot(ahead - new, new - here) > 0
        momentum = jnp.where(restart, 1.0, momentum)
        faster = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        ahead = jnp.where(restart, new, new + (momentum - 1) / faster * (new - here))
        return _At(new, ahead, jnp.where(restart, 1.0, faster), steps + 1, jnp.all(jnp.abs(new - at.ahead) <= _STILL))

    first = _At(start, start, jnp.float32(1), jnp.int32(0), jnp.bool_(False))
    return jax.lax.while_loop(lambda at: (at.steps < _STEPS) & ~at.there, step, first)
