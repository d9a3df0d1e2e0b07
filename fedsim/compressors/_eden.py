"""EDEN: a few bits per coordinate.

S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak, M. Mitzenmacher, "EDEN: Communication-efficient and
robust distributed mean estimation for federated learning", ICML 2022, Algorithm 1: https://arxiv.org/abs/2108.08842. R is a
random rotation, and y = R x is scaled to variance 1. Each coordinate of y is rounded to the nearest of 2^b centroids q, which
have the smallest squared error for a Gaussian. The message holds their codes and one number S. It is decoded as S R^T q. With
S = ||x||^2 / <y, q> this is unbiased, and with <y, q> / ||q||^2 it has the smallest squared error. With one bit, it is DRIVE.

Deviations: blocks and the Hadamard transform are as in `Drive`. The number of bits is an integer; for others the paper samples
coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._drive import BLOCK, ScaledCodes, matching_scale, size_of_scaled
from fedsim.compressors._norm import largest
from fedsim.compressors._packing import pack, unpack
from fedsim.compressors._rotation import layout, rotate, unrotate, whole_blocks


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Eden(VectorCompressor):
    """Rounds the coordinates of a randomly rotated vector to 2^bits centroids, and sends their codes and one scale.

    Attributes:
      bits: bits per coordinate, from 1 to 5. For long vectors, the unbiased NMSE is 0.5708, 0.1331, 0.0358, 0.0096 and 0.0025.
      unbiased: whether the decoded vector is unbiased (for means over clients), or has the smallest mean squared error (for a
        single sender, and inside `ErrorFeedback`).
      per_tensor: default False, as in the paper: all floats are one vector.

    Raises:
      ValueError: ``bits`` is out of range.

    >>> x = jax.random.normal(jax.random.key(1), (4096,))
    >>> sent = Eden(bits=2).transmit(x, jax.random.key(0))
    >>> round(float(jnp.sum((sent.value - x) ** 2) / jnp.sum(x**2)), 1), sent.bits.item()
    (0.1, 8224)
    """

    not_differentiable = "rounds"

    bits: int = 1
    unbiased: bool = True
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, 5, bits=self.bits)
        checks.truth(unbiased=self.unbiased)

    def padded_length(self, d: int) -> int:
        return whole_blocks(d)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> ScaledCodes:
        unit = largest(x)
        y = rotate(x, key, unit)
        deviation = jnp.sqrt(jnp.mean(y * y, BLOCK, keepdims=True))
        half = 2 ** (self.bits - 1)
        rank = jnp.zeros(y.shape, jnp.int32)  # index among the centroids of the same sign
        for below, above in itertools.pairwise(gaussian_centroids(self.bits)[half:]):
            rank = rank + (jnp.abs(y) >= deviation * float((below + above) / 2)).astype(jnp.int32)
        planes = pack(jnp.where(y >= 0, half + rank, half - 1 - rank), self.bits)
        # Computed from the packed planes, because XLA would repeat the comparisons for every use of the codes.
        return ScaledCodes(planes, unit * matching_scale(y, self._centroids(planes, y.shape), self.unbiased))

    def decode_vector(self, message: ScaledCodes, key: jax.Array, d: int) -> jax.Array:
        shape = layout(d)
        return unrotate(message.scale * self._centroids(message.planes, shape), key)

    def size_vector(self, message: ScaledCodes, d: int) -> Size:
        return size_of_scaled(message, d)

    def _centroids(self, planes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        codes = unpack(planes, math.prod(shape)).reshape(shape)
        return jnp.asarray(gaussian_centroids(self.bits), jnp.float32)[codes]


@functools.cache
def gaussian_centroids(bits: int) -> np.ndarray:
    """Returns the 2^bits centroids of a standard Gaussian with the smallest squared error, ascending, ``float64 [2**bits]``.

    Each point is the mean of the values nearest to it (S. P. Lloyd, "Least squares quantization in PCM", 1957/1982; J. Max
    1960).

    >>> gaussian_centroids(1).round(4).tolist(), gaussian_centroids(2).round(4).tolist()
    ([-0.7979, 0.7979], [-1.5104, -0.4528, 0.4528, 1.5104])
    """
    centroids = np.linspace(-2, 2, 2**bits) if bits > 1 else np.array([-1.0, 1.0])
    while True:
        ends = np.concatenate([[-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]])
        density = np.exp(-(ends**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([math.erf(end / math.sqrt(2)) / 2 for end in ends])
        means = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        if np.max(np.abs(means - centroids)) < 1e-12:
            return (means - means[::-1]) / 2
        centroids = means
