"""Networks of Flax NNX, https://flax.readthedocs.io."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import rng
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

_REMEDY = "give a function that makes it, such as lambda rngs: CNN(rngs=rngs)"


def network(make: Callable[[Any], Any], call: Call) -> Network:
    """Returns the functions of the modules that ``make`` makes. Parameters are nested dicts of the values of ``nnx.Param``."""
    nnx = imported("flax.nnx", extra="flax", constructor="from_nnx")
    read, _, train_kwargs, eval_kwargs = call
    check_maker(make, "flax.nnx", _REMEDY)

    def made(key: jax.Array) -> Any:
        module = make(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise unexpected("make", module, "a function that returns an nnx.Module", "flax.nnx", _REMEDY)
        return module

    module = nnx.eval_shape(made, jax.random.key(0))
    module.eval()
    evaluated = nnx.graphdef(module)
    module.train()
    trained, _, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    refuse_state("flax.nnx", path_names(nnx.to_pure_dict(others)), "nnx.GroupNorm or nnx.LayerNorm")
    streams = nnx.to_pure_dict(streams)

    def with_key(key: jax.Array) -> Any:
        """Returns the state of the module's random streams: a key of its own for each, and a count of 0."""
        leaves, structure = jax.tree.flatten(streams)
        values = [
            jax.random.fold_in(key, number)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, values)

    def train(params: Params, examples: Examples, key: jax.Array) -> Any:
        module = nnx.merge(trained, params, with_key(key))
        rngs = {"rngs": nnx.Rngs(rng.stream(key, "rngs"))} if accepts(module.__call__, "rngs") else {}
        return module(*read(examples), **rngs, **train_kwargs)

    return Network(
        init=lambda key: nnx.to_pure_dict(nnx.state(made(key), nnx.Param)),
        train=train,
        evaluate=lambda params, examples: nnx.merge(evaluated, params, with_key(jax.random.key(0)))(
            *read(examples), **eval_kwargs
        ),
    )
