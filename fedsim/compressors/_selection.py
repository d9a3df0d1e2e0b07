"""Which coordinates to send: the k largest exactly, without sorting; their places from a mask of bits; and k out of a fraction.

Masks are planes of `_packing`, so places are counted in its order: word by word, and within a word bit by bit.
"""

from __future__ import annotations

import fractions
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.compressors._packing import pack, unpack


def count_of(fraction: float, d: int) -> int:
    """The smallest whole number that is not below ``fraction`` of ``d``, by the decimals that one writes.

    >>> count_of(0.01, 9216), count_of(0.1, 30), count_of(1e-9, 5)
    (93, 3, 1)
    """
    return math.ceil(fractions.Fraction(str(float(fraction))) * d)


class _Cut(NamedTuple):
    """At least k are >= low, fewer than k are >= high: how many they are, and their masks.

    ``step``: how often that was narrowed down; ``held``: for how long low has been where it is, negative: for how long high;
    ``idle``: how often in a row that has not made fewer of those between.
    """

    low: jax.Array
    high: jax.Array
    above_low: jax.Array
    above_high: jax.Array
    maybe: jax.Array
    sure: jax.Array
    step: jax.Array
    held: jax.Array
    idle: jax.Array


def drawn(mask: jax.Array, k: jax.Array | int, key: jax.Array) -> jax.Array:
    """``mask``, ``uint32 [words]``, with k of its bits left, each as likely as any other; with all, if it has no more.

    Each bit is in by a toss of its own, of the chance k / number. Of those that are then too many or missing, some sqrt(k), the
    first comes by lot, and the others are next to it, in the order of `places`: so not all sets of k are as likely. A lot for
    every coordinate, and a search among lots, would take three times as long.
    """
    words, number = len(mask), num_set(mask)
    precision = (32 * words).bit_length() + 2  # the chance is then right to a quarter of a coordinate
    k = jnp.minimum(jnp.asarray(k, jnp.int32), number)
    # Digit by digit, so that it is the same on all processors: of random words, those of a digit 1 are joined by "or", and
    # those of a digit 0 by "and".
    digits, rest, whole = [], k.astype(jnp.uint32), number.astype(jnp.uint32)
    for _ in range(precision):
        digits.append(2 * rest >= whole)
        rest = 2 * rest - jnp.where(digits[-1], whole, 0)
    tosses = rng.hashed(key, precision * words).reshape(precision, words)
    tossed = jnp.zeros_like(mask)
    for digit, toss in zip(reversed(digits), tosses, strict=True):
        tossed = jnp.where(digit, tossed | toss, tossed & toss)
    tossed = tossed & mask
    over = num_set(tossed) - k
    pool = jnp.where(over > 0, tossed, mask & ~tossed)
    size = num_set(pool)
    start = (rng.hashed(rng.stream(key, "start"), 1)[0] % jnp.maximum(size, 1).astype(jnp.uint32)).astype(jnp.int32)
    end = start + jnp.abs(over)
    return tossed ^ ((_first(pool, end) & ~_first(pool, start)) | _first(pool, end - size))


def mask_of(which: jax.Array) -> jax.Array:
    """``bool [d]`` as a mask ``uint32 [words]``."""
    return pack(which, 1)[0]


def chosen(mask: jax.Array, d: int) -> jax.Array:
    """Which of d coordinates a mask ``uint32 [words]`` has, ``bool [d]``."""
    return unpack(mask[None], d) == 1


def num_set(mask: jax.Array) -> jax.Array:
    """How many bits of ``uint32 [words]`` are set, ``int32``: to sum comparisons takes many times as long on a CPU."""
    return jnp.sum(jax.lax.population_count(mask), dtype=jnp.int32)


@jax.jit
def largest(x: jax.Array, k: jax.Array | int) -> jax.Array:
    """The mask ``uint32 [words]`` of the k coordinates of ``float32 [d]`` that are largest in magnitude, exactly k of 1 to d.

    Which of several of the very magnitude that divides them are in is decided by place. NaN is larger than anything.
    """
    sure, tied = divided(x, k)
    return sure | _first(tied, jnp.asarray(k, jnp.int32) - num_set(sure))


