"""Intervals, tests and numbers of seeds agree with SciPy, with simulations and with what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from recorded_runs import groups, recorded

from fedsim.comparison import Interval, compare, holm, interval, paired_test, power_of, seeds_needed


def test_the_interval_is_that_of_scipy():
    values = np.random.default_rng(0).normal(0.8, 0.02, 7).tolist()
    of = interval(values, 0.9)
    low, high = scipy.stats.t.interval(0.9, 6, loc=np.mean(values), scale=scipy.stats.sem(values))
    np.testing.assert_allclose([of.mean - of.half_width, of.mean + of.half_width], [low, high], rtol=1e-12)
    assert of.count == 7 and math.isclose(of.deviation, np.std(values, ddof=1))


@pytest.mark.parametrize("values", [[], [0.5], [0.5, math.nan], [0.5, math.inf]])
def test_there_is_no_interval_of_one_value_or_of_one_that_is_not_finite(values):
    of = interval(values)
    assert of.half_width is None and of.deviation is None and math.isnan(of.mean) == (len(values) != 1)


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (2e-5, 3e-6, "2e-05 ± 3e-06"),
        (0.95, 4e-4, "0.9500 ± 0.0004"),
        (0.0, 2e-5, "0.0000 ± 2e-05"),
        (2e-5, 0.01, "0.0000 ± 0.0100"),
    ],
)
def test_small_numbers_are_shown_by_their_digits_unless_a_larger_one_is_beside_them(mean, half_width, text):
    assert str(Interval(mean, half_width, None, 2)) == text


def test_the_paired_test_is_that_of_scipy_over_the_common_seeds():
    draw = np.random.default_rng(1)
    first, second = draw.normal(0.8, 0.02, 6), draw.normal(0.79, 0.02, 6)
    test = paired_test({**dict(enumerate(first)), "x": 9.0}, {"y": -9.0, **dict(enumerate(second))})
    expected = scipy.stats.ttest_rel(first, second)
    low, high = expected.confidence_interval(0.95)
    assert math.isclose(test.p, expected.pvalue) and test.difference.count == 6
    np.testing.assert_allclose(test.difference.mean + np.array([-1, 1]) * test.difference.half_width, [low, high])


@pytest.mark.parametrize(
    ("first", "second"),
    [({0: 0.5}, {0: 0.4}), ({0: 0.5}, {1: 0.4}), ({0: 0.3, 1: 0.4}, {0: 0.2, 1: 0.3}), ({0: 1.0, 1: 1.0},) * 2],
)
def test_there_is_no_test_without_two_seeds_or_without_a_spread(first, second):
    """0.3 - 0.2 and 0.4 - 0.3 differ by rounding alone, which is no spread."""
    assert paired_test(first, second).p is None


def test_differences_that_are_equal_up_to_the_rounding_of_float32_have_no_spread():
    second = np.float32([0.3, 0.42, 0.59, 0.81, 0.17])
    first = np.float32(second.astype(float) + 0.1)
    assert len(set(first.astype(float) - second.astype(float))) > 1
    assert paired_test(dict(enumerate(first)), dict(enumerate(second))).p is None
    first[0] += 1e-5  # more than rounding
    assert paired_test(dict(enumerate(first)), dict(enumerate(second))).p < 1e-6


def test_holm_agrees_with_its_definition():
    for seed in range(20):
        p = np.random.default_rng(seed).uniform(0, 0.2, 6)
        order = np.argsort(p)
        expected = np.empty(6)
        expected[order] = np.minimum(1, np.maximum.accumulate(np.arange(6, 0, -1) * p[order]))
        np.testing.assert_allclose(holm(p.tolist()), expected)
    assert holm([]) == []


@pytest.mark.parametrize(("seeds", "effect"), [(2, 0.5), (5, 1.0), (12, 0.8), (60, 0.4), (10, 6.0), (2000, 2.0)])
def test_power_is_the_integral_over_the_standard_deviation(seeds, effect):
    """Given the sample's standard deviation, the mean is normal: the power is a mean over chi-squared quantiles."""
    freedom = seeds - 1
    scale = np.sqrt(scipy.stats.chi2.ppf((np.arange(100_000) + 0.5) / 100_000, freedom) / freedom)
    critical, shift = scipy.stats.t.ppf(0.975, freedom) * scale, math.sqrt(seeds) * effect
    expected = np.mean(scipy.stats.norm.sf(critical - shift) + scipy.stats.norm.cdf(-critical - shift))
    assert power_of(seeds, -effect * 0.01, 0.01) == pytest.approx(expected, abs=1e-5)


