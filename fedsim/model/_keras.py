"""Networks of Keras 3 with its JAX backend, https://keras.io.

A Keras model is an object with variables. Here it is made once, in a scope in which its variables keep their initializers, and
``stateless_call`` calls it with other values for them, and returns the new values of those that are not trained. Its random
draws (dropout) come from variables, too, the states of its seed generators. They get new values from the key of every step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fedsim import rng
from fedsim.model import _network
from fedsim.model._network import Call, Examples, Network, Params
from fedsim.model._parts import current_scope, mask_for

_REMEDY = "give a function that makes it, such as lambda: keras.Sequential([...])"


def network(make: Callable[[], Any], call: Call) -> Network:
    """Returns the functions of the Keras model that ``make`` makes.

    Parameters and statistics are ``{layer: {variable: array}}``.
    """
    keras = _network.imported("keras", extra="keras", constructor="from_keras")
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Expected Keras to have the backend 'jax', got {keras.backend.backend()!r}: set the environment variable "
            "KERAS_BACKEND=jax before keras is imported."
        )
    _network.check_maker(make, "keras", _REMEDY)
    read, _, train_kwargs, eval_kwargs = call
    example = call.example()
    with keras.StatelessScope() as scope, _names_of_one_model():
        model = _network.made_by(make, constructor="from_keras", given="no argument")
        if not isinstance(model, keras.Model):
            raise _network.unexpected("make", model, "a function that returns a keras.Model", "keras", _REMEDY)
        assigned = {each.path: scope.get_current_value(each) for each in model.variables}  # such as weights from a file
        if not model.built:
            model(*example)
        trainable, others = model.trainable_variables, model.non_trainable_variables
        statistics = [each for each in others if not _is_seed(each)]
        variables = [*trainable, *statistics]
        initializers = [_initializer(each, assigned.get(each.path)) for each in variables]
    paths = [each.path for each in variables]
    if twice := [path for number, path in enumerate(paths) if path in paths[:number]]:
        raise ValueError(
            f"Expected a Keras model whose variables have different names, got {twice[0]} twice: give layers different names."
        )
    frozen = [
        each.path for layer in model._flatten_layers() if not layer.trainable for each in layer.variables if not _is_seed(each)
    ]
    if frozen:
        raise ValueError(
            f"Expected a Keras model whose layers are trainable, got trainable=False for {', '.join(dict.fromkeys(frozen))}: "
            "leave these layers trainable, and freeze their parameters by model.with_parts(frozen=...)."
        )
    _network.check_statistics("keras", _by_layer(statistics, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in statistics]))
    # A functional model gets several inputs as one list, and another model as several arguments.
    as_list = isinstance(getattr(model, "input", None), list)

    # The argument mask of Keras's own models is about other axes.
    takes_mask = bool(statistics) and not type(model).call.__module__.startswith("keras.")

    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]

    def apply(whole: Params, inputs: tuple, key: jax.Array | None, kwargs: Mapping[str, Any]) -> tuple[Any, Params, list[Any]]:
        """Returns the outputs, the values of variables after the call by layer and name, and losses."""

        def value(variable: Any, number: int) -> jax.Array:
            if _is_seed(variable):
                seed = jax.random.fold_in(rng.root(0) if key is None else key, number)
                return jax.random.bits(seed, variable.shape, variable.dtype)
            layer, name = _names(variable)
            return whole[layer][name]

        arguments = (list(inputs),) if as_list else inputs
        mask = mask_for(model.call) if takes_mask and key is not None else {}
        fixed = key is not None and current_scope().frozen_statistics
        with _not_trainable(norms if fixed else ()):
            groups = model.trainable_variables, model.non_trainable_variables
            values = [[value(variable, number) for number, variable in enumerate(group)] for group in groups]
            outputs, after, losses = model.stateless_call(
                *values, *arguments, training=key is not None, return_losses=True, **mask, **kwargs
            )
        return outputs, _by_layer(groups[1], after), losses

    def init(key: jax.Array) -> Params:
        draws = [_seeded(each, jax.random.fold_in(key, number)) for number, each in enumerate(initializers)]
        return _by_layer(variables, [draw(x.shape, dtype=x.dtype) for draw, x in zip(draws, variables, strict=True)])

    *_, losses = jax.eval_shape(lambda key: apply(init(key), example, key, train_kwargs), jax.random.key(0))
    if losses:
        raise ValueError(
            f"Expected a Keras model without losses of its own, got {len(losses)}, from regularizers or add_loss, "
            "which clients would not minimize: add them to the argument loss or to client_loss."
        )

    def train(whole: Params, examples: Examples, key: jax.Array) -> Any:
        outputs, new, _ = apply(whole, read(examples), key, train_kwargs)
        if not statistics:
            return outputs
        after = [new[layer][name] for layer, name in map(_names, statistics)]
        return outputs, _by_layer(variables, [*(None for _ in trainable), *after])

    return Network(
        init=init,
        train=train,
        evaluate=lambda whole, examples: apply(whole, read(examples), None, eval_kwargs)[0],
        is_statistic=_by_layer(variables, [number >= len(trainable) for number in range(len(variables))])
        if statistics
        else None,
    )


def _is_seed(variable: Any) -> bool:
    return variable.name == "seed_generator_state"


def _by_layer(variables: Sequence[Any], values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of variables by layer and name."""
    by_layer: dict[str, dict[str, Any]] = {}
    for variable, x in zip(variables, values, strict=True):
        layer, name = _names(variable)
        by_layer.setdefault(layer, {})[name] = x
    return by_layer


def _names(variable: Any) -> tuple[str, str]:
    """Returns the path of the variable's layer, and its own name."""
    layer, _, name = variable.path.rpartition("/")
    return layer, name


def _initializer(variable: Any, assigned: jax.Array | None) -> Any:
    return variable._initializer if assigned is None else lambda shape, dtype: assigned.astype(dtype)


def _seeded(initializer: Any, key: jax.Array) -> Any:
    """Returns the initializer with the key as its seed, unless the user has chosen its seed."""
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if config.get("seed", 0) is None:
        initializer = initializer.clone()
        initializer.seed = key
    return initializer


@contextlib.contextmanager
def _not_trainable(norms: Sequence[Any]) -> Iterator[None]:
    """Sets the state in which ``BatchNormalization`` normalizes by its moving averages in training, too."""
    for norm in norms:
        norm.trainable = False
    try:
        yield
    finally:
        for norm in norms:
            norm.trainable = True


@contextlib.contextmanager
def _names_of_one_model() -> Iterator[None]:
    """Numbers automatic names of layers, such as dense_1, from the start, as in a process that makes one model only."""
    global_state = importlib.import_module("keras.src.backend.common.global_state")
    numbers = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", numbers)
