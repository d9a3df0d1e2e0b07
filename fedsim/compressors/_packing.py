"""Packing of small integers into words, and the estimate of their size after entropy coding.

Codes of b bits are stored as b bit planes. A plane holds one bit of each of the d codes, in ``uint32`` words. Code i is bit
``i // words`` of word ``i % words``. So neighbouring codes are in different words, and packing is vectorized.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

# For codes of at most this many bits, the histogram counts bits in words. For more bits there would be too many codes.
_COUNTED_AS_SETS = 4
# Words at this distance are in the same set of a processor's first cache. Reading 32 of them repeatedly is 15 times slower.
_SAME_LINES = 1024
# Number of bits of every word that are packed, and unpacked, together.
_PACKED, _UNPACKED = 4, 8


def words_for(d: int) -> int:
    """Returns the number of 32-bit words for d bits.

    >>> words_for(32), words_for(33)
    (1, 2)
    """
    return -(-d // 32)


def bits_for(symbols: int) -> int:
    """Returns the number of bits of a code for this many symbols.

    >>> bits_for(2), bits_for(3), bits_for(256)
    (1, 2, 8)
    """
    return max(symbols - 1, 1).bit_length()


@functools.partial(jax.jit, static_argnums=1)
def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs d integers from 0 to ``2**bits - 1``, an array of any shape, into bit planes ``uint32 [bits, words]``.

    >>> pack(jnp.array([1, 0, 3]), 2).tolist()
    [[5], [4]]
    """
    d, words = codes.size, words_for(codes.size)
    full = d // words
    # Codes are stored as bytes, a quarter of the memory, and in their original shape. If they were reshaped first, XLA on a CPU
    # would compute the original index of every code.
    codes = codes.astype(_narrow(bits))
    planes = jnp.arange(bits, dtype=jnp.uint32)[:, None]

    def spread(row: jax.Array, place: jax.Array) -> jax.Array:
        return ((row[None].astype(jnp.uint32) >> planes) & jnp.uint32(1)) << jnp.asarray(place, jnp.uint32)

    def several(i: jax.Array, packed: jax.Array) -> jax.Array:
        for place in (_PACKED * i + j for j in range(_PACKED)):
            packed = packed | spread(jax.lax.dynamic_slice(codes.reshape(-1), (place * words,), (words,)), place)
        return packed

    if bits > 1 or words % _SAME_LINES == 0:
        packed = jax.lax.fori_loop(0, full // _PACKED, several, jnp.zeros((bits, words), jnp.uint32))
        done = full - full % _PACKED
    else:  # A single expression, which XLA fuses with the computation of the codes, so masks are not stored in memory.
        places = jnp.arange(full, dtype=jnp.uint32)[:, None]
        rows = codes.reshape(-1)[: full * words].reshape(full, words)
        packed, done = jnp.sum(rows.astype(jnp.uint32) << places, axis=0, dtype=jnp.uint32)[None], full
    for place in range(done, -(-d // words)):
        row = codes.reshape(-1)[place * words : (place + 1) * words]
        packed = packed | spread(jnp.pad(row, (0, words - row.shape[0])), jnp.uint32(place))
    return packed


@functools.partial(jax.jit, static_argnums=1)
def unpack(planes: jax.Array, d: int) -> jax.Array:
    """Returns the d codes that were packed, ``uint8 [d]`` for up to 8 bits and ``uint32 [d]`` otherwise.

    >>> unpack(jnp.array([[5], [4]], jnp.uint32), 3).tolist()
    [1, 0, 3]
    """
    dtype = _narrow(len(planes))

    # 8 rows at a time. On a CPU, all 32 in one expression take two to six times as long, and one at a time up to twice as long.
    def rows(place: jax.Array) -> jax.Array:
        codes = jnp.zeros((_UNPACKED, planes.shape[1]), dtype)
        for p in range(len(planes)):
            bits = (planes[p][None] >> (place + jnp.arange(_UNPACKED, dtype=jnp.uint32)[:, None])) & jnp.uint32(1)
            codes = codes | (bits << jnp.uint32(p)).astype(dtype)
        return codes

    return jax.lax.map(rows, jnp.arange(0, 32, _UNPACKED, dtype=jnp.uint32)).reshape(-1)[:d]


def _narrow(bits: int) -> Any:
    return jnp.uint8 if bits <= 8 else jnp.uint32


@functools.partial(jax.jit, static_argnums=1)
def histogram(planes: jax.Array, d: int) -> jax.Array:
    """Returns how often each of the ``2**bits`` codes occurs among d packed codes, ``int32 [2**bits]``.

    >>> histogram(pack(jnp.array([1, 0, 3, 3], jnp.uint32), 2), 4).tolist()
    [1, 1, 0, 2]
    """
    bits, words = planes.shape
    if bits > _COUNTED_AS_SETS:
        return jnp.zeros(2**bits, jnp.int32).at[unpack(planes, d).astype(jnp.int32)].add(1, mode="promise_in_bounds")
    filled = (d - 1 - jnp.arange(words, dtype=jnp.uint32)) // jnp.uint32(words) + 1
    sets = jnp.where(filled == 32, ~jnp.uint32(0), (jnp.uint32(1) << filled) - 1)[None]
    for plane in planes:  # later planes hold higher bits
        sets = jnp.stack([sets & ~plane[None], sets & plane[None]]).reshape(-1, words)
    return jnp.sum(jax.lax.population_count(sets).astype(jnp.int32), axis=1)


def coded_bits(counts: jax.Array, d: int) -> jax.Array:
    """Returns the empirical entropy, in bits, of d symbols with these counts, plus the bits for the counts, ``float32 []``.

    >>> round(float(coded_bits(jnp.array([500, 500]), 1000)) - 1000, 1)
    20.8
    """
    symbols = counts.shape[0]
    share = counts.astype(jnp.float32) / d
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log2(jnp.where(share > 0, share, 1.0)), 0.0))
    return d * entropy + symbols * math.log2(math.e * (d + symbols) / symbols)
