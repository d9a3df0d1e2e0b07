"""Federated distillation: mean logits of classes instead of parameters.

E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis, S.-L. Kim, "Communication-efficient on-device machine learning: Federated
distillation and augmentation under non-IID private data", 2018, Algorithm 1 (FD): https://arxiv.org/abs/1811.11479. Client i
sends the mean logits of its examples of each class, and trains its own model with the cross-entropy φ and the server's means
F^(j) over clients::

    w_i minimizes φ(F(x), y) + γ φ(F(x), softmax F^(y))

Deviations: logits are averaged before the softmax, where the paper averages their softmax. Means are over all examples of a
class, a client's own ones included. They are computed after training, and not during it. A class without a mean yet has no
second term. The paper's augmentation by a generative model (FAug) is not included. In the rest it is
`fedsim.algorithms.FedProto`, with logits in place of features.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fedsim.algorithms._fedproto import FedProto


def _logits(outputs: Any) -> Any:
    """Returns a model's outputs, which are what clients average and compare."""
    return outputs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedDistill(FedProto):
    """Clients train models of their own, and learn the mean logits of each class from each other, which alone are sent.

    A message has one number for each pair of classes, whatever the size of the model. There is no global model;
    `fedsim.evaluate_personalized` evaluates each client's own.

    Attributes:
      model: a model of classes, whose outputs are logits ``[n, num_classes]``.
      lam: the paper's γ, at least 0. With 0, clients train alone.
      client_optimizer: see `FedAvg`.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = FedDistill(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.params.shape, info.clients["bits_up"].tolist()  # 10 vectors of 10 logits, and 10 counts
    ((10, 10), [3520, 3520])
    """

    lam: float = 0.1
    representation: ClassVar[Any] = staticmethod(_logits)  # type: ignore[misc]

    def distance(self, features: jax.Array, means: jax.Array) -> jax.Array:
        """Returns the cross-entropy of each example's logits with the softmax of the mean of its class, ``float32 [n]``."""
        return -jnp.sum(jax.nn.softmax(means) * jax.nn.log_softmax(features), axis=1)
