"""FedDyn: dynamic regularization.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021, Algorithm 1: https://arxiv.org/abs/2111.04263. Client k keeps h_k (the paper's ∇L_k at the client's
last parameters), and the server keeps h. All are 0 at first. With P the cohort and m the number of clients that have examples::

    θ_k = argmin_θ L_k(θ) - <h_k, θ> + α/2 ‖θ - x‖²
    h_k = h_k - α (θ_k - x)
    h = h - α / m Σ_P (θ_k - x),     x = mean_P θ_k - h / α

The authors' code divides α by each client's number of examples relative to the mean over clients. Here all clients have the
same α, as in Algorithm 1.

Deviations: ``client_optimizer`` approximates the argmin, as in the paper's experiments, and hence h_k approximates the
gradient. With ``weighting="examples"`` the mean is weighted, and 1 / m becomes the client's fraction of all examples, so that h
remains the mean of all h_k. If a client's update is clipped or compressed, h_k and h both use the update that the server
receives. A staleness weight multiplies both changes. An attack, an aggregator that is not a mean (a median, Krum), or one that
adds noise makes h differ from the mean of the h_k. The gradient for ``server_optimizer`` is x minus the new x of the last
equation. With the default server optimizer, this equation holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class FedDynState(NamedTuple):
    """`ServerState` and the server's h, which has the shapes of the parameters."""

    params: Params
    opt_state: Any
    round: jax.Array
    h: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedDyn(FedAvg):
    """FedAvg with dynamic regularization: terms in the clients' losses make their minima agree with the common minimum.

    The terms, a linear and a proximal one, change in every round. A client keeps h_k between rounds, which is as large as the
    parameters. It sends and receives no more than in FedAvg.

    Attributes:
      alpha: α, above 0, the same for all clients. The authors' code divides it by the client's relative size. The paper tries
        0.1, 0.01 and 0.001. Larger values keep clients closer to the server's parameters.
      weighting: default ``"uniform"``, as in the paper; see `FedAvg`.
      model, client_optimizer, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: ``alpha`` is not above 0. Before the first round: the aggregator is `PartlyUniform`, or parameters are in
        half precision.

    >>> import optax, fedsim
    >>> FedDyn(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected alpha > 0 and finite, got alpha=0.0.
    """

    capabilities = Capabilities(scalable=False, repeatable=False, model_parts=True, microbatches=True, accumulates=True)

    alpha: float = 0.01
    weighting: Literal["examples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(alpha=self.alpha)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, "the server multiplies the mean by the cohort's share of all examples")

    def init(self, key: jax.Array) -> FedDynState:
        state = super().init(key)
        return FedDynState(**state._asdict(), h=jax.tree.map(jnp.zeros_like, state.params))

    def client_memory(self, shared: Any) -> Params:
        return jax.tree.map(jnp.zeros_like, shared.params)

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        # α (θ - x) - h_k is the gradient of a proximal term around this point. So a step reads one array instead of two.
        center = tree.add(shared.params, tree.scale(client.memory, 1 / self.alpha))
        return (
            super()
            .local_training(shared, client)
            .with_term(
                lambda params: self.alpha / 2 * tree.squared_norm(tree.subtract(params, shared.params)),
                lambda params: tree.scale(tree.subtract(params, center), self.alpha),
            )
        )

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        result = super().client_update(shared, client)
        factor = self.alpha * client.arrival_weight
        memory = lambda arrived: tree.add(client.memory, tree.scale(arrived, factor))  # noqa: E731
        return result._replace(memory=memory)

    def server_update(self, state: FedDynState, update: Params, info: RoundInfo) -> FedDynState:
        h = tree.add(state.h, tree.scale(update, self.alpha * self.participation(info)))
        # Without an update there is no mean of the θ_k that contains the clients' part of h / α.
        shift = jnp.where(info.num_aggregated >= self.aggregator.fewest_clients, 1 / self.alpha, 0)
        return super().server_update(state, tree.add(update, tree.scale(h, shift)), info)._replace(h=h)
