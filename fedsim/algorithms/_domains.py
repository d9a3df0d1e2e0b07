"""Domains of examples: a check of the data, losses by domain, and two ascent updates of the domains' weights in the simplex.

Both updates preserve the sum of the weights of the domains that are ``present``, and do not change the other weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import metrics
from fedsim.data import FederatedData


def check_domains(data: FederatedData, column: str, num_domains: int) -> None:
    """Raises ``ValueError`` unless a column holds a domain for every example."""
    domains = np.asarray(data.columns.get(column, np.zeros(1)))
    if domains.ndim != 1 or domains.dtype.kind not in "iu" or not np.all((domains >= 0) & (domains < num_domains)):
        raise ValueError(
            f"Expected a column {column!r} of domains, an integer in [0, {num_domains}) for each example, got {data}: name "
            "another one by domain, or set num_domains."
        )


def by_domain(values: jax.Array, mask: jax.Array, domains: jax.Array, num_domains: int) -> metrics.Mean:
    """Returns for each domain the sum of the values ``[n]`` where ``mask [n]`` is True, and the number of these values.

    >>> by_domain(jnp.array([1.0, 3.0, 5.0]), jnp.array([True, True, False]), jnp.array([0, 0, 1]), 2).result().tolist()
    [2.0, nan]
    """
    zeros, ones = jnp.zeros(num_domains, jnp.float32), mask.astype(jnp.float32)
    return metrics.Mean(zeros.at[domains].add(jnp.where(mask, values, 0.0)), zeros.at[domains].add(ones))


def exponentiated(weights: jax.Array, step: jax.Array, present: jax.Array) -> jax.Array:
    """Returns weights * exp(step), normalized to the previous sum. A weight of 0 stays 0.

    >>> present, weights = jnp.array([True, True, False]), jnp.array([0.25, 0.25, 0.5])
    >>> (1000 * exponentiated(weights, jnp.log(jnp.array([3.0, 1.0, 9.0])), present)).round().tolist()
    [375.0, 125.0, 500.0]
    """
    moves = present & (weights > 0)
    logarithms = jnp.where(moves, jnp.log(jnp.where(moves, weights, 1.0)) + step, 0.0)
    # The largest one is subtracted, so that no exponential overflows and the sum is at least 1.
    largest = jnp.max(logarithms, where=moves, initial=jnp.finfo(jnp.float32).min)
    stepped = jnp.where(moves, jnp.exp(jnp.where(moves, logarithms - largest, 0.0)), 0.0)
    stepped *= jnp.sum(weights, where=present) / jnp.maximum(jnp.sum(stepped), 1.0)
    return jnp.where(present, stepped, weights)


def projected(weights: jax.Array, step: jax.Array, present: jax.Array) -> jax.Array:
    """Returns the nearest point to weights + step that has no negative element and has the previous sum.

    >>> projected(jnp.array([0.25, 0.25, 0.5]), jnp.array([0.75, 0.0, 9.0]), jnp.array([True, True, False])).tolist()
    [0.5, 0.0, 0.5]
    """
    values = jnp.where(present, weights + step, -jnp.inf)
    descending = -jnp.sort(-values)
    surplus = (jnp.cumsum(descending) - jnp.sum(weights, where=present)) / jnp.arange(1.0, len(values) + 1)
    threshold = surplus[jnp.maximum(jnp.sum(descending > surplus) - 1, 0)]
    return jnp.where(present, jnp.maximum(values - threshold, 0.0), weights)


STEPS = {"exponentiated": exponentiated, "projected": projected}
