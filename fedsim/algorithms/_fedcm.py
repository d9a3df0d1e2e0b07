"""FedCM: client-level momentum.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao, "FedCM: Federated learning with client-level momentum", 2021, Algorithm 1:
https://arxiv.org/abs/2106.10874. The server keeps Δ, the mean gradient of the last round, which is 0 at first. With S the
cohort, g_i(·) the client's gradients and η_l the learning rate of ``client_optimizer``::

    y = x;  K times:  y = y - η_l (α g_i(y) + (1 - α) Δ)
    Δ = mean_S (x - y) / (K η_l),     x = x - η_g Δ

Deviations: the gradient for ``server_optimizer`` is mean_S (x - y), so its learning rate 1 is the paper's η_g = K η_l, with
which x becomes the mean of the clients' y. K η_l is measured for each client (see `fedsim.algorithms._distance`), since clients
may take different numbers of steps; with momentum in ``client_optimizer`` the mean of a client's gradients has its weights.
Means are weighted by ``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._distance import check_linear, measured
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class FedCMState(NamedTuple):
    """`ServerState` and the mean gradient Δ of the last round, which has the shapes of the parameters."""

    params: Params
    opt_state: Any
    round: jax.Array
    momentum: Params


class FedCMShared(NamedTuple):
    """What clients receive: `Shared` and Δ."""

    params: Params
    round: jax.Array
    momentum: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedCM(FedAvg):
    """FedAvg whose clients step along a mixture of their gradient and the mean gradient Δ of the last round.

    Clients keep nothing between rounds, so it suits populations of which each client takes part rarely. The server sends Δ in
    addition to x, and clients send their mean gradient in addition to their update.

    Attributes:
      alpha: α in (0, 1], the share of the client's own gradient. With 1, the algorithm is FedAvg. Since Δ is 0 at first, the
        first round takes steps of α times the learning rate.
      client_optimizer: see `FedAvg`. It must be SGD, with or without momentum. A learning rate that is not 0 must move the
        parameters by much more than their rounding (6e-8 of their size in ``float32``), because movements are divided by it.
      model, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``alpha`` is not in (0, 1]. Before the first round: the client optimizer is not linear in the gradients,
        or not alike for all parameters.

    >>> import optax, fedsim
    >>> FedCM(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=2.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 < alpha <= 1, got alpha=2.0.
    """

    capabilities = Capabilities(
        scalable=False,
        model_parts=True,
        microbatches=True,
        refused_parts={
            "kept": "clients mix their gradients with the server's mean gradient, which has none of these; use another "
            "algorithm, such as SCAFFOLD"
        },
    )

    alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(above=0, most=1, alpha=self.alpha)

    def init(self, key: jax.Array) -> FedCMState:
        state = super().init(key)
        return FedCMState(**state._asdict(), momentum=jax.tree.map(jnp.zeros_like, state.params))

    def broadcast(self, state: FedCMState) -> FedCMShared:
        return FedCMShared(state.params, state.round, state.momentum)

    def local_training(self, shared: FedCMShared, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)
        own, rest = training.gradient or training.loss_and_gradient, tree.scale(shared.momentum, 1 - self.alpha)

        def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            loss, slope = own(params, batch)
            return loss, tree.scale(slope, self.alpha)

        def objective(params: Params, batch: Batch) -> jax.Array:
            return self.alpha * (training.objective or training.loss)(params, batch)

        mixed = dataclasses.replace(training, gradient=gradient, objective=objective).with_term(None, lambda params: rest)
        return measured(mixed)

    def client_update(self, shared: FedCMShared, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        movement = tree.subtract(shared.params, local.params)
        # A client with learning rate 0 does not move, so its movement contains no information about its gradients.
        still = local.opt_state.length == 0
        update = movement, tree.select(still, shared.momentum, local.opt_state.mean_gradient(movement))
        return ClientUpdate(update, self.weight(client), {"loss": local.loss.result()}, parts=local.parts)

    def server_update(self, state: FedCMState, update: Any, info: RoundInfo) -> FedCMState:
        movement, momentum = update
        return super().server_update(state, movement, info)._replace(momentum=momentum)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_linear("FedCM", self.client_optimizer, self.model)
