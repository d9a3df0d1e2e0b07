"""SGD for clients, with a learning rate that may change over the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedsim.configuration._config import RunConfig

ClientOptimizer: TypeAlias = optax.GradientTransformation | Callable[[jax.Array], optax.GradientTransformation]


def client_optimizer(config: RunConfig) -> ClientOptimizer:
    """Returns SGD with a constant learning rate, or a function from the number of the round, ``int32 []``, to its SGD.

    With r0 = ``client_learning_rate``, R = ``rounds``, e = ``client_schedule_end``, the rate in round t = 0, 1, ... is

    - linear: r0 (1 - (1 - e) t / R);
    - cosine: r0 (e + (1 - e) (1 + cos(pi t / R)) / 2);
    - exponential: r0 ``client_schedule_decay`` ** (t / ``client_schedule_every``). With ``client_schedule_staircase`` the
      exponent is rounded down.

    >>> optimizer = client_optimizer(RunConfig(client_learning_rate=0.5, client_schedule="linear", rounds=10))
    >>> sgd = optimizer(jax.numpy.int32(5))
    >>> sgd.update(jax.numpy.float32(1), sgd.init(jax.numpy.float32(0)))[0].item()
    -0.25
    """
    momentum = config.client_momentum or None
    rate: Callable[[jax.Array], Any] | None = _rate(config)
    if rate is None:
        return optax.sgd(config.client_learning_rate, momentum)
    # As a float, because optax divides it, and strict dtype promotion does not allow that for an integer.
    return lambda round: optax.sgd(rate(jnp.asarray(round, jnp.float32)), momentum)


def _rate(config: RunConfig) -> optax.Schedule | None:
    start, end = config.client_learning_rate, config.client_schedule_end
    match config.client_schedule:
        case "linear":
            return optax.linear_schedule(start, start * end, config.rounds)
        case "cosine":
            return optax.cosine_decay_schedule(start, config.rounds, alpha=end)
        case "exponential":
            every, decay = config.client_schedule_every, config.client_schedule_decay
            return optax.exponential_decay(start, every, decay, staircase=config.client_schedule_staircase)
        case _:
            return None
