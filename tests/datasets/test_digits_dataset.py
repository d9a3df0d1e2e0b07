"""Tests of the dataset `digits`, which is embedded in scikit-learn."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedsim
from fedsim import datasets, heterogeneity


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def test_contract(digits):
    for split in (digits.train, digits.test):
        assert split.num_clients == 100
        assert split.columns["x"].dtype == np.uint8
        assert split.columns["x"].shape[1:] == (8, 8, 1)
        assert split.columns["y"].dtype == np.int32
        assert split.columns["y"].shape[1:] == ()
        assert split.columns["x"].max() == 16
    model = fedsim.models.get(digits.description.default_model)
    model.check(digits.train)
    model.check(digits.test)


def test_every_image_is_in_exactly_one_place_with_its_label(digits):
    images, target = load_digits(return_X_y=True)
    x = np.concatenate([digits.train.columns["x"], digits.test.columns["x"]]).reshape(-1, 64)
    y = np.concatenate([digits.train.columns["y"], digits.test.columns["y"]])
    loaded, source = np.column_stack([x, y]), np.column_stack([images.astype(int), target])
    np.testing.assert_array_equal(loaded[np.lexsort(loaded.T)], source[np.lexsort(source.T)])


def test_each_client_tests_on_a_fifth_of_its_own_images(digits):
    assert digits.train.client_ids == digits.test.client_ids
    assert digits.train.sizes.min() >= 1
    both = digits.train.sizes + digits.test.sizes
    assert both.sum() == 1797
    np.testing.assert_array_equal(digits.test.sizes, (both + 2) // 5)


def test_labels_are_skewed_and_similar_in_train_and_test(digits):
    def counts(split):
        return np.array([np.bincount(client["y"], minlength=10) for client in split.clients()])

    train, test = counts(digits.train), counts(digits.test)
    # With so few images, the most frequent of ten labels would have a share of about a quarter if all clients had the same
    # label distribution.
    assert np.mean(train.max(1) / train.sum(1)) > 0.42
    mine = (train * test).sum(1) / (train.sum(1) * np.maximum(test.sum(1), 1))
    anyones = (train.sum(0) * test).sum(1) / (train.sum() * np.maximum(test.sum(1), 1))
    assert mine[test.sum(1) > 0].mean() > 2 * anyones[test.sum(1) > 0].mean()


def test_clients_are_tested_on_the_labels_they_train_on(digits):
    """The distance is 1.06 for the random split of version 0.1, and 0.65 here because small clients have rounded counts."""
    assert heterogeneity.split_distance(digits.train, digits.test) < 0.66
    for name, bound in {"digits(clients=20)": 0.16, "digits(clients=50, alpha=0.1, test_fraction=0.3)": 0.29}.items():
        splits = datasets.load(name)
        assert heterogeneity.split_distance(splits.train, splits.test) < bound


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "classes_per_client", "dirichlet_balanced"])
def test_other_partitions_and_fractions(partition):
    splits = datasets.load("digits", partition=partition, clients=10, test_fraction=0.3, seed=3)
    both = splits.train.sizes + splits.test.sizes
    assert both.sum() == 1797 and splits.train.num_clients == 10
    assert np.all(np.abs(splits.test.sizes - 0.3 * both) <= 0.5 + 1e-9)
    assert heterogeneity.split_distance(splits.train, splits.test) < 0.1


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match="Expected 0 < test_fraction < 1, or None, got test_fraction=0"):
        datasets.load("digits", test_fraction=0.0)
    with pytest.raises(ValueError, match="'iid' has no option 'alpha'"):
        datasets.load("digits(partition='iid', alpha=1)")


def test_loading_twice_gives_the_same(digits):
    again = datasets.load("digits")
    for split in ("train", "test"):
        first, second = getattr(digits, split), getattr(again, split)
        np.testing.assert_array_equal(first.offsets, second.offsets)
        np.testing.assert_array_equal(first.columns["x"], second.columns["x"])
    assert digits.train.sizes[:5].tolist() == [10, 16, 11, 10, 6]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'digits' reads no files"):
        datasets.load("digits", data=tmp_path)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        datasets.load("digits")
