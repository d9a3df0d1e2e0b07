"""Federated averaging.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017 (Algorithm 1): https://arxiv.org/abs/1602.05629. The generalization to any client and server
optimizer: S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated
optimization", ICLR 2021 (Algorithm 1, FedOpt): https://arxiv.org/abs/2003.00295.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, tree
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.algorithms._descent import check_descent
from fedsim.algorithms._local_training import Local, LocalTraining, Schedule, check_client_optimizer
from fedsim.algorithms._server_step import Shared, Weighting, after_step, first_state, weight_of
from fedsim.data import Batch, FederatedData
from fedsim.model import Model, Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAvg(Algorithm):
    """FedAvg: clients train from the server's parameters, and the server takes a step along the mean of their updates.

    Each client i takes local steps with ``client_optimizer`` from the server's parameters x to x_i, and sends the update
    x - x_i. The weighted mean of the updates is the gradient for ``server_optimizer``. With the default, SGD with learning rate
    1, x becomes the weighted mean of the x_i.

    Attributes:
      model: the model.
      client_optimizer: an optax transformation. Every client starts every round with a new optimizer state. For a schedule over
        rounds, use a function from the number of server updates so far, ``int32 []``, to a transformation: ``lambda round:
        optax.sgd(0.1 * 0.99**round)``. An optimizer that accumulates the gradients of several steps (`optax.MultiSteps`) loses
        those that it holds after a client's last step; a warning says so.
      server_optimizer: an optax transformation. The default is SGD with learning rate 1.
      weighting: ``"examples"`` weights a client by its number of examples, ``"uniform"`` by 1.

    Raises:
      ValueError: an attribute is not of the kind that is described.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                    batches=fedsim.Batches(size=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_steps"].tolist(), info.clients["weight"].tolist()
    ([2, 1], [4.0, 2.0])
    """

    capabilities = Capabilities(scalable=True, model_parts=True, microbatches=True)

    model: Model
    client_optimizer: optax.GradientTransformation | Schedule
    server_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
    weighting: Weighting = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Model, "fedsim.models.emnist_dense()", model=self.model)
        checks.optimizer(or_schedule=True, client_optimizer=self.client_optimizer)
        checks.optimizer(server_optimizer=self.server_optimizer)
        checks.one_of("examples", "uniform", weighting=self.weighting)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_descent(self.model, server_optimizer=self.server_optimizer)
        check_client_optimizer(self.model, self.client_optimizer, self.batches, data)

    def init(self, key: jax.Array) -> Any:
        return first_state(self.model.init(key), self.server_optimizer)

    def broadcast(self, state: Any) -> Any:
        return Shared(state.params, state.round)

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        """Returns the loss that clients minimize and report. Override this method to use another loss."""
        return self.model.train_loss(params, batch)

    def _check_client_loss(self, where: str = "") -> None:
        """Raises ``ValueError`` if a class overrides `client_loss` of an algorithm that computes the loss in its own way."""
        if type(self).client_loss is not FedAvg.client_loss:
            raise ValueError(
                f"Expected {type(self).__name__} to leave client_loss as it is{where}, got a class that overrides it: the loss "
                "is that of the model. Change the model's loss."
            )

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        """Returns how a client trains. Override this method to add a term, or to change another part.

        `LocalTraining.with_term` adds a term to what ``super().local_training(shared, client)`` returns. The method may be
        called more than once in a round, so a pass over the client's examples belongs in `client_update`.
        """
        return LocalTraining.of(self, shared)

    def train(self, shared: Any, client: Client) -> Local:
        """Returns the result of a client's local steps, which a round sends and fine-tuning evaluates.

        Override this method to let them start elsewhere than from the server's parameters.
        """
        return self.local_training(shared, client).run(client, shared.params)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        movement = tree.subtract(shared.params, local.params)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, parts=local.parts)

    def weight(self, client: Client) -> jax.Array:
        """Returns a client's weight in the aggregate, ``float32 []``, as ``weighting`` determines it."""
        return weight_of(client, self.weighting)

    def participation(self, info: RoundInfo) -> jax.Array:
        """Returns the fraction of the population's weight that participates, ``float32 []``: if all weights are
        equal, the cohort's share of the clients.
        """
        whole = info.population_examples if self.weighting == "examples" else info.num_population
        return info.total("weight") / jnp.maximum(whole, 1).astype(jnp.float32)

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        return after_step(state, update, self.server_optimizer)
