"""What FedAvg and FedSGD share: a server that takes the clients' aggregate for a gradient (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim.algorithm import Algorithm
from fedsim.execution import Client
from fedsim.model import Model, Params


class ServerState(NamedTuple):
    """Parameters, the server optimizer's state, and how often the server has updated, ``int32 []``."""

    params: Params
    opt_state: optax.OptState
    round: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientServer(Algorithm):
    """An algorithm whose clients send something like a gradient, and whose server descends along the aggregate.

    Attributes:
      model: the model.
      server_optimizer: an optax transformation; default SGD of rate 1.
      weighting: ``"examples"`` weights a client by its number of examples, ``"uniform"`` by 1.

    >>> GradientServer(model=None, batches=None, weighting="size")
    Traceback (most recent call last):
    ...
    ValueError: Expected weighting to be 'examples' or 'uniform', got weighting='size'.
    """

    model: Model
    server_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in ("examples", "uniform"):
            raise ValueError(f"Expected weighting to be 'examples' or 'uniform', got weighting={self.weighting!r}.")

    def init(self, key: jax.Array) -> ServerState:
        params = self.model.init(key)
        return ServerState(params, self.server_optimizer.init(params), jnp.zeros((), jnp.int32))

    def server_update(self, state: ServerState, update: Any) -> ServerState:
        updates, opt_state = self.server_optimizer.update(update, state.opt_state, state.params)
        return ServerState(optax.apply_updates(state.params, updates), opt_state, state.round + 1)

    def weight(self, client: Client) -> jax.Array:
        """A client's share in the aggregate, ``float32 []``, by ``weighting``."""
        return client.num_examples.astype(jnp.float32) if self.weighting == "examples" else jnp.float32(1)


def positive(**values: float) -> None:
    """Raises ``ValueError`` naming the first argument that is not above 0 and finite.

    >>> positive(tau=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected tau > 0 and finite, got tau=0.0.
    """
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"Expected {name} > 0 and finite, got {name}={value}.")
