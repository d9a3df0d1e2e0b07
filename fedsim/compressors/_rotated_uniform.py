"""Uniform stochastic quantization of a rotated vector.

A. T. Suresh, F. X. Yu, S. Kumar, H. B. McMahan, "Distributed mean estimation with limited communication", ICML 2017, section
3: https://arxiv.org/abs/1611.00429. Deviations: a vector of more than a few thousand coordinates is rotated and quantized in
blocks (see `_rotation`). Every client has a different rotation, so the errors of clients are independent. The paper permits
this.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import rng
from fedsim.compressors._compressor import Size
from fedsim.compressors._drive import BLOCK
from fedsim.compressors._rotation import layout, rotate, unrotate, whole_blocks
from fedsim.compressors._uniform import Levels, UniformQuantizer, from_levels, size_of_levels, to_levels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RotatedUniformQuantizer(UniformQuantizer):
    """`UniformQuantizer` after a randomized Hadamard transform, which reduces the range of the coordinates.

    The mean squared error of d coordinates is at most (2 ln d + 2) / (k - 1)^2 times their squared norm (the paper's theorem
    3).

    Attributes:
      levels: k, from 2 to 65,536.
      per_tensor: default False, as in the paper: all floats are one vector.

    >>> import jax.numpy as jnp
    >>> x = jnp.zeros(1024).at[7].set(1.0)
    >>> sent = RotatedUniformQuantizer(levels=16).transmit(x, jax.random.key(0))
    >>> float(jnp.abs(sent.value - x).max()) < 1e-4, sent.bits.item()
    (True, 4160)
    """

    levels: int = 16
    per_tensor: bool = False

    def padded_length(self, d: int) -> int:
        return whole_blocks(d)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Levels:
        return to_levels(rotate(x, key), self.levels, rng.stream(key, "rounding"), BLOCK)

    def decode_vector(self, message: Levels, key: jax.Array, d: int) -> jax.Array:
        return unrotate(from_levels(message, self.levels, layout(d)), key)

    def size_vector(self, message: Levels, d: int) -> Size:
        return size_of_levels(message, d)
