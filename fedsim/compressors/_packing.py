"""Small integers, packed to the bit, and what an entropy coder would make of them.

Codes of b bits are b planes of one bit each, and a plane is d bits in ``uint32`` words. Code i is bit ``i // words`` of word
``i % words``: neighbours go to different words, which a processor with wide registers packs and unpacks at the speed of its
memory.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# So many planes are counted at a time: 2**4 sets of words stay in a processor's cache.
_PLANES = 4


def words_for(d: int) -> int:
    """Machine words for d bits.

    >>> words_for(32), words_for(33)
    (1, 2)
    """
    return -(-d // 32)


def bits_for(symbols: int) -> int:
    """Bits for a code of one of so many symbols.

    >>> bits_for(2), bits_for(3), bits_for(256)
    (1, 2, 8)
    """
    return max(symbols - 1, 1).bit_length()


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """``uint32 [d]``, each below ``2**bits``, as ``uint32 [bits, words]``.

    >>> pack(jnp.array([1, 0, 3], jnp.uint32), 2).tolist()
    [[5], [4]]
    """
    words = words_for(codes.shape[0])
    rows = jnp.pad(codes, (0, 32 * words - codes.shape[0])).reshape(32, words)
    places = jnp.arange(32, dtype=jnp.uint32)[:, None]
    return jnp.stack([jnp.sum(((rows >> jnp.uint32(p)) & jnp.uint32(1)) << places, axis=0) for p in range(bits)])


def unpack(planes: jax.Array, d: int) -> jax.Array:
    """The ``uint32 [d]`` that were packed.

    >>> unpack(jnp.array([[5], [4]], jnp.uint32), 3).tolist()
    [1, 0, 3]
    """
    places = jnp.arange(32, dtype=jnp.uint32)[:, None]
    codes = jnp.zeros((32, planes.shape[1]), jnp.uint32)
    for p in range(planes.shape[0]):
        codes = codes | (((planes[p][None] >> places) & jnp.uint32(1)) << jnp.uint32(p))
    return codes.reshape(-1)[:d]


def histogram(planes: jax.Array, d: int) -> jax.Array:
    """How often each of the ``2**bits`` codes occurs among d: ``int32 [2**bits]``.

    >>> histogram(pack(jnp.array([1, 0, 3, 3], jnp.uint32), 2), 4).tolist()
    [1, 1, 0, 2]
    """
    bits, words = planes.shape
    if bits > 2 * _PLANES:
        return jnp.bincount(unpack(planes, d).astype(jnp.int32), length=2**bits)
    position = jnp.arange(32, dtype=jnp.int32)[:, None] * words + jnp.arange(words, dtype=jnp.int32)[None]
    there = pack((position < d).reshape(-1).astype(jnp.uint32), 1)
    low, high = planes[:_PLANES], planes[_PLANES:]

    def halves(sets: jax.Array, plane: jax.Array) -> jax.Array:
        return jnp.stack([sets & ~plane[None], sets & plane[None]]).reshape(-1, words)  # the plane decides the higher half

    def counts(chosen: jax.Array) -> jax.Array:
        for plane in low:
            chosen = halves(chosen, plane)
        return jnp.sum(jax.lax.population_count(chosen).astype(jnp.int32), axis=1)

    if not high.shape[0]:
        return counts(there)

    def upper(code: jax.Array) -> jax.Array:
        chosen = there
        for p in range(high.shape[0]):
            chosen = chosen & jnp.where((code >> jnp.uint32(p)) & jnp.uint32(1) == 1, high[p], ~high[p])[None]
        return counts(chosen)

    return jax.lax.map(upper, jnp.arange(2 ** high.shape[0], dtype=jnp.uint32)).reshape(-1)


def coded_bits(counts: jax.Array, d: int) -> jax.Array:
    """Bits for d symbols with these counts at their empirical entropy, and for the counts: ``float32 []``.

    >>> round(float(coded_bits(jnp.array([500, 500]), 1000)) - 1000, 1)
    20.8
    """
    symbols = counts.shape[0]
    share = counts.astype(jnp.float32) / d
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log2(jnp.where(share > 0, share, 1.0)), 0.0))
    return d * entropy + symbols * math.log2(math.e * (d + symbols) / symbols)
