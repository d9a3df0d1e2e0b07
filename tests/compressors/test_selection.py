"""The k largest coordinates are compared with sorting, and k random coordinates with their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.compressors import TopK
from fedsim.compressors._selection import count_of, draw_from, indices_of, largest

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
LARGEST = jax.jit(largest)


@pytest.mark.first(62)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [0, 1, 50, 2500, 4999, 5000])
def test_exactly_the_k_largest(case, k):
    x = CASES[case](np.random.default_rng(k)).astype(np.float32)
    mask = np.asarray(LARGEST(x, k))
    assert mask.dtype == bool
    assert mask.sum() == k
    np.testing.assert_array_equal(np.sort(np.abs(x[mask])), np.sort(np.abs(x))[5000 - k :])
    np.testing.assert_array_equal(indices_of(mask, k), np.flatnonzero(mask))


def test_of_equal_magnitudes_the_first_are_selected():
    x = np.random.default_rng(0).poisson(2, 5000).astype(np.float32)
    for k in (1, 700, 3000):
        np.testing.assert_array_equal(np.flatnonzero(LARGEST(x, k)), np.sort(np.argsort(-x, kind="stable")[:k]))


def test_with_a_key_equal_magnitudes_are_selected_at_random():
    x = np.random.default_rng(0).poisson(2, 400).astype(np.float32)
    at = np.sort(x)[-100]
    masks = np.asarray(jax.jit(jax.vmap(lambda key: largest(x, 100, key)))(jax.random.split(jax.random.key(0), 1000)))
    assert (masks.sum(1) == 100).all()
    assert masks[:, x > at].all() and not masks[:, x < at].any()
    share = (100 - np.sum(x > at)) / np.sum(x == at)
    assert 0.1 < share < 0.9
    assert np.abs(masks[:, x == at].mean(0) - share).max() < 5 * np.sqrt(share * (1 - share) / 1000)


def test_nan_is_the_largest():
    x = jnp.array([3.0, -jnp.inf, jnp.nan, 1.0])
    assert [np.flatnonzero(largest(x, k)).tolist() for k in range(4)] == [[], [2], [1, 2], [0, 1, 2]]


def test_the_largest_with_64_bit_numbers():
    with jax.enable_x64(True):
        x = jnp.array([3.0, -9.0, 0.0, 5.0], jnp.float32)
        assert largest(x, 2).tolist() == [False, True, False, True]
        assert indices_of(largest(x, 2), 2).dtype == jnp.int32


@pytest.mark.first(3)
@pytest.mark.parametrize("d", [1, 2, 31, 32, 33, 64, 65])
def test_few_coordinates(d):
    x = np.random.default_rng(d).permutation(d).astype(np.float32) + 1
    for k in {1, min(2, d), (d + 1) // 2, max(d - 1, 1), d}:
        where = indices_of(LARGEST(x, k), k)
        assert sorted(x[np.asarray(where)].tolist()) == list(range(d - k + 1, d + 1))


def some_of(number, d):
    """Returns a mask of ``number`` of d coordinates."""
    return np.random.default_rng(number).permutation(d) < number


@pytest.mark.parametrize(
    ("number", "k"),
    [(20_000, 1), (20_000, 2_000), (20_000, 20_000), (700, 300), (700, 699), (700, 2_000), (1, 1), (0, 5), (700, 0)],
)
def test_k_coordinates_are_drawn_or_all_if_there_are_fewer(number, k):
    among = some_of(number, 20_000)
    draw, seen = jax.jit(lambda key: draw_from(among, k, key)), set()
    for seed in range(20):
        mine = np.asarray(draw(jax.random.key(seed)))
        assert mine.sum() == min(k, number) and not np.any(mine & ~among)
        seen.add(mine.tobytes())
    assert len(seen) == (20 if 0 < k < number else 1)
    np.testing.assert_array_equal(mine, draw(jax.random.key(19)))


@pytest.mark.slow
def test_few_of_many_coordinates_are_drawn_separately():
    """Coordinates are not drawn in blocks: two of six out of 200,000 are rarely in the same thousand."""
    draw = jax.jit(lambda key: indices_of(draw_from(jnp.ones(200_000, bool), 6, key), 6) // 1000)
    thousands = [np.unique(draw(jax.random.key(seed))) for seed in range(50)]
    assert np.mean([len(each) for each in thousands]) > 5.5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "k"), [(70, 20), (70, 69), (500, 2), (96, 48)])
def test_every_coordinate_is_equally_likely_to_be_drawn(number, k):
    """The counts of 20,000 draws are compared with k / number by a chi-square statistic with number - 1 degrees of freedom.

    The variance of a coordinate is k / number (1 - k / number), and the sum over coordinates is fixed.
    """
    among = some_of(number, 600)
    draws = jax.jit(jax.vmap(lambda key: draw_from(among, k, key)))(jax.random.split(jax.random.key(0), 20_000))
    times, share = np.sum(np.asarray(draws), axis=0)[among], k / number
    far = np.sum((times - 20_000 * share) ** 2) / (20_000 * share * (1 - share)) * (number - 1) / number
    assert abs(far - (number - 1)) < 4 * np.sqrt(2 * (number - 1))


@pytest.mark.slow
def test_the_number_drawn_from_one_half_is_hypergeometric():
    """It has the mean k / 2 and the variance k / 4 (d - k) / (d - 1)."""
    halves = np.arange(5_000) < 2_500, np.arange(5_000) % 2 == 0

    def of_halves(key):
        mine = draw_from(jnp.ones(5_000, bool), 500, key)
        return [jnp.sum(mine & half) for half in halves]

    variance = 500 / 4 * 4_500 / 4_999
    for of_half in jax.jit(lambda keys: jax.lax.map(of_halves, keys))(jax.random.split(jax.random.key(1), 2_000)):
        assert abs(np.mean(of_half) - 250) < 4 * np.sqrt(variance / 2_000)
        assert abs(np.var(of_half) / variance - 1) < 4 * np.sqrt(2 / 2_000)


@pytest.mark.parametrize(
    ("fraction", "d", "k"), [(0.01, 100, 1), (0.07, 100, 7), (0.29, 100, 29), (1.0, 7, 7), (1e-6, 7, 1), (0.1, 31, 4)]
)
def test_count_is_computed_from_the_decimal_fraction(fraction, d, k):
    """0.29 * 100 is 28.999..., and 0.07 * 100 is 7.000...1 in binary."""
    assert count_of(fraction, d) == k


@pytest.mark.first(2)
@pytest.mark.parametrize("layout", ["mask", "places", "shortest"])
def test_layouts_decode_to_the_same(layout):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 30)), jnp.float32)
    sent = TopK(fraction=0.05, layout=layout).transmit(x, jax.random.key(0))
    cut = np.sort(np.abs(np.asarray(x)).reshape(-1))[-60]
    np.testing.assert_array_equal(sent.value, np.where(np.abs(x) >= cut, x, 0))
    assert int(sent.bits) == 60 * 32 + {"mask": 1200, "places": 60 * 11, "shortest": 60 * 11}[layout]
