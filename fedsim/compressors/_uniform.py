"""Uniform stochastic quantization.

A. T. Suresh, F. X. Yu, S. Kumar, H. B. McMahan, "Distributed mean estimation with limited communication", ICML 2017, section
2.2: https://arxiv.org/abs/1611.00429. There are k levels from min x to max x. A value between two levels is randomly rounded to
one of them such that its mean does not change. There are no deviations.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._packing import bits_for, coded_bits, histogram, pack, unpack


class Levels(NamedTuple):
    """Packed codes ``uint32 [bits, words]``, and the values of the lowest and the highest level."""

    planes: jax.Array
    low: jax.Array
    high: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class UniformQuantizer(VectorCompressor):
    """Stochastic, unbiased rounding to k evenly spaced levels from min x to max x.

    Attributes:
      levels: k, from 2 to 65,536; a code takes ceil(log2 k) bits.
      per_tensor: whether each tensor has its own minimum and maximum, as in FedJAX, or all floats have the same.

    Raises:
      ValueError: ``levels`` is out of range.

    >>> sent = UniformQuantizer(levels=2).transmit(jnp.array([-1.0, 3.0, 3.0, -1.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([-1.0, 3.0, 3.0, -1.0], 68)
    """

    not_differentiable = "rounds"

    levels: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(2, 2**16, levels=self.levels)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Levels:
        return to_levels(x, self.levels, key)

    def decode_vector(self, message: Levels, key: jax.Array, d: int) -> jax.Array:
        return from_levels(message, self.levels, (d,))

    def size_vector(self, message: Levels, d: int) -> Size:
        return size_of_levels(message, d)


def to_levels(x: jax.Array, levels: int, key: jax.Array, axis: tuple[int, ...] | None = None) -> Levels:
    """Returns stochastic codes of ``x`` between its minimum and maximum along ``axis``."""
    low, high = jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    # Half of the range cannot overflow. If the range is 0, the lowest level is exact.
    half = high / 2 - low / 2
    place = (x / 2 - low / 2) / jnp.where(half == 0, 1.0, half)
    # The conversion goes through int32, which is three times as fast.
    codes = (place * (levels - 1) + rng.noise(key, x.size).reshape(x.shape)).astype(jnp.int32)
    return Levels(pack(jnp.clip(codes, 0, levels - 1), bits_for(levels)), low, high)


def from_levels(message: Levels, levels: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns the values of the codes."""
    codes = unpack(message.planes, math.prod(shape)).reshape(shape).astype(jnp.float32)
    # The lowest and the highest level are exact.
    share = codes * (1 / (levels - 1))
    return jnp.where(codes == levels - 1, message.high, message.low * (1 - share) + message.high * share)


def size_of_levels(message: Levels, d: int) -> Size:
    """Returns the size of d codes, minima and maxima."""
    side = 32 * (message.low.size + message.high.size)
    return Size(message.planes.shape[0] * d + side, coded_bits(histogram(message.planes, d), d) + side)
