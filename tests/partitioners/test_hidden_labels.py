"""Hidden labels: how many are kept of every client and class, and what does not change."""

import numpy as np
import pytest

from fedsim import FederatedData
from fedsim.partitioners import hide_labels, only_labelled

SIZES = (100, 0, 7, 393)


def population(dtype=np.int32):
    labels = np.random.default_rng(0).integers(0, 5, sum(SIZES)).astype(dtype)
    return FederatedData.from_arrays({"x": np.arange(sum(SIZES)), "y": labels}, sizes=SIZES)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_labels_are_kept_or_replaced_by_minus_one(dtype):
    data = population(dtype)
    few = hide_labels(data, fraction=0.3, seed=0)
    found, kept = few.columns["y"], few.columns["y"] >= 0
    assert found.dtype == (np.int32 if dtype == np.uint8 else dtype)
    np.testing.assert_array_equal(found[kept], data.columns["y"][kept])
    assert (found[~kept] == -1).all() and few.columns["x"] is data.columns["x"] and data.columns["y"].min() == 0
    assert few.client_ids == data.client_ids and (few.offsets == data.offsets).all()


def test_every_client_keeps_its_fraction():
    for fraction in (0.0, 0.1, 0.25, 1.0):
        counts = np.array(
            [
                [(client["y"] >= 0).sum() for client in hide_labels(population(), fraction=fraction, seed=seed).clients()]
                for seed in range(300)
            ]
        )
        exact = fraction * np.array(SIZES)
        assert (np.abs(counts - exact) < 1).all()
        # Rounded at random, the mean is exact: three standard deviations of the mean of 300 draws.
        assert (np.abs(counts.mean(0) - exact) < 3 * 0.5 / np.sqrt(300) + 1e-9).all()


def test_a_larger_fraction_keeps_the_same_labels_and_more():
    small, large = (hide_labels(population(), fraction=fraction, seed=3).columns["y"] >= 0 for fraction in (0.1, 0.4))
    assert (large | ~small).all() and large.sum() > small.sum()
    assert not np.array_equal(large, hide_labels(population(), fraction=0.4, seed=4).columns["y"] >= 0)


def test_per_class_counts():
    found = hide_labels(population(), per_class=7, seed=0).columns["y"]
    assert np.bincount(found[found >= 0], minlength=5).tolist() == [7] * 5


def test_only_labelled_examples_remain_in_order():
    few = hide_labels(population(), fraction=0.3, seed=0)
    kept = only_labelled(few)
    assert kept.client_ids == few.client_ids and kept.sizes[1] == 0
    for before, after in zip(few.clients(), kept.clients(), strict=True):
        np.testing.assert_array_equal(after["x"], before["x"][before["y"] >= 0])
        np.testing.assert_array_equal(after["y"], before["y"][before["y"] >= 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Expected fraction or per_class, got fraction=None and per_class=None"),
        ({"fraction": 0.1, "per_class": 1}, "got fraction=0.1 and per_class=1"),
        ({"fraction": 1.5}, "Expected 0 <= fraction <= 1"),
        ({"per_class": 0}, "Expected per_class >= 1"),
        ({"per_class": 400}, "Expected at least per_class=400 labels of each class, got"),
        ({"fraction": 0.1, "feature": "z"}, "no feature 'z'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hide_labels(population(), seed=0, **options)


def test_a_fraction_that_keeps_no_label_is_said():
    data = FederatedData.from_arrays({"y": np.zeros(6, np.int32)}, sizes=[4, 2])
    with pytest.warns(UserWarning, match="All labels are hidden: fraction=1e-09"):
        assert (hide_labels(data, fraction=1e-9, seed=0).columns["y"] == -1).all()
    hide_labels(data, fraction=0.0, seed=0)
