"""Integers with a scale and a zero point per tensor, as phones and FLSim quantize weights.

B. Jacob, S. Kligys, B. Chen, M. Zhu, M. Tang, A. Howard, H. Adam, D. Kalenichenko, "Quantization and training of neural
networks for efficient integer-arithmetic-only inference", CVPR 2018, section 2.1: https://arxiv.org/abs/1712.05877, in the
layout of FLSim's scalar quantization channel. Tensors with two or more axes are sent as integers of b bits, with a scale of 64
bits and a zero point of 32 bits. Biases and other vectors are small, and are sent as floats. Values are rounded to the nearest
integer, so the compressor is biased. Deviation: in FLSim, which uses PyTorch, the scale is at least 1.2e-7, so smaller values
than half of it become zero. Here the scale may be any normal float.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.compressors._compressor import Compressor, Memory, Message, Size
from fedsim.compressors._packing import coded_bits, histogram, pack, unpack

# Bits of the scale and the zero point of a tensor.
_SIDE_BITS = 64 + 32


class Integers(NamedTuple):
    """Packed codes, the scale as the two words of a ``float64``, and the code of zero, ``int32 []``."""

    planes: jax.Array
    scale: jax.Array
    zero: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IntegerQuantizer(Compressor):
    """Rounds tensors to integers q of ``bits`` bits: x ≈ scale (q - zero), with one scale and one zero point per tensor.

    The scale is such that min(x, 0) and max(x, 0) are representable, and 0 is exact.

    Attributes:
      bits: bits per integer, from 1 to 16.

    Raises:
      ValueError: ``bits`` is out of range.

    A matrix of 12 elements of 8 bits, with a scale and a zero point, and a bias of 4 floats:

    >>> IntegerQuantizer(bits=8).transmit({"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, jax.random.key(0)).bits.item()
    320
    """

    not_differentiable = "rounds"

    bits: int = 8

    def __post_init__(self) -> None:
        checks.whole(1, 16, bits=self.bits)

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        if x.ndim < 2:
            return x, memory
        last = 2**self.bits - 1
        low, high = jnp.minimum(jnp.min(x), 0.0), jnp.maximum(jnp.max(x), 0.0)
        scale = jnp.maximum(high / last - low / last, float(jnp.finfo(jnp.float32).tiny))
        zero = jnp.clip(-jnp.round(low / scale), 0, last)
        codes = jnp.clip(jnp.round(x / scale) + zero, 0, last).astype(jnp.int32)
        return Integers(pack(codes, self.bits), _to_double(scale), zero.astype(jnp.int32)), memory

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) < 2:
            return message
        codes = unpack(message.planes, math.prod(shape)).astype(jnp.int32) - message.zero
        return codes.reshape(shape).astype(jnp.float32) * _from_double(message.scale)

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        d = math.prod(shape)
        if len(shape) < 2:
            return Size(32 * d, 32.0 * d)
        return Size(self.bits * d + _SIDE_BITS, coded_bits(histogram(message.planes, d), d) + _SIDE_BITS)


# Without x64, JAX has no float64, so the scale is stored as the two words of its float64 representation.
def _to_double(x: jax.Array) -> jax.Array:
    """Converts a positive normal ``float32`` (or NaN, or infinity) to the two words of a ``float64``, the low word first."""
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent = word >> jnp.uint32(23)
    exponent = jnp.where(exponent == 255, jnp.uint32(2047), exponent + jnp.uint32(1023 - 127))
    return jnp.stack([word << jnp.uint32(29), (exponent << jnp.uint32(20)) | ((word & jnp.uint32(0x7FFFFF)) >> jnp.uint32(3))])


def _from_double(words: jax.Array) -> jax.Array:
    """The inverse of `_to_double`."""
    exponent = words[1] >> jnp.uint32(20)
    exponent = jnp.where(exponent == 2047, jnp.uint32(255), exponent - jnp.uint32(1023 - 127))
    word = (exponent << jnp.uint32(23)) | ((words[1] & jnp.uint32(0xFFFFF)) << jnp.uint32(3)) | (words[0] >> jnp.uint32(29))
    return jax.lax.bitcast_convert_type(word, jnp.float32)
