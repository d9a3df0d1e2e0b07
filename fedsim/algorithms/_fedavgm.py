"""Federated averaging with server momentum.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual classification",
2019 (FedAvgM): https://arxiv.org/abs/1909.06335. The default momentum of 0.9 is from Reddi et al. 2021.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import optax

from fedsim import checks
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._server_step import from_fields


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAvgM(FedAvg):
    """FedAvg with server momentum: v = momentum v + Δ, x = x - server_learning_rate v, with Δ the mean update of clients.

    Attributes:
      server_learning_rate: learning rate of the step along v.
      momentum: in [0, 1).

    Raises:
      ValueError: ``momentum`` is not in [0, 1), ``server_learning_rate`` is not positive, or see `FedAvg`.

    >>> import optax, fedsim
    >>> FedAvgM(
    ...     model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), client_optimizer=optax.sgd(0.1),
    ...     momentum=1.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= momentum < 1, got momentum=1.0.
    """

    server_learning_rate: float = 1.0
    momentum: float = 0.9
    server_optimizer: ClassVar[Any] = from_fields(lambda self: optax.sgd(self.server_learning_rate, self.momentum))  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(server_learning_rate=self.server_learning_rate)
        checks.number(least=0, below=1, momentum=self.momentum)
