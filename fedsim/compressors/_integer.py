"""Integers with a scale and a zero point per tensor, as phones and FLSim quantize weights.

B. Jacob, S. Kligys, B. Chen, M. Zhu, M. Tang, A. Howard, H. Adam, D. Kalenichenko, "Quantization and training of neural
networks for efficient integer-arithmetic-only inference", CVPR 2018, section 2.1: https://arxiv.org/abs/1712.05877, in the
layout of FLSim's scalar quantization channel: tensors of two and more axes as integers of b bits, with a scale in 64 bits and
a zero point in 32; biases and other vectors, which are few, as floats. It rounds to nearest, so it is biased. Deviation: the
scale that FLSim has from PyTorch is at least 1.2e-7, so that less than half of that arrives as zero; here it may be any normal
float.
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

# What a tensor costs beside its integers: the scale and the zero point.
_SIDE = 64 + 32


class Integers(NamedTuple):
    """Packed codes, the scale as the two words of a ``float64``, and the code of zero, ``int32 []``."""

    planes: jax.Array
    scale: jax.Array
    zero: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IntegerQuantizer(Compressor):
    """x = scale (q - zero), with q in 0 .. 2^bits - 1 such that min(x, 0), 0 and max(x, 0) have codes.

    Attributes:
      bits: of an integer, from 1 to 16.

    Raises:
      ValueError: ``bits`` out of range.

    A matrix of 12 in 8 bits, with a scale and a zero point; a bias of 4 as floats:

    >>> IntegerQuantizer(bits=8).transmit({"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, jax.random.key(0)).bits.item()
    320
    """

    bits: int = 8

    def __post_init__(self) -> None:
        checks.whole(1, 16, bits=self.bits)

    def encode_part(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        if x.ndim < 2:
            return x, memory
        last = 2**self.bits - 1
        low, high = jnp.minimum(jnp.min(x), 0.0), jnp.maximum(jnp.max(x), 0.0)
        scale = jnp.maximum(high / last - low / last, float(jnp.finfo(jnp.float32).tiny))
        zero = jnp.clip(-jnp.round(low / scale), 0, last)
        codes = jnp.clip(jnp.round(x / scale) + zero, 0, last).astype(jnp.int32)
        return Integers(pack(codes, self.bits), _to_double(scale), zero.astype(jnp.int32)), memory

    def decode_part(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) < 2:
            return message
        codes = unpack(message.planes, math.prod(shape)).astype(jnp.int32) - message.zero
        return codes.reshape(shape).astype(jnp.float32) * _from_double(message.scale)

    def size_part(self, message: Message, shape: tuple[int, ...]) -> Size:
        d = math.prod(shape)
        if len(shape) < 2:
            return Size(32 * d, 32.0 * d)
        return Size(self.bits * d + _SIDE, coded_bits(histogram(message.planes, d), d) + _SIDE)


# Without x64, JAX has no float64 to send; its words can be written down all the same.
def _to_double(x: jax.Array) -> jax.Array:
    """The words, low first, of a normal and positive ``float32`` (or NaN, or infinity) as a ``float64``."""
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
