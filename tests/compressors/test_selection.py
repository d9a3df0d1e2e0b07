"""The k largest, against sorting, and k at random, against what chance gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.compressors import TopK, _selection
from fedsim.compressors._packing import unpack
from fedsim.compressors._selection import chosen, count_of, divided, drawn, largest, mask_of, num_set, places, spread

CASES = {
    "gaussian": lambda draw: draw.normal(size=5000),
    "heavy tails": lambda draw: draw.standard_cauchy(5000),
    "tiny to huge": lambda draw: np.sign(draw.normal(size=5000)) * np.exp(draw.uniform(-80, 80, 5000)),
    "mostly zero": lambda draw: draw.normal(size=5000) * (draw.random(5000) < 0.02),
    "two values": lambda draw: draw.choice([1.0, -2.0], 5000),
    "all the same": lambda draw: np.full(5000, -0.25),
    "zeros": lambda draw: np.zeros(5000),
    "subnormal": lambda draw: draw.normal(size=5000) * 1e-41,
    "with infinities": lambda draw: np.where(draw.random(5000) < 0.01, np.inf, draw.normal(size=5000)),
    "counts": lambda draw: draw.poisson(2, 5000).astype(float),
    "one large": lambda draw: np.where(np.arange(5000) == 77, 1e30, 1.0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [1, 50, 2500, 4999, 5000])
def test_exactly_the_k_largest(case, k):
    x = CASES[case](np.random.default_rng(k)).astype(np.float32)
    mask = np.asarray(unpack(largest(jnp.asarray(x), k)[None], 5000)) == 1
    assert mask.sum() == k
    np.testing.assert_array_equal(np.sort(np.abs(x[mask])), np.sort(np.abs(x))[5000 - k :])
    where = np.asarray(places(largest(jnp.asarray(x), k), k))
    assert sorted(where.tolist()) == np.flatnonzero(mask).tolist()


def test_the_largest_where_numbers_are_of_64_bits():
    with jax.enable_x64(True):
        x = jnp.array([3.0, -9.0, 0.0, 5.0], jnp.float32)
        assert unpack(largest(x, 2)[None], 4).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("k", [3, 15, 16, 17, 500, 999])
def test_places_go_word_by_word_and_values_return_to_them(k):
    x = np.random.default_rng(k).permutation(999).astype(np.float32)
    mask = largest(jnp.asarray(x), k)
    words = len(mask)
    where = np.asarray(places(mask, k))
    expected = sorted(np.flatnonzero(x >= 999 - k).tolist(), key=lambda i: (i % words, i // words))
    assert where.tolist() == expected
    np.testing.assert_array_equal(spread(mask, jnp.asarray(x[where]), jnp.zeros(999)), np.where(x >= 999 - k, x, 0))


@pytest.mark.parametrize("k", [17, 500, 999])
def test_places_are_the_same_by_searches_alone_as_off_a_cpu(k, monkeypatch):
    mask = largest(jnp.asarray(np.random.default_rng(k).permutation(999).astype(np.float32)), k)
    expected = places(mask, k)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, cpu, default: default(*given))
    np.testing.assert_array_equal(places.__wrapped__(mask, k), expected)


def some_bits(number, d):
    """A mask of so many of d coordinates, and which they are."""
    which = np.random.default_rng(number).permutation(d) < number
    return mask_of(jnp.asarray(which)), which


@pytest.mark.parametrize(
    ("number", "k"),
    [(20_000, 1), (20_000, 2_000), (20_000, 20_000), (700, 300), (700, 699), (700, 2_000), (1, 1), (0, 5)],
)
def test_so_many_are_drawn_or_all(number, k):
    mask, which = some_bits(number, 20_000)
    draw, seen = jax.jit(lambda key: drawn(mask, k, key)), set()
    for seed in range(20):
        mine = np.asarray(chosen(draw(jax.random.key(seed)), 20_000))
        assert mine.sum() == min(k, number) and not np.any(mine & ~which)
        seen.add(mine.tobytes())
    assert len(seen) == (20 if 0 < k < number else 1)
    np.testing.assert_array_equal(mine, chosen(draw(jax.random.key(19)), 20_000))


def test_a_few_of_many_are_apart():
    """Each by a toss of its own, not one by lot and the others next to it."""
    mask, _ = some_bits(200_000, 200_000)
    draw = jax.jit(lambda key: places(drawn(mask, 6, key), 6) % len(mask))
    words = [np.unique(draw(jax.random.key(seed))) for seed in range(50)]
    assert np.mean([len(each) for each in words]) > 4


@pytest.mark.parametrize(("number", "k"), [(70, 20), (70, 69), (500, 2), (96, 48)])
def test_each_is_as_likely_to_be_drawn(number, k):
    """Of 20,000 draws; their variance is k / number (1 - k / number), and their sum is fixed: a chi-square of number - 1."""
    mask, which = some_bits(number, 600)
    draws = jax.jit(jax.vmap(lambda key: chosen(drawn(mask, k, key), 600)))(jax.random.split(jax.random.key(0), 20_000))
    times, share = np.sum(np.asarray(draws), axis=0)[which], k / number
    far = np.sum((times - 20_000 * share) ** 2) / (20_000 * share * (1 - share)) * (number - 1) / number
    assert abs(far - (number - 1)) < 4 * np.sqrt(2 * (number - 1))


def test_as_many_are_drawn_from_one_half_as_without_replacement():
    """And they vary as such: k / 4 (d - k) / (d - 1). (Not of a half of all words: the last ones are next to each other.)"""
    mask, _ = some_bits(20_000, 20_000)
    draws = jax.jit(jax.vmap(lambda key, half: num_set(drawn(mask, 2_000, key) & half), (0, None)))
    for half in (mask_of(jnp.arange(20_000) < 10_000), mask_of(jnp.arange(20_000) % 2 == 0)):
        of_half = np.asarray(draws(jax.random.split(jax.random.key(1), 2_000), half))
        variance = 2_000 / 4 * 18_000 / 19_999
        assert abs(np.mean(of_half) - 1_000) < 4 * np.sqrt(variance / 2_000)
        assert abs(np.var(of_half) / variance - 1) < 4 * np.sqrt(2 / 2_000)


@pytest.mark.parametrize("near", [(1.0, 2.0), (0.0, 1e-3), (50.0, 51.0), (2.0, 1.0), (np.nan, np.nan), (np.inf, np.inf)])
def test_a_wrong_guess_divides_them_in_the_same_way(near):
    x = np.random.default_rng(0).poisson(2, 5000).astype(np.float32)
    sure, tied = (np.asarray(chosen(mask, 5000)) for mask in divided(jnp.asarray(x), 1000, near))
    at = np.sort(x)[-1000]
    np.testing.assert_array_equal(sure, x > at)
    np.testing.assert_array_equal(tied, x == at)


@pytest.mark.parametrize("d", [1, 2, 31, 32, 33, 64, 65])
def test_few_coordinates(d):
    x = jnp.asarray(np.random.default_rng(d).permutation(d), jnp.float32) + 1
    for k in {1, min(2, d), (d + 1) // 2, max(d - 1, 1), d}:
        where = places(largest(x, k), k)
        assert sorted(np.asarray(x)[np.asarray(where)].tolist()) == list(range(d - k + 1, d + 1))


MOST_PASSES = {"gaussian": 25, "heavy tails": 25, "mostly zero": 25, "tiny to huge": 25, "counts": 10, "all the same": 5}


@pytest.fixture(scope="module")
def counted():
    """The k largest (with a guess, those that are sure), and how many passes that took: each reads all numbers."""
    passes, narrowed, divide = [], _selection._narrowed, _selection.divided.__wrapped__

    def watched(*arguments):
        jax.debug.callback(lambda: passes.append(0))
        return narrowed(*arguments)

    def largest_and_passes(x, k, near=None):
        passes.clear()
        mask = np.asarray(chosen(of(x, k) if near is None else of_divided(x, k, near), len(x)))
        jax.effects_barrier()
        return mask, len(passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_selection, "_narrowed", watched)
        patch.setattr(_selection, "divided", lambda *arguments: divide(*arguments))
        of, of_divided = jax.jit(lambda x, k: largest.__wrapped__(x, k)), jax.jit(lambda *arguments: divide(*arguments)[0])
        yield largest_and_passes


@pytest.mark.parametrize("case", MOST_PASSES)
@pytest.mark.parametrize("k", [40, 4000, 40_000])
def test_many_coordinates_take_few_passes(case, k, counted):
    x = np.concatenate([CASES[case](np.random.default_rng(seed)) for seed in range(20)]).astype(np.float32)
    mask, passes = counted(x, k)
    assert mask.sum() == k
    np.testing.assert_array_equal(np.sort(np.abs(x[mask])), np.sort(np.abs(x))[len(x) - k :])
    assert 0 < passes <= MOST_PASSES[case]


def test_a_right_guess_saves_passes(counted):
    x = np.random.default_rng(0).binomial(1000, 0.1, 100_000).astype(np.float32)
    at = np.sort(x)[-50_000]
    for near, most in [((at, at + 1), 4), ((at - 1, at), 4), (None, 25)]:
        mask, passes = counted(x, 50_000, near)
        assert 0 < passes <= most
        assert near is None or np.array_equal(mask, x > at)


def test_passes_end_where_the_first_of_those_in_question_is_always_the_least(counted):
    numbers = (0x3F800000 - 1.5 ** np.arange(44)).astype(np.int32)
    x = np.sort(numbers).view(np.float32)
    mask, passes = counted(x, 1)
    assert np.flatnonzero(mask).tolist() == [len(x) - 1] and 20 < passes <= 60


@pytest.mark.parametrize(
    ("fraction", "d", "k"), [(0.01, 100, 1), (0.07, 100, 7), (0.29, 100, 29), (1.0, 7, 7), (1e-6, 7, 1), (0.1, 31, 4)]
)
def test_count_is_by_decimals(fraction, d, k):
    """0.29 * 100 is 28.999..., and 0.07 * 100 is 7.000...1 in binary."""
    assert count_of(fraction, d) == k


@pytest.mark.parametrize("layout", ["mask", "places", "shortest"])
def test_layouts_say_the_same(layout):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 30)), jnp.float32)
    sent = TopK(fraction=0.05, layout=layout).transmit(x, jax.random.key(0))
    cut = np.sort(np.abs(np.asarray(x)).reshape(-1))[-60]
    np.testing.assert_array_equal(sent.value, np.where(np.abs(x) >= cut, x, 0))
    assert int(sent.bits) == 60 * 32 + {"mask": 1200, "places": 60 * 11, "shortest": 60 * 11}[layout]