@jax.jit
def divided(x: jax.Array, k: jax.Array | int, near: tuple[Any, Any] | None = None) -> tuple[jax.Array, jax.Array]:
    """Masks of fewer than k coordinates of ``float32 [d]`` and of others, with which there are at least k, all smaller.

    Those of the second are of one magnitude, or together with the first they are k: any of them make up the k largest. (NaN
    goes by its bits.)

    No sorting: the magnitude that divides them is sought between bounds, by counting: some ten times, at worst some eighty.
    ``near``: two magnitudes between which it probably is, where one knows; it is found sooner.
    """
    d, k = x.shape[0], jnp.asarray(k, jnp.int32)
    # Read as integers, magnitudes keep their order; and there are no values between two integers.
    size = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)
    wanted = k.astype(jnp.float32)
    if near is None:  # Where it would be if these were Laplace's: only a guess, and counting corrects it.
        typical = jnp.sqrt(tree.squared_norm(x) / d) * jnp.log(d / wanted) / math.sqrt(2)
        near = typical / 1.5, 1.5 * typical
    first = jax.lax.bitcast_convert_type(jnp.stack([jnp.float32(bound) for bound in near[::-1]]), jnp.int32)

    def step(cut: _Cut) -> _Cut:
        # After these two, as if the logarithm of the number above were linear in between, where a bound that stays counts for
        # half as much each time (the Illinois method), so that both come near; and now and then the middle, which must end.
        weight = 0.5 ** jnp.maximum(jnp.abs(cut.held) - 1, 0).astype(jnp.float32)
        over = (cut.above_low - k).astype(jnp.float32) * jnp.where(cut.held > 0, weight, 1.0)
        under = (k - cut.above_high).astype(jnp.float32) * jnp.where(cut.held < 0, weight, 1.0)
        most, least = jnp.log(wanted + over), jnp.log(jnp.maximum(wanted - under, 0.5))
        halve = (cut.step % 5 == 1) | ((cut.step > 10) & (cut.step % 2 == 0))
        share = jnp.where(halve, 0.5, (most - jnp.log(wanted)) / (most - least))
        width = cut.high - cut.low
        between = cut.low + (width.astype(jnp.float32) * share).astype(jnp.int32)
        guess = jnp.where(cut.step < 2, first[jnp.minimum(cut.step, 1)], between)
        # Where many are the same, that divides no more of them: then a value that there is, and if it is the least, the next.
        # Not for ever, for such a value may be the least each time.
        idle = jnp.where(cut.step < 20, cut.idle, 0)
        guess = jax.lax.cond(idle == 1, lambda: _one_between(size, cut), lambda: guess)
        guess = jnp.where(idle == 2, cut.low + 1, guess)
        return _narrowed(size, k, cut, jnp.clip(guess, cut.low + 1, cut.high - 1))

    def unsettled(cut: _Cut) -> jax.Array:
        return (cut.high - cut.low > 1) & (cut.above_low > k)

    everyone = mask_of(jnp.ones(d, bool))
    zero, top = jnp.int32(0), jnp.int32(jnp.iinfo(jnp.int32).max)
    cut = _Cut(zero, top, jnp.int32(d), zero, everyone, jnp.zeros_like(everyone), zero, zero, zero)
    cut = jax.lax.while_loop(unsettled, step, cut)
    return cut.sure, cut.maybe & ~cut.sure


def _one_between(size: jax.Array, cut: _Cut) -> jax.Array:
    """A value of those that are between the bounds: the first's."""
    between = cut.maybe & ~cut.sure
    word = jnp.argmax(between != 0).astype(jnp.int32)
    lowest = between[word] & (~between[word] + jnp.uint32(1))
    bit = 31 - jax.lax.clz(lowest).astype(jnp.int32)
    return size[bit * len(between) + word]


