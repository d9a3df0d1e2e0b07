"""Histograms, quantiles and heavy hitters over clients agree with NumPy on all data, within their documented bounds."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import algorithms
from fedsim.experiment.driving import evaluation_line

SIZES = (700, 0, 1, 299, 1500)


def population(values=None):
    draw = np.random.default_rng(0)
    x = draw.gamma(2.0, 2.0, (sum(SIZES), 2)).astype(np.float32) if values is None else values
    items = np.minimum(draw.zipf(1.3, sum(SIZES)), 200_000).astype(np.int32)
    return fedsim.FederatedData.from_arrays({"x": x, "item": items}, sizes=SIZES)


def settings(**options):
    return {"batches": fedsim.Batches(size=64)} | options


def iterate(algorithm, data, rounds, key=0):
    state = algorithm.init(jax.random.key(key))
    return algorithm.apply_rounds(state, [federation.cohort(data, round=r) for r in range(rounds)])[0]


def test_histogram_equals_numpy():
    data = population()
    histogram = algorithms.Histogram(low=0.5, high=9.5, bins=13, **settings())
    values = data.columns["x"].ravel()
    values[:3] = 0.5, 9.5, np.float32(histogram.edges[4])
    below, above = np.sum(values < 0.5), np.sum(values > 9.5)
    inside = np.histogram(values, histogram.edges)[0]
    state = iterate(histogram, data, 1)
    assert below > 0 and above > 0
    assert state.counts.tolist() == [below, *inside.tolist(), above]
    assert iterate(histogram, data, 3).counts.tolist() == (3 * np.asarray(state.counts)).tolist()
    assert histogram.evaluate(state, data) == {"total_variation": 0.0}
    other = population(np.full((sum(SIZES), 2), 0.6, np.float32))
    expected = 1 - inside[0] / len(values)
    np.testing.assert_allclose(histogram.evaluate(state, other)["total_variation"], expected)


def test_an_epoch_of_a_shuffled_sampler_counts_each_client_once():
    data = population()
    histogram = algorithms.Histogram(high=10.0, **settings())
    state = histogram.init(jax.random.key(0))
    for cohort in fedsim.samplers.ShuffledSampler(data, clients=1, seed=4).rounds(5):
        state, _ = histogram.apply(state, cohort)
    np.testing.assert_array_equal(state.counts, iterate(histogram, data, 1).counts)


def test_integers_and_repeated_epochs_count_each_example_once():
    data = population(np.random.default_rng(1).integers(0, 256, (sum(SIZES), 4)).astype(np.uint8))
    once = iterate(algorithms.Histogram(high=255.0, bins=8), data, 1)
    twice = iterate(algorithms.Histogram(high=255.0, bins=8, batches=fedsim.Batches(size=33, epochs=2)), data, 1)
    assert int(once.counts.sum()) == 4 * sum(SIZES)
    np.testing.assert_array_equal(once.counts, twice.counts)


FRACTIONS = (0.001, 0.25, 0.5, 0.9, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("bins", [2, 7, 64])
def test_quantile_intervals_shrink_at_the_documented_rate_until_exact(bins):
    data = population()
    exact = np.quantile(data.columns["x"].ravel(), FRACTIONS, method="inverted_cdf")
    quantiles = algorithms.Quantiles(fractions=FRACTIONS, low=-1.0, high=50.0, bins=bins, **settings())
    for rounds in (1, 2, 4):
        state = iterate(quantiles, data, rounds)
        low, high = np.asarray(state.low), np.asarray(state.high)
        assert np.all(low < exact) and np.all(exact <= high)
        assert np.all(high - low <= 51 / bins**rounds * (1 + 1e-5) + np.spacing(high))
    state = iterate(quantiles, data, {2: 40, 7: 18, 64: 8}[bins])
    np.testing.assert_array_equal(state.high, exact)
    assert quantiles.evaluate(state, data)["rank_error"] == 0
    assert quantiles.evaluate(iterate(quantiles, data, 1), data)["rank_error"] > 0


def test_quantiles_outside_the_range_and_with_ties():
    data = population(np.round(population().columns["x"]))
    values = data.columns["x"].ravel()
    quantiles = algorithms.Quantiles(fractions=(0.01, 0.5, 0.99), low=2.0, high=6.0, **settings())
    exact = np.quantile(values, (0.01, 0.5, 0.99), method="inverted_cdf")
    assert exact[0] < 2 < exact[1] < 6 < exact[2]
    state = iterate(quantiles, data, 8)
    np.testing.assert_array_equal(state.high, [2.0, exact[1], 6.0])


def frequencies(data, num_items):
    return np.bincount(data.columns["item"], minlength=num_items)


@pytest.mark.slow
@pytest.mark.parametrize("sketch", ["count-min", "count-sketch"])
def test_estimates_are_within_the_stated_bounds(sketch):
    data, num_items, width, depth = population(), 200_001, 256, 3
    counts = frequencies(data, num_items)
    hitters = algorithms.HeavyHitters(
        num_items=num_items, sketch=sketch, width=width, depth=depth, feature="item", **settings()
    )
    total, norm = counts.sum(), np.sqrt(np.sum(np.square(counts, dtype=np.float64)))
    off = []
    for key in range(10):
        state = iterate(hitters, data, 1, key=key)
        off.append(np.asarray(hitters.estimate(state, np.arange(num_items))) - counts)
    off = np.stack(off)
    if sketch == "count-min":
        assert off.min() >= 0
        assert np.mean(off > np.e * total / width) <= np.exp(-depth)
        assert off.max() > 0  # the sketch is not an exact count
    else:
        assert np.mean(np.abs(off) > 2 * norm / np.sqrt(width)) <= np.exp(-depth / 8)
        # The estimate is unbiased over keys and over all items that did not occur, whose true count is 0.
        assert abs(off[:, counts == 0].mean()) < 0.1
        assert off.min() < 0 < off.max()


@pytest.mark.slow
@pytest.mark.parametrize("sketch", ["count-min", "count-sketch"])
def test_heavy_hitters_are_found(sketch):
    data = population()
    counts = frequencies(data, 200_001)
    hitters = algorithms.HeavyHitters(num_items=200_001, sketch=sketch, width=4096, feature="item", **settings())
    state = iterate(hitters, data, 2)
    items, estimates = hitters.heaviest(state, 4)
    assert items.tolist() == np.argsort(-counts, kind="stable")[:4].tolist()
    np.testing.assert_allclose(estimates, 2 * counts[np.asarray(items)], rtol=0.02)
    assert hitters.evaluate(state, data)["recall"] >= 0.9
    blank = hitters.init(jax.random.key(0))
    assert hitters.evaluate(blank, data)["recall"] < 0.9


def test_hash_functions_are_strongly_universal():
    """Over keys, two items share a counter with probability 1 / width, and their signs are independent of this.

    This also holds for neighbouring items and for items that differ only in the upper half of their bits.
    """
    width, depth = 8, 40_000
    hitters = algorithms.HeavyHitters(num_items=1 << 30, sketch="count-sketch", width=width, depth=depth + 1)
    words = hitters.init(jax.random.key(3)).words
    for pair in ([0, 1], [5, 5 + (1 << 16)], [12345, 1 << 29]):
        counter, sign = map(np.asarray, hitters._sketch().counters(words, np.array(pair, np.int32)))
        both = np.histogram2d(*counter.T, bins=width)[0] / len(counter)
        assert np.abs(both - 1 / width**2).max() < 5 * np.sqrt(1 / width**2 / depth)
        same = counter[:, 0] == counter[:, 1]
        assert abs(np.mean(sign[:, 0] * sign[:, 1])) < 5 / np.sqrt(depth)
        assert abs(np.mean(sign[same, 0] * sign[same, 1])) < 5 / np.sqrt(same.sum())


def test_values_that_are_not_items_are_not_counted():
    data = fedsim.FederatedData.from_arrays({"y": np.array([-1, 0, 0, 3, 4, 99])}, sizes=[3, 3])
    hitters = algorithms.HeavyHitters(num_items=4)
    state = iterate(hitters, data, 1)
    assert state.counts.sum(axis=1).tolist() == [3] * 5
    assert hitters.estimate(state, np.arange(4)).tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("Histogram", {"low": 2.0}, "Expected high > 2.0 and finite, got high=1.0: low=2.0 is to be below"),
        ("Histogram", {"bins": 0}, "Expected bins >= 1, got bins=0"),
        ("Quantiles", {"bins": 1}, "Expected bins >= 2, got bins=1"),
        ("Quantiles", {"fractions": (0.0,)}, "Expected 0 < fractions <= 1, got fractions=0.0"),
        ("Quantiles", {"high": float("inf")}, "high > 0.0 and finite"),
        ("HeavyHitters", {"num_items": 0}, "Expected num_items >= 1, got num_items=0"),
        ("HeavyHitters", {"width": 1000}, "a power of 2 from 2 to 131,072, got width=1000"),
        ("HeavyHitters", {"width": 2**18}, "2 <= width <= 131072, .* give a power of 2"),
        ("HeavyHitters", {"sketch": "bloom"}, "got sketch='bloom'"),
        ("HeavyHitters", {"sketch": "count-sketch", "depth": 4}, "Expected an odd depth, .* got depth=4"),
    ],
)
def test_invalid_analytics_settings_are_rejected(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        getattr(algorithms, name)(**({"num_items": 9} if name == "HeavyHitters" else {}) | wrong)


@pytest.mark.first(1)
@pytest.mark.parametrize("wrong", [2**32 + 7, -(2**31) - 1])
def test_integers_that_a_device_would_wrap_are_refused(wrong):
    """As a 32-bit integer, 2**32 + 7 would be counted as 7."""
    values = np.array([7, 7, 2**31 - 1, -(2**31)])
    for algorithm in (algorithms.HeavyHitters(num_items=9), algorithms.Histogram(feature="y", high=9.0)):
        kept = fedsim.FederatedData.from_arrays({"y": values}, sizes=[3, 1])
        assert int(iterate(algorithm, kept, 1).counts.sum()) == (10 if isinstance(algorithm, algorithms.HeavyHitters) else 4)
        data = fedsim.FederatedData.from_arrays({"y": np.append(values, wrong)}, sizes=[3, 2])
        with pytest.raises(ValueError, match=f"'y' of int64 contains {wrong}, which does not fit into int32"):
            iterate(algorithm, data, 1)


@pytest.mark.parametrize("name", ["Histogram", "Quantiles"])
def test_whole_numbers_that_float32_rounds_are_refused(name):
    """16,777,217 would be counted as 16,777,216."""
    data = fedsim.FederatedData.from_arrays({"x": np.array([2**24 - 1, 2**24, 2**24 + 1], np.int32)}, sizes=[2, 1])
    make = functools.partial(getattr(algorithms, name), low=2.0**24 - 2)
    with pytest.raises(ValueError, match=f"{name} reads 'x' as float32, .* got 16777215 to 16777217: subtract a constant"):
        iterate(make(high=2.0**24 + 2, bins=2), data, 1)
    below = fedsim.FederatedData.from_arrays({"x": data.columns["x"] - 1}, sizes=[2, 1])
    state = iterate(make(high=2.0**24, bins=2), below, 1)
    if name == "Histogram":
        assert state.counts.tolist() == [0, 1, 2, 0]
    with pytest.raises(ValueError, match=f"{name} needs edges that differ in float32, got . from 16777216.0 to 16777216.0"):
        iterate(getattr(algorithms, name)(low=2.0**24, high=2.0**24 + 1, bins=2), population(), 1)


def test_heavy_hitters_are_all_items_if_there_are_fewer_than_requested():
    data = fedsim.FederatedData.from_arrays({"y": np.array([4, 4, 4, 1, 1, 0])}, sizes=[3, 3])
    hitters = algorithms.HeavyHitters(num_items=5)
    items, estimates = hitters.heaviest(iterate(hitters, data, 1), 10)
    assert items[:3].tolist() == [4, 1, 0] and sorted(items.tolist()) == [0, 1, 2, 3, 4]
    assert estimates.tolist() == [3, 2, 1, 0, 0]
    with pytest.raises(ValueError, match="Expected count >= 1, got count=0"):
        hitters.heaviest(hitters.init(jax.random.key(0)), 0)


def test_heavy_hitters_reject_data_that_cannot_be_counted():
    hitters = algorithms.HeavyHitters(num_items=9, feature="x")
    with pytest.raises(ValueError, match="Expected a feature of integers, got 'x' of float32"):
        iterate(hitters, population(), 1)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Weight(algorithms.Statistics):
    """The sum of a feature."""

    def init(self, key):
        return jnp.float32(0)

    def zero_statistics(self, shared):
        return jnp.float32(0)

    def statistics(self, shared, batch):
        return jnp.sum(batch.examples["x"], where=batch.mask)

    def server_update(self, state, update, info):
        return update


def test_sums_over_a_client_s_batches_do_not_lose_precision():
    """Added one after another in float32, 200,000 times 0.1 are 20,006; after 2**24, further ones change nothing."""
    data = fedsim.FederatedData.from_arrays({"x": np.full(200_000, 0.1, np.float32)}, sizes=[200_000])
    counted = np.concatenate([[2.0**24], np.ones(1000)]).astype(np.float32)[:, None]
    for x, expected in ((data.columns["x"], 200_000 * float(np.float32(0.1))), (counted[:, 0], 2.0**24 + 1000)):
        data = fedsim.FederatedData.from_arrays({"x": x}, sizes=[len(x)])
        algorithm = Weight(batches=fedsim.Batches(size=1, shuffle=False))
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0"]))
        np.testing.assert_allclose(state, expected, rtol=1e-7)
    points = fedsim.FederatedData.from_arrays({"x": counted}, sizes=[len(counted)])
    means = algorithms.KMeans(num_features=1, num_clusters=1, start=[[0.0]], batches=fedsim.Batches(size=1, shuffle=False))
    state, _ = means.apply(means.init(jax.random.key(0)), fedsim.Cohort.of(points, ["0"]))
    np.testing.assert_allclose(state.means[0, 0], counted.astype(np.float64).mean(), rtol=1e-7)


@pytest.mark.slow
def test_what_analytics_report_says_which_values_are_better_and_is_nan_without_examples():
    data = fedsim.FederatedData.from_arrays({"x": np.arange(4, dtype=np.int32)[:, None]}, sizes=[3, 1])
    none = fedsim.FederatedData.from_arrays({"x": np.zeros((0, 1), np.int32)}, sizes=[0])
    made = {
        "total_variation": (algorithms.Histogram(), "lower"),
        "rank_error": (algorithms.Quantiles(fractions=(0.5,)), "lower"),
        "recall": (algorithms.HeavyHitters(feature="x", num_items=9), "higher"),
        "cost": (algorithms.KMeans(num_features=1, num_clusters=2), "lower"),
        "error": (algorithms.PCA(num_features=1, num_components=1), "lower"),
        "log_likelihood": (algorithms.GaussianMixture(num_features=1, num_clusters=2), "higher"),
    }
    for name, (algorithm, better) in made.items():
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
        assert evaluation_line(algorithm.evaluate(state, data), 1)["better"] == {f"test_{name}": better}
        assert evaluation_line(algorithm.evaluate(state, none), 1)[f"test_{name}"] is None, name
