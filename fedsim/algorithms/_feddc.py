"""FedDC: local drift decoupling and correction.

L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu, "FedDC: Federated learning with non-IID data via local drift decoupling and
correction", CVPR 2022, Algorithm 1: https://arxiv.org/abs/2203.11751. Client i keeps its drift h_i and its last update g_i, and
the server keeps their means h and g over all clients. All are 0 at first. With K steps of learning rate η, and P the cohort::

    θ_i ≈ argmin_θ L_i(θ) + α/2 ‖h_i + θ - w‖² + <θ, g_i - g> / (η K)
    g_i = θ_i - w,     h_i = h_i + g_i
    w = mean_P θ_i + h

Deviations: g_i is stored divided by η K of the client's round, which is measured (see `fedsim.algorithms._distance`), because
clients may take different numbers of steps. As in the authors' code, the drift that the server adds is the mean over all
clients, not that of the cohort, which at the optimum would not be 0. With ``weighting="examples"`` all means are weighted (the
default is uniform). If a client's update is clipped or compressed, h_i, g_i, h and g use what the server receives. A staleness
weight multiplies the changes. An attack, an aggregator that is not a mean (a median, Krum), or one that adds noise makes h and
g differ from the means of the h_i and g_i. The gradient for ``server_optimizer`` is w minus the new w of the last equation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._distance import check_linear, measured
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class Drift(NamedTuple):
    """What a client keeps, each with the shapes of the parameters: its drift h_i, and its last movement -g_i / (η K)."""

    drift: Params
    movement: Params


class FedDCState(NamedTuple):
    """`ServerState`, and the means over all clients of what they keep, a `Drift`."""

    params: Params
    opt_state: Any
    round: jax.Array
    mean: Drift


class FedDCShared(NamedTuple):
    """What clients receive: `Shared`, and the mean of all clients' last movements, -g / (η K)."""

    params: Params
    round: jax.Array
    movement: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedDC(FedAvg):
    """FedAvg whose clients learn their drift from the server's parameters, with which the server corrects the mean.

    The drift h_i enters a proximal term, as in `FedDyn`, and a linear term corrects the gradients, as in `SCAFFOLD`. A client
    keeps two arrays as large as the parameters, sends two, and receives two.

    Attributes:
      alpha: α, above 0. Larger values keep clients closer to the server's parameters minus their drift.
      weighting: default ``"uniform"``; see `FedAvg`.
      client_optimizer: see `FedAvg`. It must be SGD, with or without momentum. A learning rate that is not 0 must move the
        parameters by much more than their rounding (6e-8 of their size in ``float32``), because movements are divided by it.
      model, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: ``alpha`` is not above 0. Before the first round: the client optimizer is not linear in the gradients,
        or not alike for all parameters, the aggregator is `PartlyUniform`, or parameters are in half precision.

    >>> import optax, fedsim
    >>> FedDC(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected alpha > 0 and finite, got alpha=0.0.
    """

    capabilities = Capabilities(scalable=False, repeatable=False, model_parts=True, microbatches=True, accumulates=True)

    alpha: float = 0.1
    weighting: Literal["examples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(alpha=self.alpha)

    def init(self, key: jax.Array) -> FedDCState:
        state = super().init(key)
        return FedDCState(**state._asdict(), mean=self.client_memory(state))

    def broadcast(self, state: FedDCState) -> FedDCShared:
        return FedDCShared(state.params, state.round, state.mean.movement)

    def client_memory(self, shared: Any) -> Drift:
        zeros = jax.tree.map(jnp.zeros_like, shared.params)
        return Drift(zeros, zeros)

    def local_training(self, shared: FedDCShared, client: Client) -> LocalTraining:
        correction = tree.subtract(shared.movement, client.memory.movement)
        center = tree.subtract(shared.params, client.memory.drift)
        training = super().local_training(shared, client).with_proximal_term(self.alpha, center)
        return measured(training.with_term(None, lambda params: correction))

    def client_update(self, shared: FedDCShared, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        movement = tree.subtract(shared.params, local.params)
        # A client with learning rate 0 does not move, so its movement contains no information about its gradients.
        still = local.opt_state.length == 0
        last = tree.select(still, client.memory.movement, local.opt_state.mean_gradient(movement))
        update = movement, tree.subtract(last, client.memory.movement)
        memory = lambda arrived: _changed(client.memory, arrived, client.arrival_weight)  # noqa: E731
        return ClientUpdate(update, self.weight(client), {"loss": local.loss.result()}, memory, local.parts)

    def server_update(self, state: FedDCState, update: Any, info: RoundInfo) -> FedDCState:
        mean = _changed(state.mean, update, self.participation(info))
        # Without an update there is no mean of the θ_i that the drift corrects.
        correction = tree.scale(mean.drift, info.num_aggregated >= self.aggregator.fewest_clients)
        return super().server_update(state, tree.subtract(update[0], correction), info)._replace(mean=mean)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, "the server multiplies the mean by the cohort's share of all examples")
        check_linear("FedDC", self.client_optimizer, self.model)


def _changed(before: Drift, update: tuple[Params, Params], factor: jax.Array) -> Drift:
    """Returns what a client keeps, or its mean, after a movement and a change of the last movement, times a factor."""
    movement, change = update
    drift = tree.subtract(before.drift, tree.scale(movement, factor))
    return Drift(drift, tree.add(before.movement, tree.scale(change, factor)))
