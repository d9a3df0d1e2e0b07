"""Tracing of a function whose values from outside become arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


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
