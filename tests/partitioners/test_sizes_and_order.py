"""Partitions that are IID, with quantity skew, by natural client ids, and by time."""

import itertools

import numpy as np
import pytest
from scipy import stats

from fedsim import partitioners


def sizes(parts):
    return np.array([len(rows) for rows in parts])


def test_iid_sizes_differ_by_at_most_one():
    for examples, clients in ((1000, 7), (7, 7), (1001, 1000)):
        parts = sizes(partitioners.iid(examples, clients=clients, seed=0))
        assert parts.sum() == examples and parts.max() - parts.min() <= 1


def test_iid_does_not_depend_on_the_examples():
    labels = np.repeat(np.arange(10), 100)
    by_labels, by_number = partitioners.iid(labels, clients=5, seed=3), partitioners.iid(1000, clients=5, seed=3)
    np.testing.assert_array_equal(by_labels, by_number)
    tables = [np.bincount(labels[rows], minlength=10) for rows in by_labels]
    assert stats.chi2_contingency(tables).pvalue > 1e-3
    # The negative control: blocks in stored order depend on the labels.
    assert stats.chi2_contingency([np.bincount(labels[i::5][:100], minlength=10) + 1 for i in range(5)]).pvalue > 1e-3
    in_order = [np.bincount(labels[rows], minlength=10) for rows in np.array_split(np.arange(1000), 5)]
    assert stats.chi2_contingency(in_order).pvalue < 1e-6


def test_power_law_sizes_are_in_proportion_to_powers_of_the_rank():
    found = np.sort(sizes(partitioners.quantity_skew(10_000, clients=50, exponent=1.3, seed=0, min_size=0)))[::-1]
    shares = np.arange(1, 51) ** -1.3
    assert np.all(np.abs(found - 10_000 * shares / shares.sum()) < 1)


def test_the_largest_client_is_drawn():
    largest = {int(np.argmax(sizes(partitioners.quantity_skew(999, clients=9, exponent=2.0, seed=s)))) for s in range(20)}
    assert len(largest) > 4


def test_log_normal_sizes_are_log_normal():
    found = sizes(partitioners.quantity_skew(1_000_000, clients=400, sigma=0.8, seed=0, min_size=0))
    logarithms = np.log(found)
    assert stats.kstest(logarithms - logarithms.mean(), stats.norm(0, 0.8).cdf).pvalue > 1e-2
    # The negative controls: another sigma, and another distribution.
    assert stats.kstest(logarithms - logarithms.mean(), stats.norm(0, 1.3).cdf).pvalue < 1e-3
    power = np.log(sizes(partitioners.quantity_skew(1_000_000, clients=400, exponent=1.0, seed=0, min_size=0)))
    assert stats.kstest(power - power.mean(), stats.norm(0, 0.8).cdf).pvalue < 1e-3


@pytest.mark.parametrize("skew", [{"sigma": 5.0}, {"exponent": 6.0}])
@pytest.mark.parametrize("min_size", [1, 7, 20])
def test_no_client_has_fewer_than_min_size(skew, min_size):
    found = sizes(partitioners.quantity_skew(400, clients=20, seed=0, min_size=min_size, **skew))
    assert found.min() == min_size and found.sum() == 400


def test_without_skew_sizes_are_equal():
    for skew in ({"sigma": 0}, {"exponent": 0}):
        assert set(sizes(partitioners.quantity_skew(100, clients=10, seed=0, **skew))) == {10}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "Give either sigma"),
        ({"sigma": 1.0, "exponent": 1.0}, "Give either sigma"),
        ({"sigma": -1.0}, "Expected sigma >= 0 and finite, or None, got sigma=-1.0"),
        ({"exponent": float("nan")}, "Expected exponent >= 0 and finite, or None, got exponent=nan"),
        ({"sigma": 1.0, "min_size": 11}, "100 examples are too few for clients=10 with min_size=11"),
        ({"sigma": 1.0, "min_size": -1}, "got min_size=-1"),
    ],
)
def test_invalid_quantities_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        partitioners.quantity_skew(100, **{"clients": 10, "seed": 0} | change)


def test_by_column_has_one_client_per_value():
    writers = np.array(["w2", "w0", "w2", "w1", "w0"])
    parts = partitioners.by_column(writers)
    assert [rows.tolist() for rows in parts] == [[1, 4], [3], [0, 2]]
    assert [set(writers[rows]) for rows in parts] == [{name} for name in np.unique(writers)]
    with pytest.raises(ValueError, match="column is empty"):
        partitioners.by_column(np.zeros(0, int))


@pytest.mark.parametrize("equal", ["examples", "time"])
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32", "datetime64[s]"])
def test_clients_are_in_order_of_time(equal, dtype):
    times = np.random.default_rng(0).integers(0, 5000, 700).astype(dtype)
    parts = partitioners.temporal(times, clients=9, equal=equal)
    blocks = [times[rows] for rows in parts if len(rows)]
    assert all(earlier.max() <= later.min() for earlier, later in itertools.pairwise(blocks))


def test_blocks_have_equal_durations_or_equal_numbers_of_examples():
    times = np.concatenate([np.arange(100), [250, 399]])
    assert sizes(partitioners.temporal(times, clients=4, equal="time")).tolist() == [100, 0, 1, 1]
    assert sizes(partitioners.temporal(times, clients=4)).tolist() == [26, 26, 25, 25]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint64", "float16"])
def test_times_over_the_whole_range_of_their_type_are_divided_equally(dtype):
    """Differences of such times are too large for the type itself."""
    limits = np.finfo(dtype) if dtype == "float16" else np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    times = np.array([least + (most - least) * i // 37 for i in range(38)], dtype)
    parts = partitioners.temporal(times[::-1], clients=4, equal="time")
    assert [[37 - row for row in sorted(rows)[::-1]] for rows in parts] == [
        list(range(10)), list(range(10, 19)), list(range(19, 28)), list(range(28, 38))
    ]  # fmt: skip


def test_dates_that_are_more_than_292_years_apart_are_divided_equally():
    """Their difference in nanoseconds does not fit in 64 bits with a sign."""
    for unit in ("D", "ns"):
        times = np.array(["2200-01-01", "1700-01-01", "1850-01-01", "2000-01-01"], f"datetime64[{unit}]")
        assert [rows.tolist() for rows in partitioners.temporal(times, clients=2, equal="time")] == [[1, 2], [0, 3]]


def test_equal_timestamps_have_one_client_by_time_and_keep_their_order_by_examples():
    assert sizes(partitioners.temporal(np.full(6, 7), clients=3, equal="time")).tolist() == [6, 0, 0]
    assert [rows.tolist() for rows in partitioners.temporal(np.full(6, 7), clients=3)] == [[0, 1], [2, 3], [4, 5]]
    assert sizes(partitioners.temporal([], clients=2, equal="time")).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("times", "change", "message"),
    [
        ([1.0, np.nan], {}, "Example 1 has no timestamp"),
        (np.array(["2020-01-01", "NaT"], "datetime64[D]"), {}, "Example 1 has no timestamp"),
        (["yesterday", "today"], {}, "one number or datetime64 per example, got <U9"),
        (np.zeros([2, 2]), {}, "one number or datetime64 per example"),
        ([1, 2], {"equal": "days"}, "Expected equal to be 'examples' or 'time', got equal='days'"),
    ],
)
def test_invalid_times_are_refused(times, change, message):
    with pytest.raises(ValueError, match=message):
        partitioners.temporal(times, **{"clients": 2} | change)
