"""The server's step along the clients' aggregate, which it uses as a gradient (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim.aggregators import PartlyUniform
from fedsim.algorithm import Algorithm
from fedsim.model import Params
from fedsim.rounds import Client

Weighting = Literal["examples", "uniform"]


class ServerState(NamedTuple):
    """Parameters, the state of the server optimizer, and the number of server updates so far, ``int32 []``."""

    params: Params
    opt_state: optax.OptState
    round: jax.Array


class Shared(NamedTuple):
    """What clients receive: parameters, and the number of server updates so far, ``int32 []``."""

    params: Params
    round: jax.Array


def first_state(params: Params, optimizer: optax.GradientTransformation) -> ServerState:
    """Returns the server's state before the first round."""
    return ServerState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def after_step(state: Any, gradient: Params, optimizer: optax.GradientTransformation) -> Any:
    """Returns a state with the fields of `ServerState`, and maybe others, after a step of the server's optimizer."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state, round=state.round + 1)


def weight_of(client: Client, weighting: Weighting) -> jax.Array:
    """Returns a client's weight in the aggregate, ``float32 []``: its number of examples, or 1."""
    return client.num_examples.astype(jnp.float32) if weighting == "examples" else jnp.float32(1)


def check_weights_all_alike(algorithm: Algorithm, reason: str) -> None:
    """Raises ``ValueError`` if the aggregator gives clients other weights for some parameters than for the others.

    >>> import fedsim
    >>> fedavg = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> check_weights_all_alike(fedavg, "there is a reason")
    """
    if isinstance(algorithm.aggregator.innermost, PartlyUniform):
        raise ValueError(
            f"Expected an aggregator with the same weights for all parameters with {type(algorithm).__name__}, got "
            f"PartlyUniform: {reason}. Use another aggregator."
        )


def from_fields(make: Callable[[Any], optax.GradientTransformation]) -> property:
    """Returns a property for ``server_optimizer``. It is made at each use, because the fields are traced in a round."""
    return property(make, doc="The server's optimizer, which is made from the fields.")
