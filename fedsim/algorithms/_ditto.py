"""Ditto.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021, Algorithm 1:
https://arxiv.org/abs/2012.04221. The paper's v_k is the client's memory, λ is ``lam``, and η is the learning rate of the client
optimizer. Deviations: the global and the personal model take their steps on the same batches, so s is the number of steps that
``batches`` determines. The paper does not specify the start of v_k. Here it is the server's parameters of the client's first
round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedsim import checks, tree
from fedsim.algorithms._personal_model import PersonalModel
from fedsim.data import Batch
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ditto(PersonalModel):
    """FedAvg in which every client k also trains a personal model v close to the server's x: min F_k(v) + lam/2 ||v - x||².

    The global model is the same as in FedAvg. `fedsim.evaluate_personalized` evaluates the personal models. A step computes two
    gradients. The ``personal_loss`` in a round's info is F_k(v) alone.

    Attributes:
      lam: at least 0. With 0, clients train alone. Larger values keep them closer to the global model. The paper tries 0.05 to
        2.

    >>> import numpy as np, optax, fedsim
    >>> x = np.concatenate([np.zeros([3, 8, 8, 1], np.uint8), np.full([3, 8, 8, 1], 16, np.uint8)])
    >>> data = fedsim.FederatedData.from_arrays({"x": x, "y": np.repeat(np.int32([0, 1]), 3)}, sizes=[3, 3])
    >>> algorithm = Ditto(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for round in range(3):
    ...     state, _ = algorithm.apply(state, fedsim.Cohort.of(data, ["0", "1"], round=round))
    >>> fedsim.evaluate_personalized(algorithm, state, data, data).overall["accuracy"]
    1.0
    """

    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, lam=self.lam)

    def personal_loss(self, shared: Any, copy: Params, own: Params, batch: Batch) -> jax.Array:
        away = tree.squared_norm(tree.subtract(own, shared.params))
        return self.client_loss(shared, own, batch) + self.lam / 2 * away

    def personal_gradient(self, shared: Any, copy: Params, own: Params, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradient = self.client_gradient(shared, own, batch)
        return loss, tree.add_proximal_gradient(gradient, self.lam, own, shared.params)
