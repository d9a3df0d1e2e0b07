"""Networks that are plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedsim.model._network import Call, Network, Params, accepts, library_of, unexpected


def network(init: Callable[[jax.Array], Params], apply: Callable[..., Any], call: Call) -> Network:
    """Returns the functions of a network that is given as ``init(key)`` and ``apply(params, *inputs)``."""
    for name, function in {"init": init, "apply": apply}.items():
        if not callable(function) or isinstance(function, type) or library_of(function):
            raise unexpected(name, function, "a function", "plain functions", "give functions init(key) and apply(params, x)")
    read, _, train_kwargs, eval_kwargs = call
    takes_key = accepts(apply, "key")

    def train(params: Params, examples: Any, key: jax.Array) -> Any:
        return apply(params, *read(examples), **({"key": key} if takes_key else {}), **train_kwargs)

    return Network(init, train, lambda params, examples: apply(params, *read(examples), **eval_kwargs))
