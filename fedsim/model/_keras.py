"""Networks of Keras 3 with its JAX backend, https://keras.io.

A Keras model is an object with variables. Here it is made once, in a scope in which its variables keep their initializers, and
``stateless_call`` calls it with other values for them. Its random draws (dropout) come from variables, too, the states of its
seed generators. They get new values from the key of every step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from fedsim.model import _network
from fedsim.model._network import Call, Network, Params

_REMEDY = "give a function that makes it, such as lambda: keras.Sequential([...])"


def network(make: Callable[[], Any], call: Call) -> Network:
    """Returns the functions of the Keras model that ``make`` makes. Parameters are ``{layer: {variable: array}}``."""
    keras = _network.imported("keras", extra="keras", constructor="from_keras")
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Expected Keras to have the backend 'jax', got {keras.backend.backend()!r}: set the environment variable "
            "KERAS_BACKEND=jax before keras is imported."
        )
    _network.check_maker(make, "keras", _REMEDY)
    read, _, train_kwargs, eval_kwargs = call
    example = call.example()
    with keras.StatelessScope(), _names_of_one_model():
        model = make()
        if not isinstance(model, keras.Model):
            raise _network.unexpected("make", model, "a function that returns a keras.Model", "keras", _REMEDY)
        if not model.built:
            model(*example)
        initializers = [each._initializer for each in model.trainable_variables]
    variables, others = model.trainable_variables, model.non_trainable_variables
    _network.refuse_state(
        "keras",
        [each.path for each in others if each.name != "seed_generator_state"],
        "GroupNormalization or LayerNormalization, and no layers with trainable=False",
    )
    # A functional model gets several inputs as one list, and another model as several arguments.
    as_list = isinstance(getattr(model, "input", None), list)

    def apply(params: Params, inputs: tuple, key: jax.Array | None, kwargs: Mapping[str, Any]) -> tuple[Any, list[jax.Array]]:
        values = [params[layer][name] for layer, name in map(_names, variables)]
        keys = [jax.random.fold_in(jax.random.key(0) if key is None else key, number) for number in range(len(others))]
        seeds = [jax.random.bits(key, each.shape, each.dtype) for key, each in zip(keys, others, strict=True)]
        arguments = (list(inputs),) if as_list else inputs
        outputs, _, losses = model.stateless_call(
            values, seeds, *arguments, training=key is not None, return_losses=True, **kwargs
        )
        return outputs, losses

    def init(key: jax.Array) -> Params:
        params: dict[str, dict[str, jax.Array]] = {}
        for number, (variable, initializer) in enumerate(zip(variables, initializers, strict=True)):
            layer, name = _names(variable)
            draw = _seeded(initializer, jax.random.fold_in(key, number))
            params.setdefault(layer, {})[name] = draw(variable.shape, dtype=variable.dtype)
        return params

    _, losses = jax.eval_shape(lambda key: apply(init(key), example, key, train_kwargs), jax.random.key(0))
    if losses:
        raise ValueError(
            f"Expected a Keras model without losses of its own, got {len(losses)}, from regularizers or add_loss, "
            "which clients would not minimize: add them to the argument loss or to client_loss."
        )
    return Network(
        init=init,
        train=lambda params, examples, key: apply(params, read(examples), key, train_kwargs)[0],
        evaluate=lambda params, examples: apply(params, read(examples), None, eval_kwargs)[0],
    )


def _names(variable: Any) -> tuple[str, str]:
    """Returns the path of the variable's layer, and its own name."""
    layer, _, name = variable.path.rpartition("/")
    return layer, name


def _seeded(initializer: Any, key: jax.Array) -> Any:
    """Returns the initializer with the key as its seed, unless the user has chosen its seed."""
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if config.get("seed", 0) is None:
        initializer = initializer.clone()
        initializer.seed = key
    return initializer


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
