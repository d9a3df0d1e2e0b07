"""Networks of Haiku, https://dm-haiku.readthedocs.io."""

from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax

from fedsim.model._network import (
    Call,
    Examples,
    Network,
    check_same_form,
    check_statistics,
    joined,
    library_of,
    unexpected,
)

_REMEDY = "give hk.transform(function), where the function calls the Haiku modules"


def network(transformed: hk.Transformed, call: Call) -> Network:
    """Returns the functions of a Haiku transform."""
    read, _, train_kwargs, eval_kwargs = call
    if isinstance(transformed, hk.TransformedWithState):
        if jax.eval_shape(functools.partial(transformed.init, **train_kwargs), jax.random.key(0), *call.example())[1]:
            return _with_state(transformed, call)
        transformed = hk.without_state(transformed)
    check_transformed(transformed=transformed)
    return Network(
        init=lambda key: transformed.init(key, *call.example(), **train_kwargs),
        train=lambda params, examples, key: transformed.apply(params, key, *read(examples), **train_kwargs),
        evaluate=lambda params, examples: transformed.apply(params, None, *read(examples), **eval_kwargs),
    )


def _with_state(transformed: hk.TransformedWithState, call: Call) -> Network:
    """Returns the functions of a network with state. The leaves of parameters and state are one dict by module and name."""
    read, _, train_kwargs, eval_kwargs = call

    def init(key: jax.Array) -> Any:
        return joined(*transformed.init(key, *call.example(), **train_kwargs))

    make = functools.partial(transformed.init, **train_kwargs)
    params, state = jax.eval_shape(make, jax.random.key(0), *call.example())
    check_statistics("haiku", state)

    def divided(whole: Any) -> tuple[Any, Any]:
        first, second = ({m: {n: whole[m][n] for n in names} for m, names in part.items()} for part in (params, state))
        return first, second

    def train(whole: Any, examples: Examples, key: jax.Array) -> tuple[Any, Any]:
        outputs, new = transformed.apply(*divided(whole), key, *read(examples), **train_kwargs)
        check_same_form(state, new)
        return outputs, joined(jax.tree.map(lambda _: None, params), new)

    return Network(
        init=init,
        train=train,
        evaluate=lambda whole, examples: transformed.apply(*divided(whole), None, *read(examples), **eval_kwargs)[0],
        is_statistic=joined(jax.tree.map(lambda _: False, params), jax.tree.map(lambda _: True, state)),
    )


def check_transformed(**values: Any) -> None:
    """Raises ``ValueError`` unless the values, given by name, are results of ``hk.transform``.

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
            remedy = "a model in parts has no state, so use hk.GroupNorm or hk.LayerNorm, and give hk.transform(function)"
        elif library_of(value) is None and callable(getattr(value, "init", None)) and callable(getattr(value, "apply", None)):
            remedy = (
                "for functions of your own or of a library without a constructor, use fedsim.Model.from_functions(init, apply)"
            )
        raise unexpected(name, value, "the result of hk.transform", "haiku", remedy)
