"""QSGD.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-efficient SGD via gradient quantization and
encoding", NIPS 2017, section 3.1: https://arxiv.org/abs/1610.02132. x_i is decoded as ||x||_2 sign(x_i) l / s. Here l is
s |x_i| / ||x||_2, randomly rounded up or down to an integer such that its mean does not change. Deviations: codes are packed in
ceil(log2(s + 1)) + 1 bits; ``entropy_bits`` replaces the paper's Elias coding. The paper's buckets are tensors here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._norm import root_mean_square
from fedsim.compressors._packing import bits_for, coded_bits, histogram, pack, unpack


class SignedLevels(NamedTuple):
    """Packed codes, whose highest bit is the sign, and the magnitude of the highest level."""

    planes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QSGD(VectorCompressor):
    """Stochastic, unbiased rounding to s levels between 0 and ||x||_2, with a sign. NMSE <= min(d / s^2, sqrt(d) / s).

    Attributes:
      levels: s, the number of levels above 0, from 1 to 32,768. 7 levels need 4 bits, including the sign.
      per_tensor: whether each tensor has its own norm, or all floats have the same.

    Raises:
      ValueError: ``levels`` is out of range.

    >>> sent = QSGD(levels=1).transmit(jnp.array([0.0, -2.0, 0.0, 0.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -2.0, 0.0, 0.0], 40)
    """

    not_differentiable = "rounds"

    levels: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, 2**15, levels=self.levels)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> SignedLevels:
        return to_signed_levels(x, math.sqrt(x.shape[0]) * root_mean_square(x), self.levels, key)

    def decode_vector(self, message: SignedLevels, key: jax.Array, d: int) -> jax.Array:
        return from_signed_levels(message, self.levels, d)

    def size_vector(self, message: SignedLevels, d: int) -> Size:
        return Size(message.planes.shape[0] * d + 32, coded_bits(histogram(message.planes, d), d) + 32)


def to_signed_levels(x: jax.Array, scale: jax.Array, levels: int, key: jax.Array) -> SignedLevels:
    """Returns stochastic codes of ``float32 [d]``, whose magnitudes must not exceed ``scale``."""
    place = jnp.abs(x) / jnp.where(scale == 0, 1.0, scale) * levels
    level = jnp.clip((place + rng.noise(key, x.shape[0])).astype(jnp.int32), 0, levels).astype(jnp.uint32)
    bits = bits_for(levels + 1)
    # Zeros have no sign, because -0 would be an additional symbol without information.
    negative = ((x < 0) & (level > 0)).astype(jnp.uint32)
    return SignedLevels(pack(level | (negative << jnp.uint32(bits)), bits + 1), scale)


def from_signed_levels(message: SignedLevels, levels: int, d: int) -> jax.Array:
    """Returns the values of the codes."""
    codes, bits = unpack(message.planes, d).astype(jnp.uint32), message.planes.shape[0] - 1
    size = (codes & jnp.uint32(2**bits - 1)).astype(jnp.float32) * (1 / levels)
    return jnp.where(codes >> jnp.uint32(bits) == 1, -size, size) * message.scale
