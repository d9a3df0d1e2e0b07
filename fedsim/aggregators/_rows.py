"""Arithmetic on stacked updates: leaves ``[slots, ...]``, with one row per client. Rows of weight 0 do not count."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.aggregators._aggregator import Update, accumulation_dtype
from fedsim.aggregators._stack import AllReduce

# Number of coordinates that are sorted together on a CPU. Those of a hundred clients fit into its cache.
_SORT_COLUMNS = 4096
# Number of coordinates that are multiplied together on a CPU, where a matrix product first copies its operands.
_PRODUCT_COLUMNS = 16384


def check_attackers(name: str, attackers: int, slots: int, *, per_attacker: int) -> None:
    """Raises ``ValueError`` unless cohorts have at least per_attacker * attackers + 3 clients."""
    if slots < per_attacker * attackers + 3:
        most = (slots - 3) // per_attacker
        remedy = f"Set attackers to at most {most}, or use larger cohorts." if most >= 0 else "Use larger cohorts."
        raise ValueError(
            f"{name}(attackers={attackers}) needs cohorts of at least {per_attacker} * {attackers} + 3 = "
            f"{per_attacker * attackers + 3} clients, got cohorts of {slots}. {remedy}"
        )


def widen(rows: jax.Array) -> jax.Array:
    """Converts rows to ``float32``, unless they have a wider float dtype."""
    return rows.astype(accumulation_dtype(rows.dtype))


def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the sum of weight times row. A row of weight 0 has no effect if it is finite."""
    # A matrix product, because XLA's sum along the first axis is not vectorized on a CPU.
    return jnp.tensordot(weights.astype(rows.dtype), rows, axes=1, precision=jax.lax.Precision.HIGHEST)


def mean(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted mean of the rows, or 0 if the total weight is 0."""
    weight = jnp.sum(weights)
    return total(rows, weights / jnp.where(weight == 0, 1, weight))


def fixed_point(function: Callable[[jax.Array], jax.Array], found: jax.Array) -> jax.Array:
    """Returns ``found``, a fixed point of ``function``, a vector ``[n]``, with the derivative of the fixed point.

    The derivative follows from the implicit function theorem, so ``found`` may be the result of a loop that cannot be
    differentiated in reverse.

    >>> def root(a): return fixed_point(lambda x: (x + a / x) / 2, jnp.sqrt(a))
    >>> jax.jacobian(root)(jnp.array([4.0])).tolist()
    [[0.25]]
    """

    def solve(linear: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
        # The pseudoinverse, because shares of updates that depend on each other linearly are not unique.
        return jnp.matmul(jnp.linalg.pinv(jax.jacobian(linear)(y)), y, precision=jax.lax.Precision.HIGHEST)

    found = jax.lax.stop_gradient(found)
    return jax.lax.custom_root(lambda x: function(x) - x, found, lambda _, found: found, solve)


def squared_norms(updates: Update) -> jax.Array:
    """Returns the squared norm of every row over all leaves, ``float32 [slots]``."""

    def leaf(rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=tuple(range(1, rows.ndim)))

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, updates))


def inner_products(updates: Update, transform: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the inner products of all pairs of rows over all leaves, ``float32 [slots, slots]``.

    ``transform`` is applied to blocks of coordinates ``[slots, n]`` before they are multiplied.
    """

    def product(rows: jax.Array) -> jax.Array:
        rows = transform(rows)
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    def product_in_cache(rows: jax.Array) -> jax.Array:
        slots, columns = rows.shape
        whole = columns // _PRODUCT_COLUMNS

        def add(i: jax.Array, products: jax.Array) -> jax.Array:
            return products + product(jax.lax.dynamic_slice(rows, (0, i * _PRODUCT_COLUMNS), (slots, _PRODUCT_COLUMNS)))

        return jax.lax.fori_loop(0, whole, add, product(rows[:, whole * _PRODUCT_COLUMNS :]))

    def leaf(rows: jax.Array) -> jax.Array:
        rows = rows.astype(jnp.float32).reshape(len(rows), math.prod(rows.shape[1:]))
        if rows.shape[1] <= _PRODUCT_COLUMNS:
            return product(rows)
        return jax.lax.platform_dependent(rows, cpu=product_in_cache, default=product)

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, updates))


