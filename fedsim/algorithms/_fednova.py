"""FedNova: normalized averaging.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", NeurIPS 2020, Algorithm 1: https://arxiv.org/abs/2007.07481. A client whose optimizer is linear in its gradients
moves by x - x_i = η G_i a_i. The columns of G_i are its gradients, and a_i holds their coefficients. With p_i the client's
weight::

    d_i = G_i a_i / ‖a_i‖₁,     x = x - τ_eff Σ_i p_i η d_i,     τ_eff = Σ_i p_i ‖a_i‖₁

The paper leaves the choice of τ_eff open. This choice gives FedAvg if all ‖a_i‖₁ are equal. η ‖a_i‖₁ is measured (see
`fedsim.algorithms._distance`). This works for SGD with or without momentum, also with Nesterov momentum, for the proximal term
``mu``, and for learning rates that change over a client's steps.

Deviations: if η ``mu`` > 1, some a_k are below 0, and their sum replaces ‖a_i‖₁. The gradient for ``server_optimizer`` is x
minus the new x of the equation above. With the default server optimizer, this equation holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim import checks, tree
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._distance import check_linear, measured
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.data import FederatedData
from fedsim.rounds import Client, ClientUpdate, RoundInfo


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedNova(FedAvg):
    """FedNova: FedAvg with normalized updates, so that clients with more local steps do not get more weight.

    More local steps of a client make the step of the server longer.

    Attributes:
      mu: coefficient of FedProx's proximal term. The default 0 means that there is no such term.
      client_optimizer: SGD, with or without momentum; see `FedAvg`.
      model, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``mu`` is below 0. Before the first round: the client optimizer is not linear in the gradients,
        or not alike for all parameters.

    >>> import jax, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedNova(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1, momentum=0.9),
    ...                     batches=fedsim.Batches(size=2, epochs=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> [f"{length:.4f}" for length in info.clients["distance"].tolist()]  # 0.1 (4 + 3 0.9 + 2 0.9^2 + 0.9^3), 0.1 (2 + 0.9)
    ['0.9049', '0.2900']
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True)

    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, mu=self.mu)
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        return measured(super().local_training(shared, client).with_proximal_term(self.mu, shared.params), self.mu)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        distance = local.opt_state
        update = WithAux(distance.mean_gradient(tree.subtract(shared.params, local.params)), distance.length)
        info = {"loss": local.loss.result(), "distance": distance.length}
        return ClientUpdate(update, self.weight(client), info, parts=local.parts)

    def server_update(self, state: Any, update: WithAux, info: RoundInfo) -> Any:
        direction, distance = update
        return super().server_update(state, tree.scale(direction, distance), info)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_linear("FedNova", self.client_optimizer, self.model)
