"""Compression of the updates that clients send, by any of `fedsim.compressors`."""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, rng
from fedsim.aggregators._aggregator import Memory, Sent, Update, Wrapper
from fedsim.aggregators._locally_noised import check_not_locally_noised
from fedsim.aggregators._secure_mean import check_not_secure
from fedsim.compressors import Compressor


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed(Wrapper):
    """Compresses each update, aggregates the decompressed updates by ``inner``, and counts the bits that clients send.

    Every client has a different key in every round, so the errors of unbiased compressors cancel in the mean. If the
    compressor has a memory (`fedsim.compressors.ErrorFeedback`, `fedsim.compressors.PowerSGD`), clients keep it between
    rounds.

    Attributes:
      compressor: the compressor of each update.
      inner: the aggregator of the decompressed updates.

    Raises:
      ValueError: ``compressor`` is not a `fedsim.compressors.Compressor`, or ``inner`` contains another `Compressed` or a
        `LocallyNoised`, so that other bits are sent than are counted.

    >>> import jax.numpy as jnp
    >>> from fedsim.compressors import TopK
    >>> sent = Compressed(TopK(fraction=0.5)).send(jnp.array([3.0, 4.0]), (), (), jax.random.key(0))
    >>> sent.update.tolist(), sent.bits.item()
    ([0.0, 4.0], 33)
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Compressor, "Eden(bits=1)", compressor=self.compressor)
        if second := self.find(Compressed):
            raise ValueError(
                f"Expected one Compressed, got a second one inside it, of {second.compressor}: remove one of them."
            )
        remedy = "Write LocallyNoised(..., inner=Compressed(...))."
        check_not_locally_noised(
            self, f"clients would add noise to compressed updates, and send more bits than are counted. {remedy}"
        )
        check_not_secure(self, "masked vectors are random numbers, which cannot be compressed. Give fewer bits of SecureMean.")

    @property
    def may_send_more(self) -> bool:
        return True

    def client_memory(self, update: Update) -> Memory:
        memory = self.compressor.init(update), super().client_memory(update)
        return memory if jax.tree.leaves(memory) else ()

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        kept, of_inner = memory or ((), ())
        received = self.compressor.transmit(update, rng.stream(key, "compress"), kept)
        sent = super().send(received.value, server_memory, of_inner, key)
        kept = (received.memory, sent.memory) if memory else ()
        return Sent(sent.update, kept, received.bits, received.entropy_bits)
