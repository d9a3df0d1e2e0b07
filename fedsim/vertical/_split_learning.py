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
    """

    local_steps: int = dataclasses.field(init=False, repr=False, default=1)

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
            fresh = {party: self.model.embed(party, own, batch.features[party])} if party in batch.features else {}
            return jnp.mean(self.model.losses(own, {**received, **fresh}, batch.labels))

        return jax.grad(loss)(own)
