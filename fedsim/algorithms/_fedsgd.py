"""Federated SGD.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, section 2 (FedSGD): https://arxiv.org/abs/1602.05629.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import metrics, tree
from fedsim.aggregators._aggregator import wide
from fedsim.algorithm import Capabilities
from fedsim.algorithms._gradient_server import GradientServer, Shared
from fedsim.data import Batch, Batches
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class FullGradient(NamedTuple):
    """Sum of per-example gradients, and sum of losses, over the examples seen so far at fixed parameters.

    Both are at least ``float32``: in bfloat16 a sum would stand still after some hundred terms.
    """

    gradient: Params
    loss: metrics.Mean

    @classmethod
    def zero(cls, params: Params) -> FullGradient:
        """Of no examples."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, wide(p.dtype)), params)
        return cls(zeros, metrics.Mean(jnp.float32(0), jnp.float32(0)))

    def add(self, client_loss: Callable[[Shared, Params, Batch], jax.Array], shared: Shared, batch: Batch) -> FullGradient:
        """With one more batch, at the server's parameters."""
        loss, gradient = jax.value_and_grad(client_loss, argnums=1)(shared, shared.params, batch)
        seen = jnp.sum(batch.mask, dtype=jnp.float32)
        loss_sum = self.loss.merge(metrics.Mean(loss * seen, seen))
        total = jax.tree.map(lambda total, g: total + seen.astype(total.dtype) * g.astype(total.dtype), self.gradient, gradient)
        return FullGradient(total, loss_sum)

    def mean(self, params: Params) -> Params:
        """The gradient of the mean loss over these examples, in the dtypes of ``params``."""
        mean = tree.scale(self.gradient, 1 / jnp.maximum(self.loss.weight, 1))
        return jax.tree.map(lambda g, p: g.astype(p.dtype), mean, params)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedSGD(GradientServer):
    """FedSGD: each client sends the gradient of its mean loss at the server's parameters; the server takes one step.

    The gradient is summed over batches, so ``batches.size`` bounds memory and does not change the answer, unless the model
    itself looks across a batch or draws randomness.

    Attributes:
      model, server_optimizer, weighting: see `GradientServer`. Set the learning rate by ``server_optimizer``.
      batches: default: one pass, 256 examples at a time, in stored order.

    >>> import numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedSGD(model=fedsim.models.emnist_logistic(), server_optimizer=optax.sgd(0.1))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_steps"].tolist()
    [1, 1]
    """

    capabilities = Capabilities(ordered=False)

    batches: Batches = dataclasses.field(default_factory=lambda: Batches(size=256, shuffle=False))

    def client_init(self, shared: Shared, client: Client) -> FullGradient:
        return FullGradient.zero(shared.params)

    def client_step(self, shared: Shared, state: FullGradient, batch: Batch) -> FullGradient:
        return state.add(self.client_loss, shared, batch)

    def client_final(self, shared: Shared, state: FullGradient, client: Client) -> ClientUpdate:
        return ClientUpdate(state.mean(shared.params), self.weight(client), {"loss": state.loss.result()})
