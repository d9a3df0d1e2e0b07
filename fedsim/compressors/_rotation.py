"""The randomized Hadamard transform: random signs, then a Hadamard matrix; its inverse is its transpose.

N. Ailon and B. Chazelle, "The fast Johnson-Lindenstrauss transform", SIAM Journal on Computing 39(1), 2009. A rotated
vector's coordinates are of one size, and nearly Gaussian, whatever the vector was. A long vector is rotated in blocks, each
with signs of its own: what is sent of a block (a scale, say) is little beside it, and not the vector but its last block is
padded with zeros.

A block of a b coordinates is the matrix X [a, b] and its transform H_a X H_b, two matrix products with small Hadamard
matrices, which a processor does faster than log2(a b) rounds of sums and differences. The blocks lie side by side as [a,
blocks, b], so that both products are single large ones.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng, tree

# A vector of up to so many is one block, for short ones are less Gaussian.
_SHORTEST = 2**10
# The largest block: the products of a longer one take longer, and its coordinates would hardly be more Gaussian.
_LARGEST = 2**12
# What is sent of a block beside its coordinates, in coordinates: blocks are of the size for which this and padding are least.
_SIDE = 32


def layout(d: int) -> tuple[int, int, int]:
    """``(a, blocks, b)``: how a vector of ``d`` is laid out, in blocks of a b, a power of two.

    >>> layout(4096), layout(5), layout(1), layout(5000)
    ((64, 1, 64), (4, 1, 2), (1, 1, 1), (32, 5, 32))
    """
    whole = 2 ** (d - 1).bit_length()
    sizes = [2**i for i in range(_LARGEST.bit_length()) if min(_SHORTEST, whole) <= 2**i <= whole]
    block = min(sizes, key=lambda size: -(-d // size) * (size + _SIDE))
    a = 2 ** ((block.bit_length()) // 2)
    return a, -(-d // block), block // a


@functools.cache
def hadamard(n: int) -> np.ndarray:
    """Sylvester's Hadamard matrix ``float32 [n, n]``, scaled to be orthonormal; n is a power of two.

    >>> (hadamard(2) * 2**0.5).round(3).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    i = np.arange(n)
    parity = np.array([[int(x).bit_count() & 1 for x in row] for row in i[:, None] & i])
    return ((1 - 2 * parity) / math.sqrt(n)).astype(np.float32)


def whole_blocks(d: int) -> int:
    """The length of so many blocks as hold ``d`` coordinates.

    >>> whole_blocks(5), whole_blocks(4096)
    (8, 4096)
    """
    return math.prod(layout(d))


@jax.jit
def rotate(x: jax.Array, key: jax.Array, unit: jax.Array | float = 1.0) -> jax.Array:
    """``float32 [d]`` of whole blocks, divided by ``unit`` and rotated block by block: ``float32 [a, blocks, b]``."""
    # All of it first: who flips signs as tensors are put end to end, asks of every coordinate which tensor it is of.
    return _transform(_flip(tree.after(x, x) / unit, key).reshape(layout(x.shape[0])))


@jax.jit
def unrotate(y: jax.Array, key: jax.Array) -> jax.Array:
    """The ``float32 [d]`` that `rotate` made ``y`` of with this key; of another ``y``, the nearest."""
    return _flip(_transform(y).reshape(-1), key)


def _transform(x: jax.Array) -> jax.Array:
    a, blocks, b = x.shape
    left, right = jnp.asarray(hadamard(a)), jnp.asarray(hadamard(b))
    x = jnp.dot(left, x.reshape(a, blocks * b), precision=jax.lax.Precision.HIGHEST)
    return jnp.dot(x.reshape(a * blocks, b), right, precision=jax.lax.Precision.HIGHEST).reshape(a, blocks, b)


def _flip(x: jax.Array, key: jax.Array) -> jax.Array:
    """Changes the sign of about every second coordinate; doing it again changes it back."""
    signs = rng.hashed(rng.stream(key, "rotation"), x.shape[0]) & jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ signs, jnp.float32)
