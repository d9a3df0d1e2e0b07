"""FedBCD: federated stochastic block coordinate descent.

Y. Liu, X. Zhang, Y. Kang, L. Li, T. Chen, M. Hong, Q. Yang, "FedBCD: a communication-efficient collaborative learning framework
for distributed features", IEEE Transactions on Signal Processing 70, 2022, Algorithm 1, the parallel version FedBCD-p:
https://arxiv.org/abs/1912.11187. The paper's Q is ``local_steps`` and its party K is the one with the labels. Deviations: the
party with the labels has a top model, which it trains, where the paper sums the outputs of the parties (`sum_embeddings`); a
compressor; parties that go missing.
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

    >>> import numpy as np, jax, optax
    >>> from fedsim import vertical
    >>> x, y = np.eye(4), np.array([0, 1, 0, 1])
    >>> data = vertical.align(vertical.divide_columns(x, y, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank"), secret="s")
    >>> model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.sum_embeddings(), num_classes=2)
    >>> algorithm = FedBCD(model=model, optimizer=optax.sgd(0.5), local_steps=5)
    >>> state = algorithm.init(jax.random.key(0))
    >>> for batch in vertical.BatchSampler(data, size=4, seed=0).rounds(6):  # 30 local steps
    ...     state, info = algorithm.apply(state, batch)
    >>> info["loss"] < 0.3, info["bits_up"]["shop"].item()  # per exchange: 4 people, 2 floats each
    (Array(True, dtype=bool), 256)
    """

    local_steps: int = 5
