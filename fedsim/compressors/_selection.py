"""Which coordinates to send: the k largest exactly, without sorting; their places from a mask of bits; and k out of a fraction.

Masks are planes of `_packing`, so places are counted in its order: word by word, and within a word bit by bit.
"""

from __future__ import annotations

import fractions
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim.compressors._packing import pack

# Every so manieth coordinate is a sample; an odd number, lest it be a column of a matrix.
_SAMPLE = 17
# So many are sorted.
_LEFT = 1024


def count_of(fraction: float, d: int) -> int:
    """The smallest whole number that is not below ``fraction`` of ``d``, by the decimals that one writes.

    >>> count_of(0.01, 9216), count_of(0.1, 30), count_of(1e-9, 5)
    (93, 3, 1)
    """
    return math.ceil(fractions.Fraction(str(float(fraction))) * d)


class _Cut(NamedTuple):
    """At least k are >= low, fewer than k are >= high; how many they are; and how often that was narrowed down."""

    low: jax.Array
    high: jax.Array
    above_low: jax.Array
    above_high: jax.Array
    step: jax.Array


@functools.partial(jax.jit, static_argnums=1)
def largest(x: jax.Array, k: int) -> jax.Array:
    """The mask ``uint32 [words]`` of the k coordinates of ``float32 [d]`` that are largest in magnitude, exactly k of them.

    Which of several of the very magnitude that divides them are in is decided by place. NaN is larger than anything.

    No sorting: the magnitude that divides them is sought between bounds, by counting. A sample gives the first bounds; when
    few are left in between, those are sorted.
    """
    # Read as integers, magnitudes keep their order; and there are no values between two integers.
    size = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)
    d = x.shape[0]
    cut = _everything(size)
    if d > _SAMPLE * _LEFT:
        sample = size[::_SAMPLE]
        wanted = k * sample.shape[0] / d
        for rank in (wanted + 4 * math.sqrt(wanted) + 4, wanted - 4 * math.sqrt(wanted) - 4):
            rank = min(max(round(rank), 1), sample.shape[0])
            cut = _narrow(size, k, cut, jnp.maximum(_narrowed(sample, rank, _everything(sample), 0).low, 1))
    cut = _narrowed(size, k, cut, _LEFT)
    # Those in between, largest first; then the place of the k-th among them.
    between = pack((size >= cut.low).astype(jnp.uint32), 1)[0] & ~pack((size >= cut.high).astype(jnp.uint32), 1)[0]
    number = cut.above_low - cut.above_high
    room = min(_LEFT, d)
    left = jnp.where(jnp.arange(room) < number, size[jnp.minimum(places(between, room), d - 1)], -1)
    last = jnp.sort(left, descending=True)[jnp.clip(k - 1 - cut.above_high, 0, room - 1)]
    # Too many are left only if all are the same, or all are wanted.
    last = jnp.where(number <= room, last, jnp.where(cut.above_low == k, cut.low - 1, cut.low))
    sure, maybe = pack((size > last).astype(jnp.uint32), 1)[0], pack((size >= last).astype(jnp.uint32), 1)[0]
    return sure | _first(maybe & ~sure, k - jnp.sum(jax.lax.population_count(sure).astype(jnp.int32)))


def _everything(size: jax.Array) -> _Cut:
    # The largest int32 is no float's, not even a NaN's, but may be one's plus 1.
    most = jnp.minimum(jnp.max(size), jnp.iinfo(jnp.int32).max - 1) + 1
    return _Cut(jnp.int32(0), most, jnp.int32(size.shape[0]), jnp.int32(0), jnp.int32(0))


def _narrow(size: jax.Array, k: int, cut: _Cut, guess: jax.Array) -> _Cut:
    """The bounds after counting those above ``guess``."""
    guess = jnp.clip(guess, cut.low, cut.high)
    above = jnp.sum(size >= guess, dtype=jnp.int32)
    enough = above >= k
    return _Cut(
        jnp.where(enough, guess, cut.low),
        jnp.where(enough, cut.high, guess),
        jnp.where(enough, above, cut.above_low),
        jnp.where(enough, cut.above_high, above),
        cut.step + 1,
    )


def _narrowed(size: jax.Array, k: int, cut: _Cut, left: int) -> _Cut:
    """Bounds with at most ``left`` in between, or with one number only, or of which the lower is the one sought."""

    def step(cut: _Cut) -> _Cut:
        # First what is not 0. Then as if the logarithm of the number above were linear in between, and every second time the
        # middle, which must end.
        most, least = (jnp.log(jnp.maximum(n.astype(jnp.float32), 0.5)) for n in (cut.above_low, cut.above_high))
        share = jnp.where(cut.step % 2 == 1, 0.5, jnp.where(cut.step == 0, 0.0, (most - math.log(k)) / (most - least)))
        width = cut.high - cut.low
        return _narrow(size, k, cut, cut.low + jnp.clip((width.astype(jnp.float32) * share).astype(jnp.int32), 1, width - 1))

    def unsettled(cut: _Cut) -> jax.Array:
        return (cut.high - cut.low > 1) & (cut.above_low > k) & (cut.above_low - cut.above_high > left)

    return jax.lax.while_loop(unsettled, step, cut)


@functools.partial(jax.jit, static_argnums=1)
def places(mask: jax.Array, k: int) -> jax.Array:
    """Where the k bits of ``mask`` are set, ``int32 [k]`` in ``0 .. d-1``."""
    words = mask.shape[0]
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    until = jnp.cumsum(counts)
    nth = jnp.arange(k, dtype=jnp.int32)
    word = jnp.searchsorted(until, nth, side="right").astype(jnp.int32)
    bit = _length(mask[word], nth - (until - counts)[word] + 1) - 1
    return bit * words + word


@jax.jit
def spread(mask: jax.Array, values: jax.Array, vector: jax.Array) -> jax.Array:
    """``vector``, ``[d]``, with the k ``values`` where the k bits of ``mask`` are set, in the order of `places`.

    Each coordinate looks up its value, if it has one: a scatter of the values takes them one by one on a CPU.
    """
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    bit = jnp.arange(32, dtype=jnp.uint32)[:, None]
    before = jax.lax.population_count(mask[None] & ((jnp.uint32(1) << bit) - jnp.uint32(1))).astype(jnp.int32)
    rank = (jnp.cumsum(counts) - counts)[None] + before
    rank, chosen = (x.reshape(-1)[: vector.shape[0]] for x in (rank, (mask[None] >> bit) & jnp.uint32(1)))
    return jnp.where(chosen == 1, values.at[rank].get(mode="clip"), vector)


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
