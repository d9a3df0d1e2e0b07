"""FedProx.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, equation 2: https://arxiv.org/abs/1812.06127. Deviations: clients are weighted by ``weighting`` as in FedAvg (the paper
samples them by size and averages uniformly). Its stragglers, who send what they have, are `fedsim.samplers.Stragglers`, its
adaptive mu `fedsim.algorithms.AdaptiveFedProx`.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, tree
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import Shared
from fedsim.data import Batch
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a client loss that keeps close to the server's parameters x: F_i(w) + mu/2 ||w - x||².

    The ``loss`` of its rounds' info is F_i alone, which is what other algorithms report, and costs no pass over the parameters.

    Attributes:
      mu: at least 0; with 0 this is FedAvg. The paper tries 0.001 to 1.

    >>> import fedsim, optax
    >>> FedProx(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), mu=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected mu >= 0 and finite, got mu=-1.0.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, mu=self.mu)

    def proximity(self, shared: Shared) -> float | jax.Array:
        """The round's mu."""
        return self.mu

    def objective(self, shared: Shared, params: Params, batch: Batch) -> jax.Array:
        apart = tree.squared_norm(tree.subtract(params, shared.params))
        return super().objective(shared, params, batch) + self.proximity(shared) / 2 * apart

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradient = super().client_gradient(shared, state, batch)
        return loss, tree.pulled(gradient, self.proximity(shared), state.params, shared.params)
