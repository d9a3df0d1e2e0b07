"""Networks of Flax Linen, https://flax-linen.readthedocs.io."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedsim.model._network import Call, Examples, Network, check_same_form, check_statistics, imported, joined, unexpected
from fedsim.model._parts import current_scope, mask_for


def network(module: Any, call: Call) -> Network:
    """Returns the functions of a Linen module. Parameters are its collection "params", without boxes of metadata."""
    nn = imported("flax.linen", extra="flax", constructor="from_flax")
    if not isinstance(module, nn.Module):
        raise unexpected("module", module, "an instance of flax.linen.Module", "flax.linen", "give an instance, such as CNN()")
    read, _, train_kwargs, eval_kwargs = call

    # One key is enough: a stream of random numbers that is not given by name, such as "dropout", draws from that of "params".
    def variables(key: jax.Array) -> dict[str, Any]:
        return module.init(key, *call.example(), **train_kwargs)

    shapes = nn.meta.unbox(jax.eval_shape(variables, jax.random.key(0)))
    state = {name: each for name, each in shapes.items() if name != "params"}
    check_statistics("flax.linen", state)

    def init(key: jax.Array) -> Any:
        drawn = nn.meta.unbox(variables(key))
        return joined(*(drawn[name] for name in ("params", *state) if name in drawn))

    def divided(whole: Any) -> dict[str, Any]:
        """Returns the collections: "params", and those of the state."""
        return {name: _chosen(whole, like) for name, like in {"params": shapes.get("params", {}), **state}.items()}

    def by_running_average(next_fun: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        """Calls a normalization with frozen statistics as in evaluation, whatever its module and the call say."""
        norm = context.module
        if not isinstance(norm, nn.BatchNorm) or context.method_name != "__call__" or norm.use_running_average:
            return next_fun(*args, **kwargs)
        if type(norm) is not nn.BatchNorm:
            raise ValueError(
                f"Expected normalizations to be nn.BatchNorm itself with statistics='frozen', got {type(norm).__name__}, "
                "whose call is not known: give it use_running_average=True when it is made."
            )
        return norm.clone(parent=norm.scope, use_running_average=True)(args[0] if args else kwargs["x"])

    def train(whole: Any, examples: Examples, key: jax.Array) -> Any:
        if not state:
            return module.apply(divided(whole), *read(examples), rngs=key, **train_kwargs)
        mask = mask_for(module.__call__)
        with nn.intercept_methods(by_running_average) if current_scope().frozen_statistics else contextlib.nullcontext():
            outputs, new = module.apply(divided(whole), *read(examples), rngs=key, mutable=list(state), **mask, **train_kwargs)
        check_same_form(state, new)
        none = jax.tree.map(lambda _: None, shapes.get("params", {}))
        return outputs, joined(none, *(new[name] for name in state))

    return Network(
        init=init,
        train=train,
        evaluate=lambda whole, examples: module.apply(divided(whole), *read(examples), **eval_kwargs),
        is_statistic=joined(*(jax.tree.map(lambda _, name=name: name in state, each) for name, each in shapes.items()))
        if state
        else None,
    )


def _chosen(whole: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those leaves of a nested dict that another one has."""
    return {name: _chosen(whole[name], each) if isinstance(each, Mapping) else whole[name] for name, each in like.items()}
