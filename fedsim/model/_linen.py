"""Networks of Flax Linen, https://flax-linen.readthedocs.io."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fedsim.model._network import Call, Examples, Network, Params, imported, path_names, refuse_state, unexpected


def network(module: Any, call: Call) -> Network:
    """Returns the functions of a Linen module. Parameters are its collection "params", without boxes of metadata."""
    nn = imported("flax.linen", extra="flax", constructor="from_flax")
    if not isinstance(module, nn.Module):
        raise unexpected("module", module, "an instance of flax.linen.Module", "flax.linen", "give an instance, such as CNN()")
    read, _, train_kwargs, eval_kwargs = call

    # One key is enough: a stream of random numbers that is not given by name, such as "dropout", draws from that of "params".
    def variables(key: jax.Array) -> dict[str, Any]:
        return module.init(key, *call.example(), **train_kwargs)

    shapes = jax.eval_shape(variables, jax.random.key(0))
    state = path_names({name: each for name, each in shapes.items() if name != "params"})
    refuse_state("flax.linen", state, "nn.GroupNorm or nn.LayerNorm")

    def apply(params: Params, examples: Examples, kwargs: Mapping[str, Any], key: jax.Array | None = None) -> Any:
        return module.apply({"params": params}, *read(examples), rngs=key, **kwargs)

    return Network(
        init=lambda key: nn.meta.unbox(variables(key).get("params", {})),
        train=lambda params, examples, key: apply(params, examples, train_kwargs, key),
        evaluate=lambda params, examples: apply(params, examples, eval_kwargs),
    )
