"""Two ways up along losses for weights in a simplex: where ``seen``, which keep together what they had; others stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def exponentiated(weights: jax.Array, step: jax.Array, seen: jax.Array) -> jax.Array:
    """weights exp(step), made to sum to what it was: who has no weight never gets any.

    >>> seen, weights = jnp.array([True, True, False]), jnp.array([0.25, 0.25, 0.5])
    >>> (1000 * exponentiated(weights, jnp.log(jnp.array([3.0, 1.0, 9.0])), seen)).round().tolist()
    [375.0, 125.0, 500.0]
    """
    # Relative to the largest, so that no exponential overflows.
    stepped = jnp.where(seen, weights * jnp.exp(step - jnp.max(step, where=seen, initial=0)), 0.0)
    stepped *= jnp.sum(weights, where=seen) / jnp.maximum(jnp.sum(stepped), jnp.finfo(jnp.float32).tiny)
    return jnp.where(seen, stepped, weights)


def projected(weights: jax.Array, step: jax.Array, seen: jax.Array) -> jax.Array:
    """The nearest point to weights + step that is nowhere negative and has the sum that it was.

    >>> projected(jnp.array([0.25, 0.25, 0.5]), jnp.array([0.75, 0.0, 9.0]), jnp.array([True, True, False])).tolist()
    [0.5, 0.0, 0.5]
    """
    values = jnp.where(seen, weights + step, -jnp.inf)
    descending = -jnp.sort(-values)
    surplus = (jnp.cumsum(descending) - jnp.sum(weights, where=seen)) / jnp.arange(1.0, len(values) + 1)
    threshold = surplus[jnp.maximum(jnp.sum(descending > surplus) - 1, 0)]
    return jnp.where(seen, jnp.maximum(values - threshold, 0.0), weights)
