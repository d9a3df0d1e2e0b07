"""Magnitude pruning of an update.

S. Han, J. Pool, J. Tran, W. J. Dally, "Learning both weights and connections for efficient neural networks", NIPS 2015,
section 3.1 (a layer's threshold is a quality parameter times the standard deviation of its weights):
https://arxiv.org/abs/1506.02626. It is applied to updates and not to the model, as in N. Strom, "Scalable distributed DNN
training using commodity GPU cloud computing", Interspeech 2015. Deviation: the unit of the threshold is the root mean square
instead of the standard deviation, and the largest coordinate is always sent.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._norm import root_mean_square
from fedsim.compressors._packing import coded_bits, histogram, pack, unpack


class Masked(NamedTuple):
    """A packed mask ``uint32 [1, words]``, and values ``float32 [d]``. Values outside of the mask are not sent."""

    planes: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MagnitudePruning(VectorCompressor):
    """Sends the coordinates whose magnitude exceeds a multiple of the root mean square, and a mask of one bit per coordinate.

    The largest coordinate is always sent, if it is not 0. Otherwise small tensors might never be, not even inside
    `ErrorFeedback`: no coordinate of d exceeds sqrt(d) times the root mean square.

    The number of these coordinates, and so the size of the message, depends on the value. `TopK` sends a fixed number. Biased:
    use it inside `ErrorFeedback`.

    Attributes:
      threshold: the multiple of the root mean square of the tensor, at least 0.
      per_tensor: whether each tensor has its own threshold, or all floats have the same.

    Raises:
      ValueError: ``threshold`` is negative or not finite.

    >>> sent = MagnitudePruning(threshold=1.0).transmit(jnp.array([0.1, -3.0, 2.0, 0.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -3.0, 2.0, 0.0], 68)
    """

    not_differentiable = "keeps the largest coordinates"

    threshold: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, threshold=self.threshold)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Masked:
        # Negated, so that NaN is sent.
        size = jnp.abs(x)
        largest = (jnp.arange(len(x)) == jnp.argmax(size)) & (size > 0)
        kept = ~(size <= self.threshold * root_mean_square(x)) | largest
        return Masked(pack(kept, 1), jnp.where(kept, x, 0.0))

    def decode_vector(self, message: Masked, key: jax.Array, d: int) -> jax.Array:
        return jnp.where(unpack(message.planes, d) == 1, message.values, 0.0)

    def size_vector(self, message: Masked, d: int) -> Size:
        counts, wide = histogram(message.planes, d), tree.bits_dtype(33 * d)
        sent = jnp.asarray(32, wide) * counts[1].astype(wide)
        return Size(jnp.asarray(d, wide) + sent, coded_bits(counts, d) + sent.astype(jnp.float32))
