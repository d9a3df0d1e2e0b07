"""No compression, as a baseline."""

from __future__ import annotations

import dataclasses

import jax

from fedsim.compressors._compressor import Compressor, Memory, Message, Size


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Identity(Compressor):
    """Sends every float uncompressed, with 32 bits.

    >>> import jax.numpy as jnp
    >>> Identity().transmit({"w": jnp.ones(3)}, jax.random.key(0)).bits.item()
    96
    """

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        return x, memory

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return message

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        return Size(32 * message.size, 32.0 * message.size)
