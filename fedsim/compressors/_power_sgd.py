"""PowerSGD: matrices of low rank.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization",
NeurIPS 2019, Algorithm 1: https://arxiv.org/abs/1905.13727. One step of power iteration from the Q of the last transmission::

    P = orthogonalize(M Q),   Q = M^T P,   what arrives is P Q^T

Deviations: the paper's workers average P before they orthogonalize it, and Q, in two all-reduces; here a client's P and Q are
its own, so any aggregator can follow. As in the paper, what has one axis is sent as it is, and the memory of what was left
out is `ErrorFeedback`. The first Q, which the paper draws from a normal distribution, is the same for every sender of every
run: all start from one subspace, and which one it is follows from no run's seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.compressors._compressor import Compressor, Memory, Message, Part, Size


class Factors(NamedTuple):
    """P ``float32 [rows, rank]``, orthonormal, and Q ``float32 [columns, rank]``."""

    p: jax.Array
    q: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PowerSGD(Compressor):
    """Every tensor of two or more axes, as a matrix whose columns are its last axis, by one of low rank. Biased.

    Tensors of which two factors would be no smaller are sent as they are. What a sender keeps is Q.

    Attributes:
      rank: at least 1. The paper takes 1 to 4.

    Raises:
      ValueError: ``rank`` is not a positive whole number.

    >>> compressor, x = PowerSGD(rank=1), jnp.outer(jnp.arange(20.0), jnp.arange(30.0))
    >>> sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    >>> bool(jnp.allclose(sent.value, x, rtol=1e-4)), sent.bits.item()
    (True, 1600)
    """

    rank: int = 2

    def __post_init__(self) -> None:
        checks.whole(1, rank=self.rank)

    def start(self, part: Part) -> Memory:
        if not self._is_factored(part.shape):
            return ()
        return jax.random.normal(rng.stream(jax.random.key(0), "power iteration"), (part.shape[-1], self.rank), jnp.float32)

    def encode_part(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        if not self._is_factored(x.shape):
            return x, memory
        matrix = x.reshape(-1, x.shape[-1])
        p, _ = jnp.linalg.qr(_times(matrix, memory))
        q = _times(matrix.T, p)
        # A column that vanished would stay away for ever.
        return Factors(p, q), jnp.where(jnp.any(q != 0, axis=0, keepdims=True), q, memory)

    def decode_part(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return _times(message.p, message.q.T).reshape(shape) if self._is_factored(shape) else message

    def size_part(self, message: Message, shape: tuple[int, ...]) -> Size:
        floats = sum(x.size for x in jax.tree.leaves(message))
        return Size(32 * floats, 32.0 * floats)

    def _is_factored(self, shape: tuple[int, ...]) -> bool:
        d, columns = math.prod(shape), shape[-1] if shape else 1
        return len(shape) > 1 and self.rank * (d // columns + columns) < d


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
