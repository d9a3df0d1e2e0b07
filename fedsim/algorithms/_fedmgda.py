"""FedMGDA+: federated averaging that nobody loses from.

Z. Hu, K. Shaloudegi, G. Zhang, Y. Yu, "Federated learning meets multi-objective optimization", 2020 (FedMGDA+, Algorithm 1),
IEEE Transactions on Network Science and Engineering, 2022: https://arxiv.org/abs/2006.11489. The paper's global step size η is
that of ``server_optimizer``. No deviations beside that of `fedsim.aggregators.MinNorm`.
"""

from __future__ import annotations

import dataclasses

from fedsim import checks
from fedsim.aggregators import Aggregator, MinNorm
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedMGDA(FedAvg):
    """FedMGDA+: FedAvg along the shortest combination of the clients' directions, of all that are not far from their mean.

    It goes to a point where no client can be helped without harm to another, not to the least mean loss. A step is as long as
    the server's learning rate at most, however far clients moved.

    Attributes:
      aggregator: `fedsim.aggregators.MinNorm`, or what has it inside.
      epsilon: how far a client's share may be from that by weight, in [0, 1]; None: as the aggregator says, 0.1 by default.
      model, batches, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    >>> import optax, fedsim
    >>> FedMGDA(
    ...     model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20),
    ...     client_optimizer=optax.sgd(0.1), epsilon=0.5).aggregator
    MinNorm(epsilon=0.5)
    """

    capabilities = Capabilities(minimizes=False)

    aggregator: Aggregator = dataclasses.field(default_factory=MinNorm)
    epsilon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must_fold_by(MinNorm())
        checks.number(least=0, most=1, or_none=True, epsilon=self.epsilon)
        if self.epsilon is not None:
            if type(self.aggregator) is not MinNorm:
                raise ValueError(f"epsilon={self.epsilon} is that of MinNorm: give it to the MinNorm inside of the aggregator.")
            object.__setattr__(self, "aggregator", MinNorm(self.epsilon))
