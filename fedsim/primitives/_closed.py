"""Functions whose values from outside become arguments: their traces and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

T = TypeVar("T")


def with_axes(kind: Any, *sizes: int) -> Any:
    """Returns a type with further axes, the first ones, that are not divided. Others stay as they are."""
    sharding = kind.sharding.update(spec=P(*[None] * len(sizes), *kind.sharding.spec))
    return jax.core.ShapedArray((*sizes, *kind.shape), kind.dtype, sharding=sharding)


def zeros(kind: Any) -> jax.Array:
    """Returns an array of zeros of a type."""
    is_divided = any(axes is not None for axes in kind.sharding.spec)
    return jax.lax.full(kind.shape, 0, kind.dtype, sharding=kind.sharding if is_divided else None)


def closed(function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """Traces a function; returns a jaxpr whose first arguments are what the function closes over, and these values.

    Args:
      function: takes ``args`` and returns a sequence of arrays.
      args: arrays, or their shapes and dtypes.
    """
    traced = jax.make_jaxpr(function)(*args)
    consts = traced.consts

    def with_consts(*values: Any) -> Sequence[Any]:
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, list(values[: len(consts)])))(*values[len(consts) :])

    return jax.make_jaxpr(with_consts)(*consts, *args), consts


def constant_unless_counted(function: Callable[[], tuple[T, jax.Array]]) -> T:
    """Returns the value of a function that also returns whether it counts; if not, all derivatives of the value are 0.

    A later selection of zeros is not enough in reverse mode, which multiplies their cotangents, zeros, by the slopes of what
    was not selected: 0 times infinity is NaN. So the cotangents of what the function closes over are set to 0.

    Args:
      function: returns a pytree of arrays and a ``bool []``, and closes over everything that these depend on.
    """
    structure = None

    def flat() -> list[Any]:
        nonlocal structure
        value, counts = function()
        leaves, structure = jax.tree.flatten(value)
        return [*leaves, counts]

    jaxpr, values = closed(flat, [])
    run = jax.custom_jvp(jaxpr_as_fun(jaxpr))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moves = [not isinstance(dot, SymbolicZero) for dot in tangents]

        def moved(*moving: Any) -> list[Any]:
            new = iter(moving)
            return jaxpr_as_fun(jaxpr)(*[next(new) if mark else x for x, mark in zip(primals, moves, strict=True)])

        out, along = jax.linearize(moved, *[x for x, mark in zip(primals, moves, strict=True) if mark])
        dots = [jnp.where(out[-1], dot, 0) for dot, mark in zip(tangents, moves, strict=True) if mark]
        return out, along(*dots)

    run.defjvp(derivative, symbolic_zeros=True)
    return jax.tree.unflatten(structure, run(*values)[:-1])
