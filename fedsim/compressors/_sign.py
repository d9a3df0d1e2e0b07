"""Scaled signs.

S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes",
ICML 2019, section 4: https://arxiv.org/abs/1901.09847; without the scale, J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A.
Anandkumar, "signSGD: Compressed optimisation for non-convex problems", ICML 2018: https://arxiv.org/abs/1802.04434. x is
decoded as (||x||_1 / d) sign(x). Deviation: the sign of zero is plus, because a bit has only two values.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._packing import coded_bits, histogram, pack, unpack


class Signs(NamedTuple):
    """Packed signs ``uint32 [1, words]``, 1 for minus, and the magnitude, ``float32 []``."""

    planes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScaledSign(VectorCompressor):
    """Sends the sign of every coordinate, and the mean magnitude. Biased: use it inside `ErrorFeedback`.

    Attributes:
      per_tensor: whether each tensor has its own scale, as in the paper's experiments, or all floats have the same.

    >>> sent = ScaledSign().transmit(jnp.array([1.0, -3.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([2.0, -2.0], 34)
    """

    not_differentiable = "sends signs"

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Signs:
        return Signs(pack(x < 0, 1), jnp.mean(jnp.abs(x)))

    def decode_vector(self, message: Signs, key: jax.Array, d: int) -> jax.Array:
        return message.scale * (1 - 2 * unpack(message.planes, d).astype(jnp.float32))

    def size_vector(self, message: Signs, d: int) -> Size:
        return Size(d + 32, coded_bits(histogram(message.planes, d), d) + 32)
