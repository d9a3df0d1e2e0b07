"""FedBCD: federated stochastic block coordinate descent.

Y. Liu, X. Zhang, Y. Kang, L. Li, T. Chen, M. Hong, Q. Yang, "FedBCD: a communication-efficient collaborative learning framework
for distributed features", IEEE Transactions on Signal Processing 70, 2022, Algorithm 1, the parallel version FedBCD-p:
https://arxiv.org/abs/1912.11187. The paper's Q is ``local_steps`` and its party K is the one with the labels. Deviations: a
compressor, parties that go missing.
"""

from __future__ import annotations

import dataclasses

from fedsim.vertical._split_learning import SplitLearning


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedBCD(SplitLearning):
    """Split learning with several local steps per exchange, all on its batch, with stale values of the other parties.

    A passive party uses the gradient that it received, with its own current parameters, in all its local steps. The party with
    the labels uses the others' embeddings, with its own current bottom and top model. All parties step at the same time. One
    local step is `SplitLearning`; with Q, as many steps take 1/Q of the messages.

    Attributes:
      local_steps: Q, the number of local steps per exchange.
      model, optimizer, compressor, missing: see `VerticalAlgorithm`.
    """

    local_steps: int = 5
