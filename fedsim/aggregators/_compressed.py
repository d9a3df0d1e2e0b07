"""Compression on the way up: each client's update by any of `fedsim.compressors`."""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, rng
from fedsim.aggregators._aggregator import Memory, Sent, Update, Wrapper
from fedsim.compressors import Compressor


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed(Wrapper):
    """Folds what arrives of compressed updates, and counts the bits that clients send.

    Every client has a key of its own in every round, so that errors of unbiased compressors cancel in the mean. A compressor
    that remembers (`fedsim.compressors.ErrorFeedback`, `fedsim.compressors.PowerSGD`) makes clients remember.

    Attributes:
      compressor: of each update.
      inner: what follows; it sees updates as they arrive, and sends nothing more.

    Raises:
      ValueError: ``compressor`` is none of fedsim's; another `Compressed` is inside, and it is not clear which one's bits
        are sent.

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
        inner = self.inner
        while isinstance(inner, Wrapper):
            if isinstance(inner, Compressed):
                raise ValueError(f"Expected one Compressed, got another inside it, {inner.compressor}: leave one out.")
            inner = inner.inner

    def client_memory(self, update: Update) -> Memory:
        memory = self.compressor.init(update), super().client_memory(update)
        return memory if jax.tree.leaves(memory) else ()

    def send(self, update: Update, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        kept, of_inner = memory or ((), ())
        arrived = self.compressor.transmit(update, rng.stream(key, "compress"), kept)
        sent = super().send(arrived.value, common, of_inner, key)
        kept = (arrived.memory, sent.memory) if memory else ()
        return Sent(sent.update, kept, arrived.bits, arrived.entropy_bits)
