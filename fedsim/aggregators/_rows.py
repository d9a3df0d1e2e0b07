"""Arithmetic on updates side by side, ``[slots, ...]`` a leaf, of which those of weight 0 do not exist."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.aggregators._aggregator import Update
from fedsim.aggregators._aggregator import wide as wide_dtype


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
    """The sum of weight times row; a row of weight 0 counts for nothing, however large."""
    weights = as_rows(weights.astype(rows.dtype), rows)
    return jnp.sum(jnp.where(weights == 0, 0, weights * rows), axis=0)


def mean(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted mean; 0 if there is nobody."""
    weight = jnp.sum(weights)
    return total(rows, weights / jnp.where(weight == 0, 1, weight))


def squared_norms(updates: Update) -> jax.Array:
    """Of every row over all leaves, ``float32 [slots]``."""

    def leaf(rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=tuple(range(1, rows.ndim)))

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, updates))


def squared_distances(updates: Update, exists: jax.Array) -> jax.Array:
    """Between any two rows, ``float32 [slots, slots]``; infinite from a row to itself and to rows that do not exist.

    From a Gram matrix, which reads the rows once instead of once for every pair. What all have in common would drown the
    differences in rounding, so it is taken off first: the row whose norm is the median, for a mean is anybody's to spoil.
    """
    slots = exists.shape[0]
    norms = jnp.where(exists, squared_norms(updates), jnp.inf)
    typical = jnp.argsort(norms)[(jnp.sum(exists) - 1) // 2]

    def gram(rows: jax.Array) -> jax.Array:
        rows = rows.astype(jnp.float32).reshape(slots, math.prod(rows.shape[1:]))
        rows = jnp.where(exists[:, None], rows - rows[typical][None], 0)
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    products = jax.tree.reduce(jnp.add, jax.tree.map(gram, updates))
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
    rows = jnp.where(as_rows(exists, rows), rows, jnp.inf)
    for lower, upper in _stages(rows.shape[0]):
        partner, low, high = np.arange(len(rows)), np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        partner[lower], partner[upper], low[lower], high[upper] = upper, lower, True, True
        other = rows[partner]
        least, most = jnp.minimum(rows, other), jnp.maximum(rows, other)
        rows = jnp.where(as_rows(jnp.asarray(low), rows), least, jnp.where(as_rows(jnp.asarray(high), rows), most, rows))
    return rows


def _stages(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Algorithm M's comparisons: in each stage, which rows are compared with which, no row twice."""
    stages = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top if n > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            lower = np.arange(max(0, n - d))
            lower = lower[lower & p == r]
            stages.append((lower, lower + d))
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return stages


def middle(ordered: jax.Array, n: jax.Array) -> jax.Array:
    """The median of the first n of ``ordered``: the mean of the middle two if n is even, 0 if there is nobody."""
    low, high = ordered[jnp.maximum(n - 1, 0) // 2], ordered[jnp.maximum(n, 0) // 2]
    return jnp.where(n == 0, 0, low / 2 + high / 2)
