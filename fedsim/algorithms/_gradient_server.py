"""What FedAvg and FedSGD share: a server that takes the clients' aggregate for a gradient (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.algorithms._descent import must_descend
from fedsim.data import Batch, FederatedData
from fedsim.execution import Client, Turnout
from fedsim.model import Model, Params


class ServerState(NamedTuple):
    """Parameters, the server optimizer's state, how often the server has updated, ``int32 []``, and what a subclass adds."""

    params: Params
    opt_state: optax.OptState
    round: jax.Array
    more: Any = ()


class Shared(NamedTuple):
    """What clients get: parameters, how often the server has updated, ``int32 []``, and what a subclass adds."""

    params: Params
    round: jax.Array
    more: Any = ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientServer(Algorithm):
    """An algorithm whose clients send something like a gradient, and whose server descends along the aggregate.

    Attributes:
      model: the model.
      server_optimizer: an optax transformation; default SGD of rate 1.
      weighting: ``"examples"`` weights a client by its number of examples, ``"uniform"`` by 1.

    >>> import fedsim
    >>> GradientServer(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), weighting="size")
    Traceback (most recent call last):
    ...
    ValueError: Expected weighting to be 'examples' or 'uniform', got weighting='size'.
    """

    model: Model
    server_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Model, "fedsim.models.emnist_dense()", model=self.model)
        if hasattr(self, "server_optimizer"):  # FedAdam and its kin make it of their own settings, after this.
            checks.optimizer(server_optimizer=self.server_optimizer)
        checks.one_of("examples", "uniform", weighting=self.weighting)

    def init(self, key: jax.Array) -> ServerState:
        params = self.model.init(key)
        return ServerState(params, self.server_optimizer.init(params), jnp.zeros((), jnp.int32))

    def broadcast(self, state: ServerState) -> Any:
        return Shared(state.params, state.round)

    def server_update(self, state: ServerState, update: Any) -> ServerState:
        updates, opt_state = self.server_optimizer.update(update, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, round=state.round + 1)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        must_descend(self.model, server_optimizer=self.server_optimizer)

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        """The loss that clients descend, and that is reported: the hook for another one."""
        return self.model.train_loss(params, batch)

    def weight(self, client: Client) -> jax.Array:
        """A client's share in the aggregate, ``float32 []``, by ``weighting``."""
        return client.num_examples.astype(jnp.float32) if self.weighting == "examples" else jnp.float32(1)

    def share(self, turnout: Turnout) -> jax.Array:
        """The part of the population's weight that came, ``float32 []``: |S| / N, where all weigh the same."""
        whole = turnout.examples if self.weighting == "examples" else turnout.population
        return turnout.weight / jnp.maximum(whole, 1).astype(jnp.float32)
