"""Networks of Equinox, https://docs.kidger.site/equinox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedsim.model._network import (
    Call,
    Examples,
    Network,
    Params,
    accepts,
    check_maker,
    imported,
    path_names,
    refuse_state,
    unexpected,
)

_REMEDY = "give a function that makes it, such as lambda key: eqx.nn.MLP(784, 10, 100, 2, key=key)"


def network(make: Callable[[jax.Array], Any], call: Call) -> Network:
    """Returns the functions of the Equinox modules that ``make`` makes, mapped over the examples of a batch.

    Parameters are the module with its arrays of floats, and None for everything else.
    """
    eqx = imported("equinox", extra="equinox", constructor="from_equinox")
    read, _, train_kwargs, eval_kwargs = call
    check_maker(make, "equinox", _REMEDY)

    def made(key: jax.Array) -> Any:
        module = make(key)
        if isinstance(module, tuple) and any(isinstance(each, eqx.nn.State) for each in module):
            module = module[0]
        if not isinstance(module, eqx.Module):
            raise unexpected("make", module, "a function that returns an eqx.Module", "equinox", _REMEDY)
        return module

    module = eqx.filter_jit(made)(jax.random.key(0))
    state = path_names(module, lambda leaf: isinstance(leaf, eqx.nn.StateIndex))
    refuse_state("equinox", state, "eqx.nn.GroupNorm or eqx.nn.LayerNorm")
    first, constants = eqx.partition(module, eqx.is_inexact_array)
    structure = jax.tree.structure(first)
    takes_key = accepts(type(module).__call__, "key")

    def apply(params: Params, examples: Examples, kwargs: Mapping[str, Any], key: jax.Array | None = None) -> Any:
        module, inputs = eqx.nn.inference_mode(eqx.combine(params, constants), value=key is None), read(examples)
        if key is None or not takes_key:
            return jax.vmap(lambda *one: module(*one, **kwargs))(*inputs)
        keys = jax.random.split(key, len(jax.tree.leaves(inputs)[0]))
        return jax.vmap(lambda key, *one: module(*one, key=key, **kwargs))(keys, *inputs)

    return Network(
        # The modules of two calls may differ in functions that the constructor makes, so all take the structure of the first.
        init=lambda key: jax.tree.unflatten(structure, jax.tree.leaves(eqx.filter(made(key), eqx.is_inexact_array))),
        train=lambda params, examples, key: apply(params, examples, train_kwargs, key),
        evaluate=lambda params, examples: apply(params, examples, eval_kwargs),
    )
