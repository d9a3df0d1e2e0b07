"""Federated SGD.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, section 2 (FedSGD): https://arxiv.org/abs/1602.05629.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.algorithm import Capabilities
from fedsim.algorithms._gradient_server import GradientServer
from fedsim.data import Batches
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedSGD(GradientServer):
    """FedSGD: each client sends the gradient of its mean loss at the server's parameters, and the server takes one step.

    The gradient is summed over batches. So ``batches.size`` limits the memory and does not change the result, unless the model
    combines the examples of a batch or uses random numbers.

    Attributes:
      model, server_optimizer, weighting: see `GradientServer`. The learning rate is set by ``server_optimizer``.
      batches: default: one pass, 256 examples at a time, in stored order.

    >>> import jax, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedSGD(model=fedsim.models.emnist_logistic(), server_optimizer=optax.sgd(0.1))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_steps"].tolist()
    [1, 1]
    """

    capabilities = Capabilities(ordered=False, scalable=True)

    batches: Batches = dataclasses.field(default_factory=lambda: Batches(size=256, shuffle=False))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        loss, gradient = self.full_gradient(shared, client, self.batches)
        return ClientUpdate(gradient, self.weight(client), {"loss": loss})
