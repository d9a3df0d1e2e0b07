"""Networks of Haiku, https://dm-haiku.readthedocs.io."""

from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax

from fedsim.model._network import Call, Network, library_of, path_names, unexpected

_REMEDY = "give hk.transform(function), where the function calls the Haiku modules"


def network(transformed: hk.Transformed, call: Call) -> Network:
    """Returns the functions of a Haiku transform."""
    read, _, train_kwargs, eval_kwargs = call
    state: list[str] = []
    if isinstance(transformed, hk.TransformedWithState):
        initial = jax.eval_shape(functools.partial(transformed.init, **train_kwargs), jax.random.key(0), *call.example())
        state = path_names(initial[1])
    check_transformed(state, transformed=transformed)
    return Network(
        init=lambda key: transformed.init(key, *call.example(), **train_kwargs),
        train=lambda params, examples, key: transformed.apply(params, key, *read(examples), **train_kwargs),
        evaluate=lambda params, examples: transformed.apply(params, None, *read(examples), **eval_kwargs),
    )


def check_transformed(state: list[str] | None = None, **values: Any) -> None:
    """Raises ``ValueError`` unless the values, given by name, are results of ``hk.transform``.

    Args:
      state: the names of the state's variables, if they are known.
      **values: the values.

    >>> check_transformed(top="linear")
    Traceback (most recent call last):
    ...
    ValueError: Expected top to be the result of hk.transform, got a str: give hk.transform(function), where the function \
calls the Haiku modules.
    """
    for name, value in values.items():
        if isinstance(value, hk.Transformed):
            continue
        remedy = _REMEDY
        if isinstance(value, hk.TransformedWithState | hk.MultiTransformedWithState):
            variables = f" ({', '.join(state)})" if state else ""
            remedy = (
                f"models with state{variables} are not supported, so replace batch normalization "
                "and its running averages by hk.GroupNorm or hk.LayerNorm, and give hk.transform(function)"
            )
        elif library_of(value) is None and callable(getattr(value, "init", None)) and callable(getattr(value, "apply", None)):
            remedy = (
                "for functions of your own or of a library without a constructor, use fedsim.Model.from_functions(init, apply)"
            )
        raise unexpected(name, value, "the result of hk.transform", "haiku", remedy)
