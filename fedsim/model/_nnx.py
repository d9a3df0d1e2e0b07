"""Networks of Flax NNX, https://flax.readthedocs.io."""

from __future__ import annotations

import functools
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
    check_same_form,
    check_statistics,
    imported,
    joined,
    made_by,
    unexpected,
)
from fedsim.model._parts import current_scope, mask_for

_REMEDY = "give a function that makes it, such as lambda rngs: CNN(rngs=rngs)"


def network(make: Callable[[Any], Any], call: Call) -> Network:
    """Returns the functions of the modules that ``make`` makes.

    Parameters are nested dicts of the values of ``nnx.Param``, and statistics those of all other variables but random streams.
    """
    nnx = imported("flax.nnx", extra="flax", constructor="from_nnx")
    read, _, train_kwargs, eval_kwargs = call
    check_maker(make, "flax.nnx", _REMEDY)

    def made(key: jax.Array) -> Any:
        module = made_by(make, nnx.Rngs(key), constructor="from_nnx", given="an nnx.Rngs")
        if not isinstance(module, nnx.Module):
            raise unexpected("make", module, "a function that returns an nnx.Module", "flax.nnx", _REMEDY)
        return module

    module = nnx.eval_shape(made, jax.random.key(0))
    module.eval()
    evaluated = nnx.graphdef(module)
    module.train()
    trained, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    params, streams, statistics = map(nnx.to_pure_dict, states)
    check_statistics("flax.nnx", statistics)
    # A call may add variables of other types, such as nnx.Intermediate, which are no state.
    kinds = {type(each) for _, each in nnx.iter_graph(module) if isinstance(each, nnx.Variable)}
    # With frozen statistics, normalizations use the running ones in training, too.
    module.set_attributes(use_running_average=True, raise_if_not_found=False)
    # They then have another class, because a call may say otherwise.
    for norm in [each for _, each in nnx.iter_graph(module) if type(each) is nnx.BatchNorm]:
        object.__setattr__(norm, "__class__", _frozen_norm(nnx))
    trained_with_frozen = nnx.graphdef(module)

    def with_key(key: jax.Array) -> Any:
        """Returns the state of the module's random streams: a key of its own for each, and a count of 0.

        Streams of stacked layers have an array of keys.
        """
        leaves, structure = jax.tree.flatten(streams)

        def value(number: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            own = jax.random.fold_in(key, number)
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        return jax.tree.unflatten(structure, [value(number, leaf) for number, leaf in enumerate(leaves)])

    def parts(module: Any) -> tuple[Any, Any]:
        """Returns the module's parameters and statistics."""
        first, _, second, _ = nnx.state(module, nnx.Param, nnx.RngState, nnx.Any(*kinds), ...)
        return nnx.to_pure_dict(first), nnx.to_pure_dict(second)

    def train(whole: Params, examples: Examples, key: jax.Array) -> Any:
        module = nnx.merge(trained_with_frozen if current_scope().frozen_statistics else trained, whole, with_key(key))
        rngs = {"rngs": nnx.Rngs(rng.stream(key, "rngs"))} if accepts(module.__call__, "rngs") else {}
        mask = mask_for(module.__call__) if statistics else {}
        outputs = module(*read(examples), **rngs, **mask, **train_kwargs)
        if not statistics:
            return outputs
        _, new = parts(module)
        check_same_form(statistics, new)
        return outputs, joined(jax.tree.map(lambda _: None, params), new)

    return Network(
        init=lambda key: joined(*parts(made(key))),
        train=train,
        evaluate=lambda whole, examples: nnx.merge(evaluated, whole, with_key(rng.root(0)))(*read(examples), **eval_kwargs),
        is_statistic=joined(jax.tree.map(lambda _: False, params), jax.tree.map(lambda _: True, statistics))
        if statistics
        else None,
    )


@functools.cache
def _frozen_norm(nnx: Any) -> type:
    """Returns the class of normalizations with frozen statistics, which are called as in evaluation, whatever the call says."""

    class FrozenBatchNorm(nnx.BatchNorm):
        def __call__(self, x: jax.Array, use_running_average: bool | None = None, **kwargs: Any) -> jax.Array:
            return super().__call__(x, use_running_average=True, **kwargs)

    return FrozenBatchNorm
