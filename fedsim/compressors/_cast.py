"""Half precision: every float rounded to 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.compressors._compressor import Compressor, Memory, Message, Size


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Cast(Compressor):
    """Rounds every float to 16 bits. Values beyond the range of the dtype become its largest value.

    Attributes:
      dtype: ``"bfloat16"`` (8 bits of precision, the range of ``float32``) or ``"float16"`` (11 bits, up to 65,504).

    Raises:
      ValueError: ``dtype`` has another value.

    >>> sent = Cast(dtype="float16").transmit(jnp.array([0.1, 1e9]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0999755859375, 65504.0], 32)
    """

    not_differentiable = "rounds"

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        checks.one_of("bfloat16", "float16", dtype=self.dtype)

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        largest = float(jnp.finfo(self.dtype).max)
        return jnp.clip(x, -largest, largest).astype(self.dtype), memory

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return message.astype(jnp.float32)

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        return Size(16 * message.size, 16.0 * message.size)