def _narrowed(size: jax.Array, k: jax.Array, cut: _Cut, guess: jax.Array) -> _Cut:
    """The bounds after counting those that are at least ``guess``."""
    mask = mask_of(size >= guess)
    above = num_set(mask)
    idle = jnp.where((above == cut.above_low) | (above == cut.above_high), cut.idle + 1, 0)
    cut = cut._replace(step=cut.step + 1, idle=idle)
    low = cut._replace(low=guess, above_low=above, maybe=mask, held=jnp.minimum(cut.held, 0) - 1)
    high = cut._replace(high=guess, above_high=above, sure=mask, held=jnp.maximum(cut.held, 0) + 1)
    return tree.select(above >= k, low, high)


@functools.partial(jax.jit, static_argnums=1)
def places(mask: jax.Array, k: int) -> jax.Array:
    """Where the bits of ``mask`` are set, of which there are k: ``int32 [k]`` in ``0 .. d-1``."""
    words = mask.shape[0]

    def of_all() -> jax.Array:
        # Those that are not set have one place to go to behind all: not to write them is a branch that no processor foresees.
        to = jnp.where(chosen(mask, 32 * words), _ranks(mask), k)
        return jnp.zeros(k + 1, jnp.int32).at[to].set(jnp.arange(32 * words, dtype=jnp.int32))[:k]

    def of_each() -> jax.Array:
        counts = jax.lax.population_count(mask).astype(jnp.int32)
        until = jnp.cumsum(counts)
        nth = jnp.arange(k, dtype=jnp.int32)
        word = jnp.searchsorted(until, nth, side="right").astype(jnp.int32)
        bit = _length(mask[word], nth - (until - counts)[word] + 1) - 1
        return bit * words + word

    if 2 * k <= words:
        return of_each()
    # All coordinates together are fewer than the steps of so many searches; but a GPU that must repeat bits may write those
    # that are not set one after another.
    return jax.lax.platform_dependent(cpu=of_all, default=of_each)


@jax.jit
def spread(mask: jax.Array, values: jax.Array, vector: jax.Array) -> jax.Array:
    """``vector``, ``[d]``, with the k ``values`` where the k bits of ``mask`` are set, in the order of `places`.

    Each coordinate looks up its value, if it has one: a scatter of the values takes them one by one on a CPU.
    """
    d = vector.shape[0]
    return jnp.where(chosen(mask, d), values.at[_ranks(mask)[:d]].get(mode="clip"), vector)


def _ranks(mask: jax.Array) -> jax.Array:
    """How many bits are set before each, in the order of `places`: ``int32 [32 words]``."""
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    start = jnp.cumsum(counts) - counts

    # A bit of all words at a time: in one expression, XLA works out all sums anew for each coordinate.
    def row(bit: jax.Array) -> jax.Array:
        before = mask & ((jnp.uint32(1) << bit) - jnp.uint32(1))
        return start + jax.lax.population_count(before).astype(jnp.int32)

    return jax.lax.map(row, jnp.arange(32, dtype=jnp.uint32)).reshape(-1)


def _first(mask: jax.Array, count: jax.Array) -> jax.Array:
    """``mask`` with only its first ``count`` bits left."""
    counts = jax.lax.population_count(mask).astype(jnp.int32)
    until = jnp.cumsum(counts)
    # Of one word only a part may be left: the first that is not there as a whole.
    at = jnp.minimum(jnp.sum(until <= count, dtype=jnp.int32), len(mask) - 1)
    wanted = jnp.clip(count - (until - counts)[at], 0, 31)
    part = mask[at] & ((jnp.uint32(1) << _length(mask[at], wanted).astype(jnp.uint32)) - jnp.uint32(1))
    others = jnp.where(until <= count, mask, jnp.uint32(0))
    return jnp.where((jnp.arange(len(mask), dtype=jnp.int32) == at) & (until > count), part, others)


def _length(words: jax.Array, count: jax.Array) -> jax.Array:
    """The least number of low bits of each word of which ``count`` are set, ``int32``; at most 32."""
    low = jnp.zeros_like(count)  # too few, unless none are wanted
    for step in (16, 8, 4, 2, 1):
        inside = words & ((jnp.uint32(1) << (low + step).astype(jnp.uint32)) - jnp.uint32(1))
        low = jnp.where(jax.lax.population_count(inside).astype(jnp.int32) < count, low + step, low)
    return jnp.where(count > 0, low + 1, 0)