def cosine_similarities(updates: Update) -> jax.Array:
    """Returns the cosines of the angles of all pairs of rows, ``float32 [slots, slots]``; 0 for a row of zeros.

    >>> cosine_similarities(jnp.array([[2.0, 0.0], [-3.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    products = inner_products(updates, lambda rows: rows)
    squares = jnp.diagonal(products)
    per_norm = jnp.where(squares > 0, 1 / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    return per_norm[:, None] * products * per_norm[None, :]


def squared_distances(updates: Update, exists: jax.Array, all_reduce: AllReduce = lambda sums: sums) -> jax.Array:
    """Returns the squared distances of all pairs of rows, ``float32 [slots, slots]``.

    The distance of a row to itself, and to a row where ``exists`` is False, is infinite. ``all_reduce`` completes sums over
    the coordinates on this device to sums over all coordinates; by default this device has all of them.

    Distances are computed from the Gram matrix, which reads every row once instead of once per pair. One row is subtracted
    from all rows first, so that a common offset does not cause large rounding errors. It is the row whose norm is the median,
    because a single attacker could make the mean arbitrarily large.

    >>> squared_distances(jnp.array([[0.0, 0.0], [3.0, 4.0]]), exists=jnp.ones(2, bool)).tolist()
    [[inf, 25.0], [25.0, inf]]
    """
    slots = exists.shape[0]
    norms = jnp.where(exists, all_reduce(squared_norms(updates)), jnp.inf)
    typical = jnp.argsort(norms)[(jnp.sum(exists) - 1) // 2]
    products = all_reduce(inner_products(updates, lambda rows: jnp.where(exists[:, None], rows - rows[typical][None], 0)))
    own = jnp.diagonal(products)
    distances = (own[:, None] - products) + (own[None, :] - products.T)
    # Squares of very large updates overflow, and the difference of two infinities is NaN.
    distances = jnp.where(jnp.isnan(distances), jnp.inf, jnp.maximum(distances, 0))
    pair = exists[:, None] & exists[None, :] & ~jnp.eye(slots, dtype=bool)
    return jnp.where(pair, distances, jnp.inf)


def sort_rows(rows: jax.Array, exists: jax.Array) -> jax.Array:
    """Sorts the values of each coordinate in ascending order along the slots. Rows where ``exists`` is False become infinite.

    The algorithm is K. Batcher's merge exchange (D. Knuth, "The art of computer programming", vol. 3, 5.2.2, algorithm M). It
    compares whole rows, which can be vectorized. XLA's sort on a CPU is not vectorized and takes about ten times as long.
    """
    slots, columns = rows.shape[0], math.prod(rows.shape[1:])
    partners, sides = map(jnp.asarray, _stages(slots))
    flat = jnp.where(tree.per_row(exists, rows), rows, jnp.inf).reshape(slots, columns)

    def stage(k: jax.Array, rows: jax.Array) -> jax.Array:
        other, side = rows[partners[k]], sides[k][:, None]
        return jnp.where(side < 0, jnp.minimum(rows, other), jnp.where(side > 0, jnp.maximum(rows, other), rows))

    def sort(rows: jax.Array) -> jax.Array:
        # A loop, because XLA would fuse an unrolled expression and recompute the results that stages have in common.
        return jax.lax.fori_loop(0, len(sides), stage, rows)

    def sort_in_cache(rows: jax.Array) -> jax.Array:
        def sort_block(i: jax.Array, ordered: jax.Array) -> jax.Array:
            at = 0, jnp.minimum(i * _SORT_COLUMNS, columns - _SORT_COLUMNS)
            block = sort(jax.lax.dynamic_slice(rows, at, (slots, _SORT_COLUMNS)))
            return jax.lax.dynamic_update_slice(ordered, block, at)

        return jax.lax.fori_loop(0, -(-columns // _SORT_COLUMNS), sort_block, jnp.zeros_like(rows))

    if not len(sides):
        ordered = flat
    elif columns <= _SORT_COLUMNS:
        ordered = sort(flat)
    else:
        ordered = jax.lax.platform_dependent(flat, cpu=sort_in_cache, default=sort)
    return ordered.reshape(rows.shape)


def _stages(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the comparisons of algorithm M, two arrays ``int32 [stages, n]``.

    The first holds the row with which each row is compared. The second holds -1 if the row keeps the smaller value, 1 if it
    keeps the larger value, and 0 if it is not compared in this stage.
    """
    partners, sides = np.zeros((0, n), np.int32), np.zeros((0, n), np.int32)
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top if n > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            lower = np.arange(max(0, n - d))
            lower = lower[lower & p == r]
            partner, side = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
            partner[lower], partner[lower + d], side[lower], side[lower + d] = lower + d, lower, -1, 1
            partners, sides = np.vstack([partners, partner]), np.vstack([sides, side])
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return partners, sides


def median_of_sorted(ordered: jax.Array, n: jax.Array) -> jax.Array:
    """Returns the median of the first n sorted rows: the mean of the two middle values if n is even, and 0 if n is 0."""
    low, high = ordered[jnp.maximum(n - 1, 0) // 2], ordered[jnp.maximum(n, 0) // 2]
    return jnp.where(n == 0, 0, low / 2 + high / 2)
