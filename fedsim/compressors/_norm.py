"""Norms of vectors, computed without overflow and underflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest(x: jax.Array) -> jax.Array:
    """Returns the largest absolute value, ``float32 []``, or 1 if all are zero, so that it can be a divisor.

    >>> largest(jnp.array([3.0, -4.0])).item(), largest(jnp.zeros(2)).item()
    (4.0, 1.0)
    """
    most = jnp.max(jnp.abs(x))
    return jnp.where(most == 0, 1.0, most)


def root_mean_square(x: jax.Array) -> jax.Array:
    """Returns ``sqrt(mean(x²))``, ``float32 []``.

    >>> (root_mean_square(jnp.array([1e30, -7e30])) / 1e30).round(3).item()
    5.0
    """
    unit = largest(x)
    return unit * jnp.sqrt(jnp.mean(jnp.square(x / unit)))
