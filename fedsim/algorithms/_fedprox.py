"""FedProx.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, equation 2: https://arxiv.org/abs/1812.06127. Deviations: clients are weighted by ``weighting`` as in FedAvg. The paper
samples them by size and averages uniformly. The paper's stragglers, which send partial work, are in
`fedsim.samplers.Stragglers`. Its adaptive mu is in `fedsim.algorithms.AdaptiveFedProx`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim import checks
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps clients close to the server's parameters x: F_i(w) + mu/2 ||w - x||².

    The ``loss`` in a round's info is F_i alone, as in other algorithms.

    Attributes:
      mu: at least 0. With 0, the algorithm is FedAvg. The paper tries 0.001 to 1.

    Raises:
      ValueError: ``mu`` is negative or not finite, or see `FedAvg`.

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

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        return super().local_training(shared, client).with_proximal_term(self.mu, shared.params)