def test_the_number_of_seeds_is_the_smallest_with_the_power():
    """Tables of the paired t test have 15 for an effect of 0.8 and 199 for 0.2 (two-sided, 5 %, power 0.8)."""
    assert [seeds_needed(effect, 1.0) for effect in (0.8, 0.2)] == [15, 199]
    for effect in (0.1, 0.7, 3.0, 50.0):
        number = seeds_needed(effect, 1.0, level=0.01, power=0.9)
        assert power_of(number, effect, 1.0, 0.01) >= 0.9 and (number == 2 or power_of(number - 1, effect, 1.0, 0.01) < 0.9)
    assert seeds_needed(0.001, 1.0) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval([1.0], confidence=95), "Expected confidence between 0 and 1, got confidence=95"),
        (lambda: power_of(1, 0.1, 0.1), "Expected seeds >= 2, got seeds=1"),
        (lambda: power_of(5, 0.1, 0.0), "Expected deviation > 0, got deviation=0.0"),
        (lambda: seeds_needed(0.1, 0.1, power=0), "Expected power between 0 and 1, got power=0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def differences(draws, seeds, gain, noise=0.01):
    """Returns how many of some comparisons say that an algorithm is better, as the terminal would, and which."""
    found = []
    for number in range(draws):
        draw = np.random.default_rng([number, seeds])
        shared = draw.normal(0.8, 0.03, seeds)  # the partition that both algorithms have with a seed
        first, second = (shared + draw.normal(0, noise / math.sqrt(2), seeds) for _ in range(2))
        (test,) = compare(groups(first, second + gain)).tests
        found.append(test.better)
    return found


def test_an_algorithm_is_seldom_better_than_itself():
    """200 comparisons: 5 % are 10, of which a binomial count exceeds 16 with a probability of 2 %."""
    for seeds in (3, 5, 10):
        assert sum(better is not None for better in differences(200, seeds, gain=0.0)) <= 16


def test_an_algorithm_is_seldom_better_than_itself_with_the_best_of_several_settings():
    """The best of four settings is taken on test data, for both."""
    count = 0
    for number in range(200):
        values = np.random.default_rng([number, 7]).normal(0.8, 0.01, (2, 4, 5))
        runs = [
            recorded(float(values[i, j, seed]), seed=seed, algorithm=name, rate=10.0**-j)
            for i, name in enumerate(("fedavg", "fedprox"))
            for j in range(4)
            for seed in range(5)
        ]
        (test,) = compare(runs).tests
        count += test.better is not None
    assert count <= 16


def test_a_gain_of_one_point_is_found_with_the_promised_power():
    """200 comparisons with as many seeds as the pilot says: a power of 0.8 has at least 145 of 200 with 99 %."""
    seeds = seeds_needed(0.01, 0.01)
    found = differences(200, seeds, gain=0.01)
    assert found.count("fedprox") >= 145 and "fedavg" not in found
    few = differences(200, 4, gain=0.01)
    assert few.count("fedprox") / 200 == pytest.approx(power_of(4, 0.01, 0.01), abs=0.1)


def test_the_promise_holds_after_the_correction_for_several_tests():
    """The numbers of seeds are for the level 5 % / 3, so that each of three tests has its power in every case."""
    draw = np.random.default_rng(3)
    values = draw.normal(0.8, 0.01, (3, 5))
    runs = [
        recorded(float(values[i, seed]), seed=seed, algorithm=name)
        for i, name in enumerate(("fedavg", "fedprox", "scaffold"))
        for seed in range(5)
    ]
    for test in compare(runs, difference=0.01).tests:
        assert test.seeds_needed == seeds_needed(0.01, test.paired.difference.deviation, 0.05 / 3)
