"""The combination of the clients' normalized updates that has the smallest norm.

Z. Hu, K. Shaloudegi, G. Zhang, Y. Yu, "Federated learning meets multi-objective optimization", 2020 (FedMGDA+, Algorithm 1),
IEEE Transactions on Network Science and Engineering, 2022: https://arxiv.org/abs/2006.11489. The paper's ε is ``epsilon``, and
its λ₀ are the clients' fractions of the total weight. The quadratic program is solved by accelerated projected gradient descent
with restarts (B. O'Donoghue, E. Candès, "Adaptive restart for accelerated gradient schemes", 2012:
https://arxiv.org/abs/1204.3982). The paper does not specify a solver. Deviation: an update of zeros cannot be normalized, and
stays zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._aggregator import Update
from fedsim.aggregators._rows import fixed_point, inner_products, total, widen
from fedsim.aggregators._stack import AllReduce, StackAggregator

_STEPS = 300
_TOLERANCE = 2.0**-23  # The solver stops when no λ_k changes by more than this. Their sum is 1.
# The projection divides an interval 6 times by 32, that is by 2^30, which exceeds the precision of float32.
_DIVISIONS, _PARTS = 6, 32


@dataclasses.dataclass(frozen=True, eq=False)
class MinNorm(StackAggregator):
    """The combination Σ λ_k u_k / ‖u_k‖ of smallest norm, where each λ_k may differ from client k's weight by ``epsilon``.

    λ is in the simplex, and weights are normalized to sum 1. With ``epsilon`` 0, the aggregate is the weighted mean of the
    normalized updates. With 1, λ does not depend on the weights, and the aggregate d satisfies <d, u_k> >= ‖d‖² ‖u_k‖ for all
    k: a small step along d does not increase the loss of any client.

    Attributes:
      epsilon: the largest difference of λ_k from the normalized weight of client k, in [0, 1].

    Raises:
      ValueError: ``epsilon`` is not in ``[0, 1]``.

    >>> two = {"w": jnp.array([[2.0, 0.0], [0.0, 5.0]])}
    >>> [(100 * MinNorm(epsilon).combine(two, jnp.array([3.0, 1.0]))["w"]).round().tolist() for epsilon in (0.0, 0.1, 1.0)]
    [[75.0, 25.0], [65.0, 35.0], [50.0, 50.0]]
    """

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        checks.number(least=0, most=1, epsilon=self.epsilon)

    @property
    def is_scalable(self) -> bool:
        return False  # Updates are normalized, so a scale would have no effect.

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        weight = jnp.sum(weights)
        shares = weights / jnp.where(weight == 0, 1, weight)
        products = all_reduce(inner_products(updates, lambda rows: rows))
        squares = jnp.diagonal(products)
        per_norm = jnp.where(squares > 0, 1 / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
        products = per_norm[:, None] * products * per_norm[None, :]
        low = jnp.maximum(shares - self.epsilon, 0)
        high = jnp.where(weights > 0, jnp.minimum(shares + self.epsilon, 1), 0)
        if isinstance(self.epsilon, jax.core.Tracer) or self.epsilon:
            problem = products, shares, low, high
            shares = _with_derivative(_minimize_norm(*problem).shares, *problem)
        return jax.tree.map(lambda rows: total(widen(rows), shares * per_norm), updates)


class _SolverState(NamedTuple):
    """The state of the solver.

    Attributes:
      shares: λ, ``float32 [slots]``.
      extrapolated: the point from which the next step starts, ``float32 [slots]``.
      momentum: Nesterov's momentum coefficient, ``float32 []``.
      steps: the number of steps so far, ``int32 []``.
      converged: whether the last step did not move, ``bool []``.
    """

    shares: jax.Array
    extrapolated: jax.Array
    momentum: jax.Array
    steps: jax.Array
    converged: jax.Array


def _minimize_norm(products: jax.Array, start: jax.Array, low: jax.Array, high: jax.Array) -> _SolverState:
    """Finds the ``shares`` λ in [low, high], with the same sum as ``start``, that minimize λ' products λ."""
    products, start, low, high = jax.lax.stop_gradient((products, start, low, high))
    move = _gradient_step(products, start, high)

    def step(state: _SolverState) -> _SolverState:
        shares, extrapolated, momentum, steps, _ = state
        new = _nearest(move(extrapolated), jnp.sum(start), low, high)
        restart = jnp.vdot(extrapolated - new, new - shares) > 0
        momentum = jnp.where(restart, 1.0, momentum)
        faster = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        extrapolated = jnp.where(restart, new, new + (momentum - 1) / faster * (new - shares))
        converged = jnp.all(jnp.abs(new - state.extrapolated) <= _TOLERANCE)
        return _SolverState(new, extrapolated, jnp.where(restart, 1.0, faster), steps + 1, converged)

    first = _SolverState(start, start, jnp.float32(1), jnp.int32(0), jnp.bool_(False))
    return jax.lax.while_loop(lambda state: (state.steps < _STEPS) & ~state.converged, step, first)


