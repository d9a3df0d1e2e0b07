"""What a model computes before its last module: the representation that MOON and FedProto compare, the body of FedPer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

from fedsim.model import Examples, Model, Params, as_output
from fedsim.transfer import module_names

Representation = Callable[[Any], jax.Array]
# (params, examples, key or None for evaluation) -> float [n, features]
Features = Callable[[Params, Examples, jax.Array | None], jax.Array]


def features_of(model: Model, representation: Representation | None = None) -> Features:
    """Returns a function that computes the representation of examples, ``float [n, features]``, one row for each.

    Its arguments are parameters, examples, and the key of a step for the network in training, or None for evaluation.

    Args:
      model: the model.
      representation: a function from the model's outputs to the representation, for networks that return both. None takes the
        input of the Haiku module that the model creates last, usually the output layer.

    Raises:
      ValueError: when it is called, ``representation`` is None and no Haiku module of that name is called.

    >>> import fedsim
    >>> model = fedsim.models.digits_dense()
    >>> features = features_of(model)
    >>> features(model.init(jax.random.key(0)), model.dummy_examples(5), None).shape
    (5, 64)
    """

    def outputs(params: Params, examples: Examples, key: jax.Array | None) -> Any:
        return model.apply_for_eval(params, examples) if key is None else model.apply_for_train(params, examples, key)

    def features(params: Params, examples: Examples, key: jax.Array | None) -> jax.Array:
        if representation is not None:
            return _flat(representation(outputs(params, examples, key)))
        found, last = [], module_names(model)[-1]

        def record(call: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
            if context.method_name == "__call__" and context.module.module_name == last:
                found.append(as_output(args[0] if args else next(iter(kwargs.values()))))
            return call(*args, **kwargs)

        with hk.intercept_methods(record):
            outputs(params, examples, key)
        if not found:
            raise ValueError(
                f"Expected a representation of the model, because its last part {last!r} is no Haiku module that is called "
                "with one, got representation=None: give a function of the model's outputs, such as lambda outputs: "
                "outputs['features']."
            )
        return _flat(found[-1])

    return features


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


def check_body(model: Model, head: Any) -> None:
    """Raises ``ValueError`` if the default head, the last module, is the whole model, so that there is no body before it."""
    modules = module_names(model)
    if head is None and len(modules) == 1:
        raise ValueError(
            f"All parameters are in one module, {modules[0]!r}, which would be the head, so there would be no body. Use a "
            "model with more modules, or set head to select the parameters that belong to it."
        )
