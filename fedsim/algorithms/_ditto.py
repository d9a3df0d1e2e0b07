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

from fedsim import checks
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._personal_model import Models, first_model, model_of, start_of, train_both
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ditto(FedAvg):
    """FedAvg in which every client k also trains a personal model v close to the server's x: min F_k(v) + lam/2 ||v - x||².

    The personal model has running statistics of its own, and of the parameters that clients keep (`fedsim.Model.with_parts`),
    which have no distance from x, both models have their own.

    The global model is the same as in FedAvg. `fedsim.evaluate_personalized` evaluates the personal models. A step computes two
    gradients. The ``personal_loss`` in a round's info is F_k(v) alone.

    Attributes:
      lam: at least 0. With 0, clients train alone. Larger values keep them closer to the global model. The paper tries 0.05 to
        2.

    Raises:
      ValueError: ``lam`` is negative.

    >>> import jax, numpy as np, optax, fedsim
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

    capabilities = Capabilities(scalable=True, model_parts=True, microbatches=True)
    train = None  # type: ignore[assignment]  # There is no single local model, because clients train two.

    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, lam=self.lam)

    def client_memory(self, shared: Any) -> Params:
        return first_model(shared)

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of the client's personal model."""
        return client.memory

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        personal = training.with_proximal_term(self.lam, shared.params)

        def step(models: Models, batch: Batch) -> Models:
            copy, own = models
            return training.step(copy, batch), personal.step(own, batch)

        start = training.start(shared.params, client.parts), start_of(personal, client.memory, client)
        result, own = train_both(self, shared, client, step, start)
        return result._replace(memory=model_of(own))
