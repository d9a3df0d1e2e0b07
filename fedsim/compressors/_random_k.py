"""Random-k sparsification.

J. Konečný, P. Richtárik, "Randomized distributed mean estimation: accuracy vs. communication", Frontiers in Applied
Mathematics and Statistics 4:62, 2018: https://arxiv.org/abs/1611.07555. Both sides know the seed of the indices, as in J.
Konečný, H. B. McMahan, F. X. Yu, P. Richtárik, A. T. Suresh, D. Bacon, "Federated learning: strategies for improving
communication efficiency", 2016, "random mask": https://arxiv.org/abs/1610.05492. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._selection import count_of


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RandomK(VectorCompressor):
    """Sends k random coordinates, drawn without replacement. The receiver derives their indices from the key.

    Attributes:
      fraction: k as a fraction of the d coordinates, in (0, 1], rounded up. With c clients in a round, the noise in their mean
        is (d / k - 1) / c times the squared norm of an update. Far above 1, as with 0.01 and 20 clients, training diverges at
        learning rates that work without compression.
      unbiased: whether values are multiplied by d / k, which makes the result unbiased, with NMSE d / k - 1. Use False inside
        `ErrorFeedback`.
      per_tensor: whether k coordinates are drawn from each tensor, or from all coordinates together.

    Raises:
      ValueError: ``fraction`` is out of range.

    >>> sent = RandomK(fraction=0.5).transmit(jnp.ones(4), jax.random.key(0))
    >>> sorted(sent.value.tolist()), sent.bits.item()
    ([0.0, 0.0, 2.0, 2.0], 64)
    """

    fraction: float = 0.1
    unbiased: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(above=0, most=1, fraction=self.fraction)
        checks.truth(unbiased=self.unbiased)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return x[self._indices(key, x.shape[0])]

    def decode_vector(self, message: jax.Array, key: jax.Array, d: int) -> jax.Array:
        values = message * (d / message.shape[0] if self.unbiased else 1.0)
        indices = self._indices(key, d)
        return jnp.zeros(d, jnp.float32).at[indices].set(values, unique_indices=True, mode="promise_in_bounds")

    def size_vector(self, message: jax.Array, d: int) -> Size:
        return Size(32 * message.shape[0], 32.0 * message.shape[0])

    def _indices(self, key: jax.Array, d: int) -> jax.Array:
        return rng.permute(rng.words(key), 0, d, jnp.arange(count_of(self.fraction, d), dtype=jnp.int32))
