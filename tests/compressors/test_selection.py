"""The k largest, against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.compressors import TopK, _selection
from fedsim.compressors._packing import unpack
from fedsim.compressors._selection import count_of, largest, places, spread

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


@pytest.mark.parametrize("told", [1.0, 0.5, 3.0])  # Who is told a wrong number of lots finds the same, later.
@pytest.mark.parametrize(("number", "k"), [(20_000, 1), (20_000, 2_000), (20_000, 20_000), (700, 300), (700, 2_000), (0, 5)])
def test_the_highest_lots_are_the_largest_and_found_in_fewer_passes(number, k, told, monkeypatch):
    draw, passes, narrowed = np.random.default_rng(0), [], _selection._narrowed
    lots = np.where(draw.permutation(20_000) < number, 1 - draw.random(20_000, np.float32), np.float32(0))
    monkeypatch.setattr(_selection, "_narrowed", lambda *arguments: passes.append(0) or narrowed(*arguments))
    with jax.disable_jit():
        mask = np.asarray(unpack(_selection.highest(jnp.asarray(lots), k, int(told * number))[None], 20_000)) == 1
    assert mask.sum() == k
    np.testing.assert_array_equal(np.sort(lots[mask]), np.sort(lots)[20_000 - k :])
    assert told != 1 or k > number or len(passes) <= 12


@pytest.mark.parametrize("d", [1, 2, 31, 32, 33, 64, 65])
def test_few_coordinates(d):
    x = jnp.asarray(np.random.default_rng(d).permutation(d), jnp.float32) + 1
    for k in {1, min(2, d), (d + 1) // 2, max(d - 1, 1), d}:
        where = places(largest(x, k), k)
        assert sorted(np.asarray(x)[np.asarray(where)].tolist()) == list(range(d - k + 1, d + 1))


MOST_PASSES = {"gaussian": 25, "heavy tails": 25, "mostly zero": 25, "tiny to huge": 25, "counts": 10, "all the same": 5}


@pytest.mark.parametrize("case", MOST_PASSES)
@pytest.mark.parametrize("k", [40, 4000, 40_000])
def test_many_coordinates_take_few_passes(case, k, monkeypatch):
    """A pass reads all of them, so their number is what selecting costs."""
    x = np.concatenate([CASES[case](np.random.default_rng(seed)) for seed in range(20)]).astype(np.float32)
    passes, narrowed = [], _selection._narrowed

    def watched(*arguments):
        passes.append(arguments)
        return narrowed(*arguments)

    monkeypatch.setattr(_selection, "_narrowed", watched)
    with jax.disable_jit():  # a loop of Python's
        mask = unpack(largest(jnp.asarray(x), k)[None], len(x))
    assert int(mask.sum()) == k
    np.testing.assert_array_equal(np.sort(np.abs(x[np.asarray(mask) == 1])), np.sort(np.abs(x))[len(x) - k :])
    assert 0 < len(passes) <= MOST_PASSES[case]


def test_passes_end_where_the_first_of_those_in_question_is_always_the_least(monkeypatch):
    passes, narrowed = [], _selection._narrowed
    monkeypatch.setattr(_selection, "_narrowed", lambda *arguments: passes.append(0) or narrowed(*arguments))
    numbers = (0x3F800000 - 1.5 ** np.arange(44)).astype(np.int32)
    x = np.sort(numbers).view(np.float32)
    with jax.disable_jit():
        mask = unpack(largest(jnp.asarray(x), 1)[None], len(x))
    assert np.flatnonzero(mask).tolist() == [len(x) - 1] and len(passes) <= 60


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
