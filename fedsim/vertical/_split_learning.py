"""Split learning in its vertical configuration.

P. Vepakomma, O. Gupta, T. Swedish, R. Raskar, "Split learning for health: distributed deep learning without sharing raw patient
data", 2018, the configuration for vertically partitioned data: https://arxiv.org/abs/1812.00564. Deviation: the party with the
labels may have features and a bottom model, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.model import Params
from fedsim.vertical._algorithm import Messages, VerticalAlgorithm
from fedsim.vertical._batches import VerticalBatch


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitLearning(VerticalAlgorithm):
    """Split learning: embeddings go up, gradients with respect to them come down, and every party takes one step.

    Uncompressed, with no party missing, a round is a step along the gradient of the joint model. Of compressed embeddings, the
    party with the labels computes the gradient at the values that arrived.

    Attributes:
      model, optimizer, compressor, missing: see `VerticalAlgorithm`.

    >>> import numpy as np, fedsim, optax
    >>> from fedsim import vertical
    >>> x, y = np.eye(4), np.array([0, 1, 0, 1])
    >>> data = vertical.align(vertical.divide_columns(x, y, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank"), secret="s")
    >>> model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.sum_embeddings(), num_classes=2)
    >>> algorithm = vertical.SplitLearning(model=model, optimizer=optax.sgd(0.5))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for batch in vertical.BatchSampler(data, size=4, seed=0).rounds(30):
    ...     state, info = algorithm.apply(state, batch)
    >>> fedsim.evaluate(model.joint, state.params, data.pooled()).overall["accuracy"]
    1.0
    >>> info["bits_up"]["shop"].item(), info["bits_down"]["shop"].item()  # 4 people, 2 floats each
    (256, 256)
    """

    def send_down(self, params: Mapping[str, Params], up: Messages, batch: VerticalBatch) -> Messages:
        holder = self.model.labels_at

        def loss(embeddings: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(self.model.losses(params[holder], embeddings, batch.labels))

        gradients = jax.grad(loss)(up.values)
        received: dict[str, Any] = {holder: up.values}
        bits = {}
        for party in self.model.passive:
            received[party], bits[party] = self.send(gradients[party], batch.key, f"down to {party}")
        return Messages(received, bits)

    def local_gradient(self, party: str, own: Params, received: Any, batch: VerticalBatch) -> Params:
        if party != self.model.labels_at:
            _, pull = jax.vjp(lambda own: self.model.embed(party, own, batch.features[party]), own)
            return pull(received)[0]

        def loss(own: Params) -> jax.Array:
            return jnp.mean(self.model.losses(own, self.with_own(received, party, own, batch), batch.labels))

        return jax.grad(loss)(own)
