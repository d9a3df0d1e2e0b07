"""Sizes of vectors that neither overflow nor vanish."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def root_mean_square(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """``sqrt(mean(x²))`` along ``axis``, which stays as an axis of 1; of any finite ``x`` finite, and 0 only for zeros.

    >>> (root_mean_square(jnp.array([1e30, -7e30])) / 1e30).round(3).tolist()
    [5.0]
    """
    largest = jnp.max(jnp.abs(x), axis, keepdims=True)
    share = x / jnp.where(largest == 0, 1.0, largest)
    return largest * jnp.sqrt(jnp.mean(share * share, axis, keepdims=True))
