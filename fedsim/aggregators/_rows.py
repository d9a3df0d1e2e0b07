"""Arithmetic on updates side by side, ``[slots, ...]`` a leaf, of which those of weight 0 do not exist."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.aggregators._aggregator import Update
from fedsim.aggregators._aggregator import wide as wide_dtype
from fedsim.aggregators._side_by_side import Summed

# Coordinates that are sorted together on a CPU: those of a hundred clients stay in its cache.
_COLUMNS = 4096
# Coordinates that are multiplied together on a CPU, whose matrix products copy what they read into another order.
_FACTORS = 16384


def check_attackers(name: str, attackers: int, slots: int, *, per_attacker: int) -> None:
    """Raises ``ValueError`` if a cohort is too small to outvote so many: n >= per_attacker * f + 3 is asked for."""
    if slots < per_attacker * attackers + 3:
        most = (slots - 3) // per_attacker
        remedy = f"Expect at most {most}, or take a larger cohort." if most >= 0 else "Take a larger cohort."
        raise ValueError(
            f"{name} withstands attackers={attackers} in cohorts of at least {per_attacker} * {attackers} + 3 = "
            f"{per_attacker * attackers + 3} clients, and these have {slots}. {remedy}"
        )


def wide(rows: jax.Array) -> jax.Array:
    """Rows in ``float32``, or wider, if they are."""
    return rows.astype(wide_dtype(rows.dtype))


def as_rows(mask: jax.Array, rows: jax.Array) -> jax.Array:
    """``[slots]`` as ``[slots, 1, ...]``, to go with a leaf."""
    return mask.reshape(-1, *[1] * (rows.ndim - 1))


def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of weight times row; a row of weight 0 counts for nothing, however large, as long as it is finite."""
    # A product, for XLA's sum along the first axis goes value by value on a CPU.
    return jnp.tensordot(weights.astype(rows.dtype), rows, axes=1, precision=jax.lax.Precision.HIGHEST)


def mean(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted mean; 0 if there is nobody."""
    weight = jnp.sum(weights)
    return total(rows, weights / jnp.where(weight == 0, 1, weight))


def squared_norms(updates: Update) -> jax.Array:
    """Of every row over all leaves, ``float32 [slots]``."""

    def leaf(rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=tuple(range(1, rows.ndim)))

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, updates))


def inner_products(updates: Update, prepared: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Of any two rows, over all leaves: ``float32 [slots, slots]``, of what ``prepared`` makes of columns ``[slots, n]``."""

    def product(rows: jax.Array) -> jax.Array:
        rows = prepared(rows)
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    def product_in_cache(rows: jax.Array) -> jax.Array:
        slots, columns = rows.shape
        whole = columns // _FACTORS

        def add(i: jax.Array, products: jax.Array) -> jax.Array:
            return products + product(jax.lax.dynamic_slice(rows, (0, i * _FACTORS), (slots, _FACTORS)))

        return jax.lax.fori_loop(0, whole, add, product(rows[:, whole * _FACTORS :]))

    def leaf(rows: jax.Array) -> jax.Array:
        rows = rows.astype(jnp.float32).reshape(len(rows), math.prod(rows.shape[1:]))
        if rows.shape[1] <= _FACTORS:
            return product(rows)
        return jax.lax.platform_dependent(rows, cpu=product_in_cache, default=product)

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, updates))


def squared_distances(updates: Update, exists: jax.Array, summed: Summed) -> jax.Array:
    """Between any two rows, ``float32 [slots, slots]``; infinite from a row to itself and to rows that do not exist.

    Of coordinates that devices share out, ``summed`` makes sums over all.

    From a Gram matrix, which reads the rows once instead of once for every pair. What all have in common would drown the
    differences in rounding, so it is taken off first: the row whose norm is the median, for a mean is anybody's to spoil.
    """
    slots = exists.shape[0]
    norms = jnp.where(exists, summed(squared_norms(updates)), jnp.inf)
    typical = jnp.argsort(norms)[(jnp.sum(exists) - 1) // 2]
    products = summed(inner_products(updates, lambda rows: jnp.where(exists[:, None], rows - rows[typical][None], 0)))
    own = jnp.diagonal(products)
    distances = (own[:, None] - products) + (own[None, :] - products.T)
    # Squares of huge updates overflow, and the difference of two infinities is none.
    distances = jnp.where(jnp.isnan(distances), jnp.inf, jnp.maximum(distances, 0))
    pair = exists[:, None] & exists[None, :] & ~jnp.eye(slots, dtype=bool)
    return jnp.where(pair, distances, jnp.inf)


def in_order(rows: jax.Array, exists: jax.Array) -> jax.Array:
    """Each coordinate's values in rising order along the slots, infinities in the places of rows that do not exist.

    By K. Batcher's merge exchange (D. Knuth, "The art of computer programming", vol. 3, 5.2.2, algorithm M): whole rows are
    compared at a time, which vectorizes; XLA's sort on a CPU goes value by value and takes some ten times as long.
    """
    slots, columns = rows.shape[0], math.prod(rows.shape[1:])
    partners, sides = map(jnp.asarray, _stages(slots))
    flat = jnp.where(as_rows(exists, rows), rows, jnp.inf).reshape(slots, columns)

    def stage(k: jax.Array, rows: jax.Array) -> jax.Array:
        other, side = rows[partners[k]], sides[k][:, None]
        return jnp.where(side < 0, jnp.minimum(rows, other), jnp.where(side > 0, jnp.maximum(rows, other), rows))

    def sort(rows: jax.Array) -> jax.Array:
        # A loop, and not one expression: XLA would fuse it, and compute what two stages share twice, and that again, and again.
        return jax.lax.fori_loop(0, len(sides), stage, rows)

    def sort_in_cache(rows: jax.Array) -> jax.Array:
        def some(i: jax.Array, ordered: jax.Array) -> jax.Array:
            at = 0, jnp.minimum(i * _COLUMNS, columns - _COLUMNS)
            return jax.lax.dynamic_update_slice(ordered, sort(jax.lax.dynamic_slice(rows, at, (slots, _COLUMNS))), at)

        return jax.lax.fori_loop(0, -(-columns // _COLUMNS), some, jnp.zeros_like(rows))

    if not len(sides):
        ordered = flat
    elif columns <= _COLUMNS:
        ordered = sort(flat)
    else:
        ordered = jax.lax.platform_dependent(flat, cpu=sort_in_cache, default=sort)
    return ordered.reshape(rows.shape)


def _stages(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm M's comparisons, ``int32 [stages, n]`` each: with whom every row is compared, and whether it gets the smaller
    value (-1), the larger one (1), or is left out (0)."""
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


def middle(ordered: jax.Array, n: jax.Array) -> jax.Array:
    """The median of the first n of ``ordered``: the mean of the middle two if n is even, 0 if there is nobody."""
    low, high = ordered[jnp.maximum(n - 1, 0) // 2], ordered[jnp.maximum(n, 0) // 2]
    return jnp.where(n == 0, 0, low / 2 + high / 2)
