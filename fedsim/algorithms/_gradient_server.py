"""Base class of FedAvg and FedSGD: the server uses the clients' aggregate as a gradient (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, metrics, tree
from fedsim.aggregators import accumulation_dtype
from fedsim.algorithm import Algorithm
from fedsim.algorithms._descent import check_descent
from fedsim.data import Batch, Batches, FederatedData
from fedsim.model import Model, Params
from fedsim.rounds import Client, RoundInfo


class ServerState(NamedTuple):
    """Parameters, the state of the server optimizer, and the number of server updates so far, ``int32 []``."""

    params: Params
    opt_state: optax.OptState
    round: jax.Array


class Shared(NamedTuple):
    """What clients receive: parameters, and the number of server updates so far, ``int32 []``."""

    params: Params
    round: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientServer(Algorithm):
    """An algorithm whose clients send updates that act as gradients. The server takes an optimizer step along their aggregate.

    Attributes:
      model: the model.
      server_optimizer: an optax transformation. The default is SGD with learning rate 1.
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
        if hasattr(self, "server_optimizer"):  # FedAdam and similar algorithms create it from their fields.
            checks.optimizer(server_optimizer=self.server_optimizer)
        checks.one_of("examples", "uniform", weighting=self.weighting)

    def init(self, key: jax.Array) -> Any:
        params = self.model.init(key)
        return ServerState(params, self._server_optimizer().init(params), jnp.zeros((), jnp.int32))

    def broadcast(self, state: Any) -> Any:
        return Shared(state.params, state.round)

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        updates, opt_state = self._server_optimizer().update(update, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, round=state.round + 1)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_descent(self.model, server_optimizer=self._server_optimizer())

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        """Returns the loss that clients minimize and report. Override this method to use another loss."""
        return self.model.train_loss(params, batch)

    def loss_and_gradient(self, shared: Any, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Returns `client_loss` and its gradient with respect to ``params``.

        Raises:
          ValueError: `client_loss` does not return a scalar.
        """

        def loss(params: Params) -> jax.Array:
            value = self.client_loss(shared, params, batch)
            if jnp.shape(value):
                raise ValueError(
                    f"Expected {type(self).__name__}.client_loss to return a scalar, the mean loss of a batch, got shape "
                    f"{list(jnp.shape(value))}. Average over the examples where batch.mask is True, as model.train_loss does."
                )
            return value

        return jax.value_and_grad(loss)(params)

    def weight(self, client: Client) -> jax.Array:
        """Returns a client's weight in the aggregate, ``float32 []``, as ``weighting`` determines it."""
        return client.num_examples.astype(jnp.float32) if self.weighting == "examples" else jnp.float32(1)

    def participation(self, info: RoundInfo) -> jax.Array:
        """Returns the fraction of the population's weight that participates, ``float32 []``. It is |S| / N if all weights are
        equal.
        """
        whole = info.population_examples if self.weighting == "examples" else info.num_population
        return info.total("weight") / jnp.maximum(whole, 1).astype(jnp.float32)

    def mean_loss(self, shared: Any, client: Client) -> jax.Array:
        """Returns a client's mean training loss over all its examples at the server's parameters, ``float32 []``.

        With dropout it is random.
        """

        def add(losses: metrics.MeanLoss, batch: Batch) -> metrics.MeanLoss:
            count = jnp.sum(batch.mask, dtype=jnp.float32)
            return losses.add(self.client_loss(shared, shared.params, batch), count)

        return client.for_each_batch(self.batches.one_pass(), add, metrics.MeanLoss.zero(), "preview").result()

    def full_gradient(
        self, shared: Any, client: Client, batches: Batches, purpose: str | None = None
    ) -> tuple[jax.Array, Params]:
        """Returns a client's mean loss over all its examples at the server's parameters, and the gradient of this loss."""

        def add(sums: tuple[metrics.MeanLoss, Params], batch: Batch) -> tuple[metrics.MeanLoss, Params]:
            losses, total = sums
            loss, gradient = self.loss_and_gradient(shared, shared.params, batch)
            count = jnp.sum(batch.mask, dtype=jnp.float32)
            total = jax.tree.map(lambda sum, g: sum + count.astype(sum.dtype) * g.astype(sum.dtype), total, gradient)
            return losses.add(loss, count), total

        # Sums are at least float32. In bfloat16 a sum would stop growing after some hundred terms.
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulation_dtype(p.dtype)), shared.params)
        losses, total = client.for_each_batch(batches, add, (metrics.MeanLoss.zero(), zeros), purpose)
        mean = tree.scale(total, 1 / jnp.maximum(losses.num_examples.value(), 1))
        return losses.result(), jax.tree.map(lambda g, p: g.astype(p.dtype), mean, shared.params)

    def _server_optimizer(self) -> optax.GradientTransformation:
        """Returns the server's optimizer. Subclasses create it here if it depends on their fields, which may be traced."""
        return self.server_optimizer
