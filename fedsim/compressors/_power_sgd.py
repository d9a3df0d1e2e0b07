"""PowerSGD: low-rank approximation of matrices.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization",
NeurIPS 2019, Algorithm 1: https://arxiv.org/abs/1905.13727. One step of power iteration
starts from the Q of the last transmission::

    P = orthogonalize(M Q),   Q = M^T P,   decoded as P Q^T

Deviations: the paper's workers average P before its orthogonalization, and Q, in two all-reduces. Here every client computes
its own P and Q, so any aggregator can be used. As in the paper, tensors with one axis are sent uncompressed. The paper's error
feedback is `ErrorFeedback`. The paper draws the first Q from a normal distribution. Here it is drawn once, and is the same for
all senders, runs and seeds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.compressors._compressor import Compressor, Memory, Message, Size


class Factors(NamedTuple):
    """P ``float32 [rows, rank]``, orthonormal, and Q ``float32 [columns, rank]``."""

    p: jax.Array
    q: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PowerSGD(Compressor):
    """Approximates tensors of two or more axes, reshaped to matrices, by matrices of low rank. Biased.

    The last axis of a tensor becomes the columns of its matrix. A tensor whose factors would not be smaller is sent
    uncompressed. A sender keeps Q between transmissions.

    Attributes:
      rank: at least 1. The paper uses 1 to 4.

    Raises:
      ValueError: ``rank`` is not a positive integer.

    >>> compressor, x = PowerSGD(rank=1), jnp.outer(jnp.arange(20.0), jnp.arange(30.0))
    >>> sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    >>> bool(jnp.allclose(sent.value, x, rtol=1e-4)), sent.bits.item()
    (True, 1600)
    """

    not_differentiable = "orthogonalizes factors, which are zero for an update of zeros"

    rank: int = 2

    def __post_init__(self) -> None:
        checks.whole(1, rank=self.rank)

    def init_tensor(self, tensor: jax.ShapeDtypeStruct) -> Memory:
        if not self._is_factored(tensor.shape):
            return ()
        return jax.random.normal(rng.stream(rng.root(0), "power iteration"), (tensor.shape[-1], self.rank), jnp.float32)

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        if not self._is_factored(x.shape):
            return x, memory
        matrix = x.reshape(-1, x.shape[-1])
        p, _ = jnp.linalg.qr(_times(matrix, memory))
        q = _times(matrix.T, p)
        # If Q became zero in a column, that column would stay zero forever, so the old one is kept.
        return Factors(p, q), jnp.where(jnp.any(q != 0, axis=0, keepdims=True), q, memory)

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return _times(message.p, message.q.T).reshape(shape) if self._is_factored(shape) else message

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        floats = sum(x.size for x in jax.tree.leaves(message))
        return Size(32 * floats, 32.0 * floats)

    def _is_factored(self, shape: tuple[int, ...]) -> bool:
        d, columns = math.prod(shape), shape[-1] if shape else 1
        return len(shape) > 1 and self.rank * (d // columns + columns) < d


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
