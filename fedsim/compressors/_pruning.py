"""Magnitude pruning of an update, its zeros compressed.

S. Han, J. Pool, J. Tran, W. J. Dally, "Learning both weights and connections for efficient neural networks", NIPS 2015,
section 3.1 (a layer's threshold is a quality parameter times the standard deviation of its weights):
https://arxiv.org/abs/1506.02626; applied to what is sent and not to the model, as in N. Strom, "Scalable distributed DNN
training using commodity GPU cloud computing", Interspeech 2015. Deviation: the threshold is in root mean squares, the
deviation from zero.
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
    """A mask ``uint32 [1, words]``, and the values, ``float32 [d]``, of which those that it leaves out are not sent."""

    planes: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MagnitudePruning(VectorCompressor):
    """Sends the coordinates that are large beside others of their tensor, and one bit for each of the rest.

    How many that are depends on the value, and so does the size of the message. Biased: use it inside `ErrorFeedback`.
    `TopK` sends a fixed number.

    Attributes:
      threshold: at least 0: a coordinate is sent if its magnitude is above so many root mean squares of its tensor.
      per_tensor: a threshold for every tensor, or one for all.

    Raises:
      ValueError: ``threshold`` is negative or not finite.

    >>> sent = MagnitudePruning(threshold=1.0).transmit(jnp.array([0.1, -3.0, 2.0, 0.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -3.0, 2.0, 0.0], 68)
    """

    threshold: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, threshold=self.threshold)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Masked:
        # Not "above": what is not a number must be sent.
        kept = ~(jnp.abs(x) <= self.threshold * root_mean_square(x))
        return Masked(pack(kept, 1), jnp.where(kept, x, 0.0))

    def decode_vector(self, message: Masked, key: jax.Array, d: int) -> jax.Array:
        return jnp.where(unpack(message.planes, d) == 1, message.values, 0.0)

    def size_vector(self, message: Masked, d: int) -> Size:
        counts, wide = histogram(message.planes, d), tree.bits_dtype(33 * d)
        sent = jnp.asarray(32, wide) * counts[1].astype(wide)
        return Size(jnp.asarray(d, wide) + sent, coded_bits(counts, d) + sent.astype(jnp.float32))
