"""DRIVE: one bit a coordinate.

S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak, M. Mitzenmacher, "DRIVE: One-bit distributed mean
estimation", NeurIPS 2021, Algorithm 1 and theorems 1 to 3, with the randomized Hadamard transform of its section 6:
https://arxiv.org/abs/2105.08339. With R a rotation and y = R x, what is sent is the signs of y and one number S, and what
arrives is S R^T sign(y)::

    S = ||x||^2 / ||y||_1    unbiased; NMSE pi / 2 - 1 = 0.5708
    S = ||y||_1 / d          least mean squared error; NMSE 1 - 2 / pi = 0.3634

Deviations: a vector longer than a few thousand is rotated in blocks, each with an S of its own (see `_rotation`). As in the
paper, the Hadamard transform is not a uniformly random rotation: with it, the unbiased scale is unbiased up to an error that
vanishes for long vectors without a few coordinates that dominate.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._norm import largest
from fedsim.compressors._packing import coded_bits, histogram, pack, unpack
from fedsim.compressors._rotation import layout, rotate, unrotate, whole_blocks

BLOCK = (0, 2)  # the axes of one block


class ScaledCodes(NamedTuple):
    """Packed codes and a scale per block, ``float32 [1, blocks, 1]``."""

    planes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Drive(VectorCompressor):
    """The signs of a rotated vector, and their scale.

    Attributes:
      unbiased: whether what arrives is right in the mean (for averages over clients), or as near as can be (for one sender,
        and inside `ErrorFeedback`).
      per_tensor: False, as in the paper: all floats are one vector.

    >>> x = jax.random.normal(jax.random.key(1), (4096,))
    >>> sent = Drive(unbiased=False).transmit(x, jax.random.key(0))
    >>> round(float(jnp.sum((sent.value - x) ** 2) / jnp.sum(x**2)), 1), sent.bits.item()
    (0.4, 4128)
    """

    unbiased: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.truth(unbiased=self.unbiased)

    def length(self, d: int) -> int:
        return whole_blocks(d)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> ScaledCodes:
        unit = largest(x)
        y = rotate(x, key, unit)
        scale = unit * matching_scale(y, jnp.where(y >= 0, 1.0, -1.0), self.unbiased)
        return ScaledCodes(pack(y >= 0, 1), scale)

    def decode_vector(self, message: ScaledCodes, key: jax.Array, d: int) -> jax.Array:
        shape = layout(d)
        signs = unpack(message.planes, d).astype(jnp.float32).reshape(shape) * 2 - 1
        return unrotate(message.scale * signs, key)

    def size_vector(self, message: ScaledCodes, d: int) -> Size:
        return size_of_scaled(message, d)


def matching_scale(y: jax.Array, q: jax.Array, unbiased: bool) -> jax.Array:
    """By what to multiply ``q``, block by block, to make it ``y`` in the mean, or as near to it as can be; 0 for zeros.

    In a rotated block, the error of S q is orthogonal to y for S = ||y||^2 / <y, q>, and to q for S = <y, q> / ||q||^2.
    """
    product = jnp.sum(y * q, BLOCK, keepdims=True)
    square = jnp.sum((y if unbiased else q) ** 2, BLOCK, keepdims=True)
    over, under = (square, product) if unbiased else (product, square)
    return over / jnp.where(under == 0, 1.0, under)


def size_of_scaled(message: ScaledCodes, d: int) -> Size:
    """The size of d codes and the scales."""
    side = 32 * message.scale.size
    return Size(message.planes.shape[0] * d + side, coded_bits(histogram(message.planes, d), d) + side)
