"""FedNova: normalized averaging.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", NeurIPS 2020, Algorithm 1: https://arxiv.org/abs/2007.07481. A client whose optimizer is linear in its
gradients moves by x - x_i = η G_i a_i, with G_i its gradients, one a column, and a_i how much of each arrives. With p_i its
weight::

    d_i = G_i a_i / ‖a_i‖₁,     x = x - τ_eff Σ_i p_i η d_i,     τ_eff = Σ_i p_i ‖a_i‖₁

The paper leaves τ_eff free; this one is FedAvg's own, by which equal clients give FedAvg. η ‖a_i‖₁ is measured
(`fedsim.algorithms._reach`) for SGD with or without momentum, Nesterov's too, for the proximal term ``mu``, and for rates that
change over a client's steps. Deviations: with η ``mu`` > 1, where some a_k are below 0, their sum stands for ‖a_i‖₁; another
``server_optimizer`` than the default takes the movement for its gradient.
"""

from __future__ import annotations

import dataclasses

from fedsim import tree
from fedsim.aggregators import Beside, Noted
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._fedprox import FedProx
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._reach import Reach, must_be_linear
from fedsim.data import Batch, FederatedData
from fedsim.execution import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedNova(FedProx):
    """FedAvg in which a client that takes more steps does not pull harder, only all of them further.

    Attributes:
      mu: of FedProx's proximal term; default 0, none.
      client_optimizer: see `FedAvg`: SGD, with or without momentum.
      model, server_optimizer, weighting: see `GradientServer`.

    Raises:
      ValueError: ``mu`` below 0; before the first round, an optimizer that is not linear in the gradients.

    >>> import jax, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedNova(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1, momentum=0.9),
    ...                     batches=fedsim.Batches(size=2, epochs=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> [f"{reach:.4f}" for reach in info.clients["reach"].tolist()]  # 0.1 (4 + 3 0.9 + 2 0.9^2 + 0.9^3), 0.1 (2 + 0.9)
    ['0.9049', '0.2900']
    """

    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", Beside.around(self.aggregator))

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        return super().client_init(shared, client)._replace(more=Reach.zero(self._client_optimizer(shared.round)))

    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        reach = state.more.step(self._client_optimizer(shared.round), self.mu)
        return super().client_step(shared, state, batch)._replace(more=reach)

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result, reach = super().client_final(shared, state, client), state.more
        info = {**result.info, "reach": reach.come}
        return result._replace(update=Noted(reach.mean(result.update), reach.come), info=info)

    def server_update(self, state: ServerState, update: Noted) -> ServerState:
        direction, reach = update
        return super().server_update(state, tree.scale(direction, reach))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        must_be_linear("FedNova", self._client_optimizer)