def _with_derivative(shares: jax.Array, products: jax.Array, start: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the result of `_minimize_norm` with its derivative, for which the bounds that apply stay the same."""
    move = _gradient_step(products, start, high)

    def step(shares: jax.Array) -> jax.Array:
        point = move(shares)
        near = jax.lax.stop_gradient(_nearest(point, jnp.sum(start), low, high))
        inside = (near > low) & (near < high)
        bound = jnp.where(near > low, high, low)
        excess = jnp.sum(jnp.where(inside, point, bound)) - jnp.sum(start)
        return jnp.where(inside, point - excess / jnp.maximum(jnp.sum(inside, dtype=jnp.float32), 1), bound)

    return fixed_point(step, shares)


def _gradient_step(products: jax.Array, start: jax.Array, high: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns the function from λ to λ after a step along the gradient of λ' products λ / 2, before it is projected."""
    # All feasible λ have the same sum. So only differences of the gradient between clients matter, and the common part, which
    # would dominate the rounding errors, is removed. Steps can then be as long as the curvature within the simplex allows. If
    # updates are similar, this curvature is a fraction of the curvature along the sum.
    free = jnp.asarray(high > 0, jnp.float32)
    uniform = free / jnp.maximum(jnp.sum(free), 1)
    means = products @ uniform
    curvature = (products - means[:, None] - means[None, :] + uniform @ means) * free[:, None] * free[None, :]
    slope = jnp.sum(start) * (means - uniform @ means) * free
    # The largest row sum bounds the largest eigenvalue. The row sum of the fourth power gives a bound within a fifth of it, and
    # the row sum of the matrix itself a bound within a factor of 2.
    fourth = jnp.linalg.matrix_power(jax.lax.stop_gradient(curvature), 4)
    rate = 1 / jnp.maximum(jnp.max(jnp.sum(jnp.abs(fourth), axis=1)) ** 0.25, 1e-6)
    return lambda shares: shares - rate * (curvature @ shares + slope)


def _nearest(point: jax.Array, sum: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the λ in [low, high] with this sum that is nearest to a point: the point minus a scalar, clipped to the bounds.

    The scalar is found by repeated division of an interval.
    """
    least = jnp.min(point - high)
    width = jnp.max(point - low) - least
    # In 32 parts at a time, because on so few numbers the number of operations determines the time.
    for _ in range(_DIVISIONS):
        width = width / _PARTS
        tried = least + width * jnp.arange(1, _PARTS, dtype=jnp.float32)
        totals = jnp.sum(jnp.clip(point[None] - tried[:, None], low[None], high[None]), axis=1)
        least = least + width * jnp.sum(totals > sum, dtype=jnp.float32)
    return jnp.clip(point - (least + width / 2), low, high)
