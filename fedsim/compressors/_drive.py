"""DRIVE: one bit per coordinate.

S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak, M. Mitzenmacher, "DRIVE: One-bit distributed mean
estimation", NeurIPS 2021, Algorithm 1 and theorems 1 to 3, with the randomized Hadamard transform of its section 6:
https://arxiv.org/abs/2105.08339. R is a random rotation, and y = R x. The message holds the signs of y and one number S. It is
decoded as S R^T sign(y)::

    S = ||x||^2 / ||y||_1    unbiased; NMSE pi / 2 - 1 = 0.5708
    S = ||y||_1 / d          smallest mean squared error; NMSE 1 - 2 / pi = 0.3634

Deviations: a vector of more than a few thousand coordinates is rotated in blocks, each with a separate S (see `_rotation`). As
in the paper, the Hadamard transform is not a uniformly random rotation. Therefore the unbiased scale has a small bias, which
vanishes for long vectors unless a few coordinates dominate.
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

BLOCK = (0, 2)  # the axes of a block in the layout of `_rotation`


class ScaledCodes(NamedTuple):
    """Packed codes and a scale per block, ``float32 [1, blocks, 1]``."""

    planes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Drive(VectorCompressor):
    """Sends the signs of a randomly rotated vector and one scale: one bit per coordinate.

    Attributes:
      unbiased: whether the decoded vector is unbiased (for means over clients), or has the smallest mean squared error (for a
        single sender, and inside `ErrorFeedback`).
      per_tensor: default False, as in the paper: all floats are one vector.

    Raises:
      ValueError: ``unbiased`` or ``per_tensor`` is neither True nor False.

    >>> x = jax.random.normal(jax.random.key(1), (4096,))
    >>> sent = Drive(unbiased=False).transmit(x, jax.random.key(0))
    >>> round(float(jnp.sum((sent.value - x) ** 2) / jnp.sum(x**2)), 1), sent.bits.item()
    (0.4, 4128)
    """

    not_differentiable = "sends signs"

    unbiased: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.truth(unbiased=self.unbiased)

    def padded_length(self, d: int) -> int:
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
    """Returns the scale S of each block: S q is an unbiased estimate of ``y``, or has the smallest squared error. 0 for zeros.

    In a rotated block, the error of S q is orthogonal to y for S = ||y||^2 / <y, q>, and to q for S = <y, q> / ||q||^2.
    """
    product = jnp.sum(y * q, BLOCK, keepdims=True)
    square = jnp.sum((y if unbiased else q) ** 2, BLOCK, keepdims=True)
    over, under = (square, product) if unbiased else (product, square)
    return over / jnp.where(under == 0, 1.0, under)


def size_of_scaled(message: ScaledCodes, d: int) -> Size:
    """Returns the size of d codes and their scales."""
    side = 32 * message.scale.size
    return Size(message.planes.shape[0] * d + side, coded_bits(histogram(message.planes, d), d) + side)
