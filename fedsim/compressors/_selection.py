"""Which coordinates to send: the k largest exactly, without sorting; their places from a mask of bits; and k out of a fraction.

Masks are planes of `_packing`, so places are counted in its order: word by word, and within a word bit by bit.
"""

from __future__ import annotations

import fractions
import math

import jax
import jax.numpy as jnp

from fedsim.compressors._packing import pack


def check_fraction(fraction: float) -> None:
    """Raises ``ValueError`` unless 0 < fraction <= 1."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Expected 0 < fraction <= 1, got fraction={fraction}.")


def count_of(fraction: float, d: int) -> int:
    """The smallest whole number that is not below ``fraction`` of ``d``, by the decimals that one writes.

    >>> count_of(0.01, 9216), count_of(0.1, 30), count_of(1e-9, 5)
    (93, 3, 1)
    """
    return math.ceil(fractions.Fraction(str(float(fraction))) * d)


def largest(x: jax.Array, k: int) -> jax.Array:
    """The mask ``uint32 [words]`` of the k coordinates of ``float32 [d]`` that are largest in magnitude, exactly k of them.

    Which of several of the very magnitude that divides them are in is decided by place. NaN is larger than anything.
    """
    # Read as integers, magnitudes keep their order; and there are no values between two integers.
    size = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    d = x.shape[0]

    # Kept: at least k are >= low, fewer than k are >= high.
    def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, above_low, above_high, step = state
        # As if the logarithm of the number above were linear in between; every third time the middle, which must end.
        total, wanted = jnp.log(above_low.astype(jnp.float32)), math.log(k + 0.5)
        rest = jnp.log(jnp.maximum(above_high.astype(jnp.float32), 0.5))
        share = jnp.where(step % 3 == 2, 0.5, jnp.clip((total - wanted) / (total - rest), 0.001, 0.999))
        guess = low + jnp.clip(((high - low).astype(jnp.float32) * share).astype(jnp.uint32), 1, high - low - 1)
        above = jnp.sum(size >= guess, dtype=jnp.int32)
        enough = above >= k
        low, above_low = jnp.where(enough, guess, low), jnp.where(enough, above, above_low)
        high, above_high = jnp.where(enough, high, guess), jnp.where(enough, above_high, above)
        return low, high, above_low, above_high, step + 1

    start = (jnp.uint32(0), jnp.max(size) + jnp.uint32(1), jnp.int32(d), jnp.int32(0), jnp.int32(0))
    low, high, _, above_high, _ = jax.lax.while_loop(lambda s: (s[1] - s[0] > 1) & (s[2] > k), narrow, start)
    sure, maybe = pack((size >= high).astype(jnp.uint32), 1)[0], pack((size >= low).astype(jnp.uint32), 1)[0]
    return sure | _first(maybe & ~sure, k - above_high)


def places(mask: jax.Array, k: int) -> jax.Array:
    """Where the k bits of ``mask`` are set, ``int32 [k]`` in ``0 .. d-1``."""
    words = mask.shape[0]
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    until = jnp.cumsum(counts)
    nth = jnp.arange(k, dtype=jnp.int32)
    word = jnp.searchsorted(until, nth, side="right").astype(jnp.int32)
    bit = _length(mask[word], nth - (until - counts)[word] + 1) - 1
    return bit * words + word


def _first(mask: jax.Array, count: jax.Array) -> jax.Array:
    """``mask`` with only its first ``count`` bits left."""
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    wanted = count - (jnp.cumsum(counts) - counts)
    part = mask & ((jnp.uint32(1) << _length(mask, jnp.clip(wanted, 0, 31)).astype(jnp.uint32)) - jnp.uint32(1))
    return jnp.where(wanted >= counts, mask, jnp.where(wanted <= 0, jnp.uint32(0), part))


def _length(words: jax.Array, count: jax.Array) -> jax.Array:
    """The least number of low bits of each word of which ``count`` are set, ``int32``; at most 32."""
    low = jnp.zeros_like(count)  # too few, unless none are wanted
    for step in (16, 8, 4, 2, 1):
        inside = words & ((jnp.uint32(1) << (low + step).astype(jnp.uint32)) - jnp.uint32(1))
        low = jnp.where(jax.lax.population_count(inside).astype(jnp.int32) < count, low + step, low)
    return jnp.where(count > 0, low + 1, 0)
