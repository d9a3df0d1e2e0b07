"""The randomized Hadamard transform: random signs, then a Hadamard matrix; its inverse is its transpose.

N. Ailon and B. Chazelle, "The fast Johnson-Lindenstrauss transform", SIAM Journal on Computing 39(1), 2009. The coordinates of
a rotated vector have similar magnitudes and are nearly Gaussian, whatever the vector was. A long vector is rotated in blocks
with different random signs. Then only the last block is padded with zeros, and the numbers that are sent per block, such as a
scale, are few compared with its coordinates.

A block of a b coordinates is a matrix X [a, b], and its transform is H_a X H_b. These two products with small Hadamard matrices
are faster than log2(a b) rounds of sums and differences. The layout of all blocks is [a, blocks, b], so that both products are
single large ones.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng, tree

# Vectors of at most this length are one block, because the coordinates of shorter blocks are less Gaussian.
_SHORTEST = 2**10
# The largest block. The products of larger blocks take longer, and their coordinates are hardly more Gaussian.
_LARGEST = 2**12
# Additional data per block, for example a scale, counts as this many coordinates. The block size minimizes it plus padding.
_SIDE = 32


def layout(d: int) -> tuple[int, int, int]:
    """Returns the layout ``(a, blocks, b)`` of a vector of length ``d``, in blocks of a b coordinates, a power of two.

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
    """Returns Sylvester's Hadamard matrix ``float32 [n, n]``, scaled to be orthonormal. n is a power of two.

    >>> (hadamard(2) * 2**0.5).round(3).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    i = np.arange(n)
    parity = np.array([[int(x).bit_count() & 1 for x in row] for row in i[:, None] & i])
    return ((1 - 2 * parity) / math.sqrt(n)).astype(np.float32)


def whole_blocks(d: int) -> int:
    """Returns ``d``, rounded up to whole blocks.

    >>> whole_blocks(5), whole_blocks(4096)
    (8, 4096)
    """
    return math.prod(layout(d))


@jax.jit
def rotate(x: jax.Array, key: jax.Array, unit: jax.Array | float = 1.0) -> jax.Array:
    """Divides ``float32 [d]``, whole blocks, by ``unit``, and rotates every block. Returns ``float32 [a, blocks, b]``."""
    # The vector is computed first. Otherwise XLA would determine the tensor of every coordinate when it flips signs.
    return _transform(_flip(tree.after(x, x) / unit, key).reshape(layout(x.shape[0])))


@jax.jit
def unrotate(y: jax.Array, key: jax.Array) -> jax.Array:
    """Inverts `rotate` with the same key and ``unit`` 1. Returns ``float32 [d]``."""
    return _flip(_transform(y).reshape(-1), key)


def _transform(x: jax.Array) -> jax.Array:
    a, blocks, b = x.shape
    left, right = jnp.asarray(hadamard(a)), jnp.asarray(hadamard(b))
    x = jnp.dot(left, x.reshape(a, blocks * b), precision=jax.lax.Precision.HIGHEST)
    return jnp.dot(x.reshape(a * blocks, b), right, precision=jax.lax.Precision.HIGHEST).reshape(a, blocks, b)


def _flip(x: jax.Array, key: jax.Array) -> jax.Array:
    """Flips the signs of random coordinates, each with probability 1/2. With the same key, it is its own inverse."""
    signs = rng.hashed(rng.stream(key, "rotation"), x.shape[0]) & jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ signs, jnp.float32)
