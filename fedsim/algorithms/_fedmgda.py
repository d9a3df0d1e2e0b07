"""FedMGDA+: federated averaging as multi-objective optimization.

Z. Hu, K. Shaloudegi, G. Zhang, Y. Yu, "Federated learning meets multi-objective optimization", 2020 (FedMGDA+, Algorithm 1),
IEEE Transactions on Network Science and Engineering, 2022: https://arxiv.org/abs/2006.11489. The paper's global step size η is
the learning rate of ``server_optimizer``. The only deviation is the one of `fedsim.aggregators.MinNorm`.
"""

from __future__ import annotations

import dataclasses

from fedsim import checks
from fedsim.aggregators import Aggregator, MinNorm
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedMGDA(FedAvg):
    """FedMGDA+: FedAvg along the combination of the clients' normalized updates that has the smallest norm.

    The weights of the combination differ from the clients' weights by at most ``epsilon``.

    It moves towards a point where no client can improve without harm to another, not towards the minimum of the mean loss. The
    length of a step is at most the server's learning rate, however far clients moved.

    Attributes:
      aggregator: `fedsim.aggregators.MinNorm`, or an aggregator that contains it.
      epsilon: how much a client's share in the combination may differ from its share by weight, in [0, 1]. None uses the value
        of the aggregator, 0.1 by default. A number replaces that of a `MinNorm`.
      model, batches, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``epsilon`` is not in ``[0, 1]``, or is given with an aggregator that contains a `MinNorm`.

    >>> import optax, fedsim
    >>> FedMGDA(
    ...     model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20),
    ...     client_optimizer=optax.sgd(0.1), epsilon=0.5).aggregator
    MinNorm(epsilon=0.5)
    """

    capabilities = Capabilities(minimizes=False, scalable=False, model_parts=True, microbatches=True)

    aggregator: Aggregator = dataclasses.field(default_factory=MinNorm)
    epsilon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_aggregator(MinNorm())
        checks.number(least=0, most=1, or_none=True, epsilon=self.epsilon)
        if self.epsilon is not None:
            if type(self.aggregator) is not MinNorm:
                raise ValueError(
                    f"Expected epsilon in one place, got epsilon={self.epsilon} and aggregator={self.aggregator}: set it in "
                    "the MinNorm inside the aggregator."
                )
            object.__setattr__(self, "aggregator", MinNorm(self.epsilon))
