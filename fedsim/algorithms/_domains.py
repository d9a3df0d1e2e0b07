"""Domains that examples belong to: who belongs where, losses by domain, and two ways up along them for weights in a simplex.

Either way, the weights that were ``seen`` keep together what they had, and the others stay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import metrics
from fedsim.data import FederatedData


def check_domains(data: FederatedData, column: str, num_domains: int) -> None:
    """Raises ``ValueError`` unless a column says of every example in which domain it is."""
    domains = np.asarray(data.columns.get(column, np.zeros(1)))
    if domains.ndim != 1 or domains.dtype.kind not in "iu" or not np.all((domains >= 0) & (domains < num_domains)):
        raise ValueError(
            f"Expected a column {column!r} of domains, an integer in [0, {num_domains}) for each example, got {data}: name "
            "another one by domain, or set num_domains."
        )


def by_domain(values: jax.Array, mask: jax.Array, domains: jax.Array, num_domains: int) -> metrics.Mean:
    """Sums of the values ``[n]`` where ``mask [n]`` is True, and how many these are, for each domain.

    >>> by_domain(jnp.array([1.0, 3.0, 5.0]), jnp.array([True, True, False]), jnp.array([0, 0, 1]), 2).result().tolist()
    [2.0, 0.0]
    """
    zeros, seen = jnp.zeros(num_domains, jnp.float32), mask.astype(jnp.float32)
    return metrics.Mean(*(zeros.at[domains].add(x) for x in (jnp.where(mask, values, 0.0), seen)))


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


STEPS = {"exponentiated": exponentiated, "projected": projected}
