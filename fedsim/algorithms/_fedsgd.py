"""Federated SGD.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, section 2 (FedSGD): https://arxiv.org/abs/1602.05629.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import optax

from fedsim import checks
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.algorithms._descent import check_descent
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_step import Shared, Weighting, after_step, first_state, weight_of
from fedsim.data import Batch, Batches, FederatedData
from fedsim.model import Model, Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo

_REFUSED = {"kept": "clients take no local steps, which would train these; use FedAvg, for example"}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedSGD(Algorithm):
    """FedSGD: each client sends the gradient of its mean loss at the server's parameters, and the server takes one step.

    The gradient is summed over batches. So ``batches.size`` limits the memory and does not change the result, unless the model
    combines the examples of a batch or uses random numbers.

    Attributes:
      model: the model.
      server_optimizer: an optax transformation, which sets the learning rate. The default is SGD with learning rate 1.
      weighting: ``"examples"`` weights a client by its number of examples, ``"uniform"`` by 1.
      batches: default: one pass, 256 examples at a time, in stored order.

    Raises:
      ValueError: an attribute is not of the kind that is described.

    >>> import jax, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedSGD(model=fedsim.models.emnist_logistic(), server_optimizer=optax.sgd(0.1))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_steps"].tolist()
    [1, 1]
    """

    capabilities = Capabilities(ordered=False, scalable=True, model_parts=True, refused_parts=_REFUSED)

    model: Model
    server_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
    weighting: Weighting = "examples"
    batches: Batches = dataclasses.field(default_factory=lambda: Batches(size=256, shuffle=False))

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Model, "fedsim.models.emnist_dense()", model=self.model)
        checks.optimizer(server_optimizer=self.server_optimizer)
        checks.one_of("examples", "uniform", weighting=self.weighting)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_descent(self.model, server_optimizer=self.server_optimizer)

    def init(self, key: jax.Array) -> Any:
        return first_state(self.model.init(key), self.server_optimizer)

    def broadcast(self, state: Any) -> Any:
        return Shared(state.params, state.round)

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        """Returns the loss whose gradient clients send. Override this method to use another loss."""
        return self.model.train_loss(params, batch)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = LocalTraining(functools.partial(self.client_loss, shared), self.batches)
        loss, gradient, parts = training.gradient_and_parts(client, shared.params)
        return ClientUpdate(gradient, self.weight(client), {"loss": loss}, parts=parts)

    def weight(self, client: Client) -> jax.Array:
        """Returns a client's weight in the aggregate, ``float32 []``, as ``weighting`` determines it."""
        return weight_of(client, self.weighting)

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        return after_step(state, update, self.server_optimizer)
