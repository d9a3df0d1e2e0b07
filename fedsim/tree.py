"""Arithmetic on pytrees of arrays, the little of it that federated algorithms need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def add(a: Tree, b: Tree) -> Tree:
    """``a + b``, leaf by leaf.

    >>> add({"w": 1.0}, {"w": 2.0})
    {'w': 3.0}
    """
    return jax.tree.map(lambda x, y: x + y, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """``a - b``, leaf by leaf.

    >>> subtract({"w": 1.0}, {"w": 2.0})
    {'w': -1.0}
    """
    return jax.tree.map(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: jax.Array | float) -> Tree:
    """``factor * a``, leaf by leaf, in each leaf's dtype.

    >>> scale({"w": jnp.array([3.0])}, 2)["w"].tolist()
    [6.0]
    """
    return jax.tree.map(lambda x: x * jnp.asarray(factor, jnp.result_type(x)), a)


def squared_norm(a: Tree) -> jax.Array:
    """Sum of squares over all leaves, a ``float32`` scalar.

    >>> float(squared_norm({"w": jnp.array([3.0, 4.0])}))
    25.0
    """
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(a)), jnp.zeros((), jnp.float32))


def select(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """``yes`` where the scalar ``condition`` holds, else ``no``; a NaN on the side not taken does no harm.

    >>> float(select(jnp.array(False), {"w": jnp.nan}, {"w": 1.0})["w"])
    1.0
    """
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def all_finite(a: Tree) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity, a ``bool`` scalar.

    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    floats = [x for x in jax.tree.leaves(a) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    if not floats:
        return jnp.array(True)
    # A dot product is the fastest way to read everything once. It may overflow where no element is infinite: only then
    # the elements themselves are looked at.
    norms = jnp.stack([jnp.real(jnp.vdot(x, x)).astype(jnp.float32) for x in floats])
    return jax.lax.cond(
        jnp.all(jnp.isfinite(norms)),
        lambda: jnp.array(True),
        lambda: jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]).all(),
    )
