"""The optimizer of clients, SGD or another one of optax, with a learning rate that may change over the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedsim.configuration._client_schedule import client_schedule
from fedsim.configuration._config import RunConfig
from fedsim.names import check_options, look_up, parse_call

_NAMES = (
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam",
    "nadamw", "radam", "rmsprop", "sgd", "yogi",
)  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {name: getattr(optax, name) for name in _NAMES}
ClientOptimizer: TypeAlias = optax.GradientTransformation | Callable[[jax.Array], optax.GradientTransformation]


def client_optimizer(config: RunConfig) -> ClientOptimizer:
    """Returns an optimizer with a constant learning rate, or a function from the round, ``int32 []``, to its optimizer.

    It is SGD, or what ``client_optimizer`` names, such as ``"adamw(weight_decay=0.1)"``; its options are those of optax.

    Raises:
      ValueError: there is no such optimizer, it has no such option, or it is given together with ``client_momentum``.

    >>> optimizer = client_optimizer(RunConfig(client_learning_rate=0.5, client_schedule="linear", rounds=10))
    >>> sgd = optimizer(jax.numpy.int32(5))
    >>> sgd.update(jax.numpy.float32(1), sgd.init(jax.numpy.float32(0)))[0].item()
    -0.25
    """
    make = _optimizer(config)
    rate = client_schedule(config.client_schedule)(config.client_learning_rate, config.rounds)
    if rate is None:
        return make(config.client_learning_rate)
    # As a float, because optax divides it, and strict dtype promotion does not allow that for an integer.
    return lambda round: make(rate(jnp.asarray(round, jnp.float32)))


def _optimizer(config: RunConfig) -> Callable[[Any], optax.GradientTransformation]:
    """Returns the function from a learning rate to the optimizer."""
    if config.client_optimizer is None:
        return lambda rate: optax.sgd(rate, config.client_momentum or None)
    if config.client_momentum:
        raise ValueError(
            f"Expected client_optimizer or client_momentum, got client_optimizer={config.client_optimizer!r} and "
            f"client_momentum={config.client_momentum}: write 'sgd(momentum={config.client_momentum})', or leave one out."
        )
    name, options = parse_call(config.client_optimizer)
    factory = look_up("client optimizer", name, OPTIMIZERS)
    if "learning_rate" in options:
        raise ValueError(
            f"Expected client_optimizer without its learning rate, got {config.client_optimizer!r}: give client_learning_rate."
        )
    check_options("client optimizer", name, factory, options)
    return lambda rate: factory(rate, **options)
