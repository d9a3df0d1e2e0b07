"""Networks of Equinox, https://docs.kidger.site/equinox.

The state of an Equinox module is a value of its own, an ``eqx.nn.State``, and the module has an ``eqx.nn.StateIndex`` for each
variable of it. Here a module is whole: each index has the value of its variable in the field ``init``, where it is until
``eqx.nn.make_with_state`` takes it out.

``eqx.nn.BatchNorm(mode="batch")`` counts its batches: after ``c`` of them they have the share ``1 - momentum ** c`` in its
averages, by which evaluation divides these. A mean of counts over clients with different numbers of steps would not fit the
mean of their averages. So the statistic here is the share in place of the count: the mean of shares is the share in the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
    check_statistics,
    imported,
    made_by,
    unexpected,
)
from fedsim.model._parts import current_scope

_REMEDY = "give a function that makes it, such as lambda key: eqx.nn.MLP(784, 10, 100, 2, key=key)"


def network(make: Callable[[jax.Array], Any], axis_name: str, call: Call) -> Network:
    """Returns the functions of the Equinox modules that ``make`` makes, mapped over the examples of a batch.

    Parameters and statistics are the module with its arrays of floats, and None for everything else.
    """
    eqx = imported("equinox", extra="equinox", constructor="from_equinox")
    read, _, train_kwargs, eval_kwargs = call
    check_maker(make, "equinox", _REMEDY)

    def is_index(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    def is_norm(node: Any) -> bool:
        return isinstance(node, eqx.nn.BatchNorm)

    def with_state(module: Any, value: Callable[[Any], Any]) -> Any:
        """Returns a module with other values of its state, each a function of the index."""

        def of_index(index: Any) -> Any:
            return eqx.tree_at(lambda each: each.init, index, value(index))

        return jax.tree.map(lambda node: of_index(node) if is_index(node) else node, module, is_leaf=is_index)

    def with_norms(function: Callable[..., Any], module: Any, *others: Any) -> Any:
        """Returns a module in which a function of them replaces the normalizations with a count."""

        def replaced(node: Any, *same: Any) -> Any:
            return function(node, *same) if is_norm(node) and node.mode == "batch" else node

        return jax.tree.map(replaced, module, *others, is_leaf=is_norm)

    def share(norm: Any, before: Any = 0.0) -> Any:
        """Returns a normalization with a share in place of its count, after one with the share ``before``."""
        decay = norm.momentum ** norm.batch_counter.init.astype(jnp.float32)
        return eqx.tree_at(lambda each: each.batch_counter.init, norm, 1 - decay * (1 - before))

    def made(key: jax.Array) -> Any:
        module, state = made_by(make, key, constructor="from_equinox", given="a key"), None
        if isinstance(module, tuple) and len(module) == 2 and isinstance(module[1], eqx.nn.State):
            module, state = module
        if not isinstance(module, eqx.Module):
            raise unexpected("make", module, "a function that returns an eqx.Module", "equinox", _REMEDY)

        def first(index: Any) -> Any:
            if state is None and not jax.tree.leaves(index.init):
                raise ValueError(
                    "Expected make to return a module together with its state, got the module alone: return both, such as "
                    "lambda key: eqx.nn.make_with_state(Net)(key=key)."
                )
            return jax.tree.map(jnp.asarray, index.init if state is None else state.get(index))

        return with_norms(share, with_state(module, first))

    module = eqx.filter_jit(made)(rng.root(0))
    check_statistics("equinox", jax.tree.map(lambda node: node if is_index(node) else None, module, is_leaf=is_index))
    for norm in filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm)):
        if norm.axis_name != axis_name:
            raise ValueError(
                f"Expected axis_name to be that of the module's eqx.nn.BatchNorm, {norm.axis_name!r}, got "
                f"axis_name={axis_name!r}: give the same name to from_equinox and to the module."
            )
    first, constants = eqx.partition(module, eqx.is_inexact_array)
    structure = jax.tree.structure(first)
    is_statistic = jax.tree.map(lambda node: jax.tree.map(lambda _: is_index(node), node), first, is_leaf=is_index)
    has_state = any(jax.tree.leaves(is_statistic))
    takes_key = accepts(type(module).__call__, "key")

    def apply(whole: Params, examples: Examples, kwargs: Mapping[str, Any], key: jax.Array | None = None) -> tuple[Any, Any]:
        """Returns the outputs, and the statistics after the call."""
        fixed = key is None or current_scope().frozen_statistics

        def counting(norm: Any) -> Any:
            """Returns a normalization with a count of 0, and with divided averages where it is only evaluated."""
            averages, before = norm.batch_state_index.init, norm.batch_counter.init
            if fixed or norm.inference:
                averages = jax.tree.map(lambda x: x / jnp.where(before == 0, 1, before), averages)
                norm = eqx.nn.inference_mode(norm)
            values = jnp.zeros((), jnp.int32), averages
            norm = eqx.tree_at(lambda each: (each.batch_counter.init, each.batch_state_index.init), norm, values)
            return _frozen_norm(eqx)(norm) if fixed and key is not None and type(norm) is eqx.nn.BatchNorm else norm

        def counted(norm: Any, old: Any) -> Any:
            """Returns a normalization with a share in place of its count after a call; as it was if it was only evaluated."""
            return old if old.inference else share(norm, old.batch_counter.init)

        before = eqx.combine(whole, constants)
        if key is None:
            before = eqx.nn.inference_mode(before)
        called = with_norms(counting, before)
        state, function, inputs = eqx.nn.State(called), eqx.nn.delete_init_state(called), read(examples)
        keys = None
        if key is not None and takes_key:
            keys = jax.random.split(key, len(jax.tree.leaves(inputs)[0]))

        def of_one(state: Any, key: jax.Array | None, *one: Any) -> tuple[Any, Any]:
            named = kwargs if key is None else {**kwargs, "key": key}
            if not has_state:
                return function(*one, **named), state
            result = function(*one, state, **named)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)):
                raise ValueError(
                    f"Expected a module with state to return its outputs and the new state, got a {type(result).__name__}: "
                    "return (outputs, state)."
                )
            return result

        mapped = jax.vmap(of_one, in_axes=(None, 0, *(0 for _ in inputs)), out_axes=(0, None), axis_name=axis_name)
        outputs, state = mapped(state, keys, *inputs)
        after = before
        if has_state and not fixed:
            after = with_norms(counted, with_state(before, state.get), before)
        return outputs, jax.tree.map(
            lambda chosen, x: x if chosen else None, is_statistic, eqx.filter(after, eqx.is_inexact_array)
        )

    def train(whole: Params, examples: Examples, key: jax.Array) -> Any:
        outputs, new = apply(whole, examples, train_kwargs, key)
        return (outputs, new) if has_state else outputs

    return Network(
        # The modules of two calls may differ in functions that the constructor makes, so all take the structure of the first.
        init=lambda key: jax.tree.unflatten(structure, jax.tree.leaves(eqx.filter(made(key), eqx.is_inexact_array))),
        train=train,
        evaluate=lambda whole, examples: apply(whole, examples, eval_kwargs)[0],
        is_statistic=is_statistic if has_state else None,
    )


@functools.cache
def _frozen_norm(eqx: Any) -> type:
    """Returns the class of normalizations with frozen statistics, which are called as in evaluation, whatever the call says."""

    class FrozenBatchNorm(eqx.Module):
        norm: Any

        def __call__(self, x: jax.Array, state: Any, *, key: Any = None, inference: bool | None = None) -> tuple[Any, Any]:
            return self.norm(x, state, inference=True)

    return FrozenBatchNorm
