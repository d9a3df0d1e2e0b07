"""Sizes of vectors that neither overflow nor vanish."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude, ``float32 []``; 1 for zeros, so that one can divide by it.

    >>> largest(jnp.array([3.0, -4.0])).item(), largest(jnp.zeros(2)).item()
    (4.0, 1.0)
    """
    most = jnp.max(jnp.abs(x))
    return jnp.where(most == 0, 1.0, most)


def root_mean_square(x: jax.Array) -> jax.Array:
    """``sqrt(mean(x²))``, ``float32 []``.

    >>> (root_mean_square(jnp.array([1e30, -7e30])) / 1e30).round(3).item()
    5.0
    """
    unit = largest(x)
    return unit * jnp.sqrt(jnp.mean(jnp.square(x / unit)))
