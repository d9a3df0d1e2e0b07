"""C-VFL: compressed vertical federated learning.

T. Castiglia, A. Das, S. Wang, S. Patterson, "Compressed-VFL: communication-efficient learning with vertically partitioned
data", ICML 2022, Algorithm 1: https://arxiv.org/abs/2206.08330. The paper's Q is ``local_steps``, its server is the party with
the labels, and its C_m is ``compressor``. Deviations: the party with the labels may have features; a batch is compressed as a
whole; parties may go missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.compressors import Compressor, UniformQuantizer
from fedsim.model import Params
from fedsim.vertical._algorithm import Messages, VerticalAlgorithm
from fedsim.vertical._batches import VerticalBatch


class Snapshot(NamedTuple):
    """What a party has of the others during its local steps: their embeddings, and the top model (empty at its owner)."""

    embeddings: dict[str, jax.Array]
    top: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CVFL(VerticalAlgorithm):
    """C-VFL: every party receives the compressed embeddings of all others and the top model, and takes local steps with them.

    A party's local steps use its own current embedding, which is not compressed, and so its gradient is that of the whole
    network with stale values of the others. For this, all parties must know the labels: C-VFL does not protect them. The labels
    are sent once, before training, and are not part of ``bits_down``.

    Attributes:
      local_steps: Q, the number of local steps per exchange.
      compressor: compresses the embeddings, also those that are passed on, and the top model.
      model, optimizer, missing: see `VerticalAlgorithm`.

    >>> import numpy as np, optax
    >>> from fedsim import vertical
    >>> x, y = np.eye(4), np.array([0, 1, 0, 1])
    >>> data = vertical.align(vertical.divide_columns(x, y, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank"), secret="s")
    >>> model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.sum_embeddings(), num_classes=2)
    >>> algorithm = CVFL(model=model, optimizer=optax.sgd(0.5), local_steps=5)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), vertical.BatchSampler(data, size=4).batch(0))
    >>> info["bits_up"]["shop"].item()  # 4 people, 2 numbers of 4 bits each, and the range of the numbers
    96
    """

    local_steps: int = 10
    compressor: Compressor = dataclasses.field(default_factory=lambda: UniformQuantizer(levels=16))

    def send_down(self, params: Mapping[str, Params], up: Messages, batch: VerticalBatch) -> Messages:
        holder, known, sizes = self.model.labels_at, dict(up.values), dict(up.bits)
        if holder in known:
            known[holder], sizes[holder] = self.send(known[holder], batch.key, f"down from {holder}")
        top, top_bits = self.send(params[holder]["top"], batch.key, "top model")
        received: dict[str, Any] = {holder: Snapshot(up.values, {})}
        bits, most = {}, tree.most_bits(tree.num_bits((known, top)), compressed=True)
        for party in self.model.passive:  # Embeddings are passed on as they were encoded, so they have the same sizes.
            received[party] = Snapshot(known, top)
            others = (size for other, size in sizes.items() if other != party)
            bits[party] = tree.add_bits(top_bits, *others, most=most)
        return Messages(received, bits)

    def local_gradient(self, party: str, own: Params, received: Snapshot, batch: VerticalBatch) -> Params:
        def loss(own: Params) -> jax.Array:
            embeddings = self.with_own(received.embeddings, party, own, batch)
            return jnp.mean(self.model.losses({"top": received.top, **own}, embeddings, batch.labels))

        return jax.grad(loss)(own)
