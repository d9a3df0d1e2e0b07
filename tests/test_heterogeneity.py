"""Measures of heterogeneity, against values computed by hand."""

import itertools
import math

import numpy as np
import pytest

from fedsim import heterogeneity
from fedsim.data import FederatedData

# Clients hold {a: 3, b: 1}, {b: 4}, nothing, {a: 1, c: 1}; together a: 4, b: 5, c: 1.
LABELS = np.array(list("aaabbbbbac"))
PARTITION = [np.arange(4), np.arange(4, 8), np.arange(0), np.arange(8, 10)]
CODES = np.unique(LABELS, return_inverse=True)[1].astype(np.int32)
POPULATION = FederatedData.from_partition({"y": CODES}, PARTITION)


def test_counts():
    counts, labels = heterogeneity.label_counts(LABELS, PARTITION)
    assert labels.tolist() == ["a", "b", "c"]
    assert counts.tolist() == [[3, 1, 0], [0, 4, 0], [0, 0, 0], [1, 0, 1]]
    same, codes = heterogeneity.label_counts(POPULATION)
    assert same.tolist() == counts.tolist() and codes.tolist() == [0, 1, 2]


def test_a_label_that_no_client_holds_keeps_its_column():
    counts, labels = heterogeneity.label_counts(LABELS, [np.array([0, 8]), np.array([3])])
    assert labels.tolist() == ["a", "b", "c"]
    assert counts.tolist() == [[2, 0, 0], [0, 1, 0]]


def test_label_distance_is_the_l1_distance_from_the_population():
    """p = (.4, .5, .1): |.75-.4| + |.25-.5| + .1 = .7; .4 + .5 + .1 = 1; |.5-.4| + .5 + |.5-.1| = 1."""
    distances = heterogeneity.label_distances(LABELS, PARTITION)
    np.testing.assert_allclose(distances, [0.7, 1.0, np.nan, 1.0])
    np.testing.assert_array_equal(heterogeneity.label_distances(POPULATION), distances)
    assert heterogeneity.label_emd(POPULATION) == pytest.approx((0.7 + 1 + 1) / 3)


def test_label_distance_in_extreme_cases():
    """Ten clients of one class each: |1 - .1| + 9 * .1 = 1.8, the value of Zhao et al. for one class per client."""
    one_class_each = [np.arange(i * 5, i * 5 + 5) for i in range(10)]
    assert heterogeneity.label_emd(np.repeat(np.arange(10), 5), one_class_each) == pytest.approx(1.8)
    assert heterogeneity.label_emd(np.tile(np.arange(5), 10), one_class_each) == pytest.approx(0)


def test_effective_classes():
    """The clients have exp(-(3/4 ln 3/4 + 1/4 ln 1/4)) classes; one label; none; two equally frequent labels."""
    expected = [math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))), 1, 0, 2]
    np.testing.assert_allclose(heterogeneity.effective_classes(LABELS, PARTITION), expected)
    np.testing.assert_allclose(heterogeneity.effective_classes(POPULATION), expected)


def test_gini_is_half_the_mean_difference_over_the_mean():
    for sizes in ([4, 4, 0, 2], [1], [5, 5], [0, 0, 0, 1], list(range(30))):
        pairs = [abs(a - b) for a, b in itertools.product(sizes, sizes)]
        by_hand = sum(pairs) / len(pairs) / 2 / (sum(sizes) / len(sizes))
        assert heterogeneity.gini(sizes) == pytest.approx(by_hand)
    assert heterogeneity.gini(PARTITION) == heterogeneity.gini(POPULATION) == heterogeneity.gini([4, 4, 0, 2])
    assert heterogeneity.gini([0, 0]) == 0


def test_split_distance_is_the_mean_l1_distance_over_clients_in_both():
    """a: (3/4, 1/4) and (1/2, 1/2), so 0.5; b: label 1 and label 2, so 2; c and d are empty in one, and e is in one only."""
    first = FederatedData.from_arrays({"y": [0, 0, 0, 1, 1, 0]}, sizes=[4, 1, 0, 1], client_ids=list("abcd"))
    second = FederatedData.from_arrays({"y": [1, 5, 2, 0, 1, 0]}, sizes=[1, 2, 0, 2, 1], client_ids=list("cbdae"))
    assert heterogeneity.split_distance(first, second) == pytest.approx((0.5 + 2) / 2)
    assert heterogeneity.split_distance(second, first) == pytest.approx((0.5 + 2) / 2)
    assert heterogeneity.split_distance(first, first) == 0
    text = [FederatedData.from_arrays({"y": np.array(names)}, sizes=[2]) for names in (["a", "b"], ["b", "b"])]
    assert heterogeneity.split_distance(*text) == pytest.approx(1)


def test_hidden_labels_do_not_count():
    """a: (2/3, 1/3) of labels 0 and 1; b: label 1 only; c has no labels, and d none that are known. Together: 1/2 and 1/2."""
    few = FederatedData.from_arrays({"y": [0, -1, 1, 0, 1, -1, -1]}, sizes=[4, 1, 0, 2])
    partition = [np.arange(few.offsets[i], few.offsets[i + 1]) for i in range(4)]
    for measured in ([few], [few.columns["y"], partition]):
        counts, labels = heterogeneity.label_counts(*measured)
        assert counts.tolist() == [[2, 1], [0, 1], [0, 0], [0, 0]] and labels.tolist() == [0, 1]
        np.testing.assert_allclose(heterogeneity.label_distances(*measured), [1 / 3, 1, np.nan, np.nan])
        assert heterogeneity.label_emd(*measured) == pytest.approx(2 / 3)
        entropy = -2 / 3 * math.log(2 / 3) - 1 / 3 * math.log(1 / 3)
        np.testing.assert_allclose(heterogeneity.effective_classes(*measured), [math.exp(entropy), 1, 0, 0])
    all_known = FederatedData.from_arrays({"y": [0, 1, 0, 0, 0, 1, 1]}, sizes=[4, 1, 0, 2])
    assert heterogeneity.split_distance(few, all_known) == pytest.approx((2 * (3 / 4 - 2 / 3) + 2) / 2)
    # A label that is hidden at a row of no client has no column.
    assert heterogeneity.label_counts([3, -1, 4], [np.array([0])])[1].tolist() == [3, 4]
    with pytest.raises(ValueError, match="All labels are -1, which is a hidden label"):
        heterogeneity.label_emd(FederatedData.from_arrays({"y": [-1, -1]}, sizes=[2]))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: heterogeneity.label_emd(LABELS), "Expected labels with a partition"),
        (lambda: heterogeneity.label_emd(POPULATION, PARTITION), "has its own partition"),
        (lambda: heterogeneity.label_emd(POPULATION, feature="label"), r"no feature 'label'; the data has \['y'\]"),
        (lambda: heterogeneity.label_emd(np.zeros([4, 2], int), [np.arange(4)]), r"one whole number or name per example"),
        (lambda: heterogeneity.label_emd(np.zeros(4), [np.arange(4)]), "these are float64"),
        (lambda: heterogeneity.label_emd(LABELS, []), "expected at least one client"),
        (
            lambda: heterogeneity.split_distance(
                POPULATION, FederatedData.from_arrays({"y": [0]}, sizes=[1], client_ids=["z"])
            ),
            "No client has examples in both populations",
        ),
        (lambda: heterogeneity.gini([]), "one size >= 0 per client, got none"),
        (lambda: heterogeneity.gini([1, -2]), "one size >= 0 per client"),
    ],
)
def test_the_error_for_invalid_input_names_it(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse()


def test_measures_do_not_depend_on_the_block_size(monkeypatch):
    whole = heterogeneity.label_distances(POPULATION), heterogeneity.effective_classes(POPULATION)
    counts, _ = heterogeneity.label_counts(POPULATION)
    monkeypatch.setattr(heterogeneity, "_BLOCK", 6)  # two clients per block
    np.testing.assert_array_equal(heterogeneity.label_counts(POPULATION)[0], counts)
    np.testing.assert_allclose(heterogeneity.label_distances(POPULATION), whole[0])
    np.testing.assert_allclose(heterogeneity.effective_classes(POPULATION), whole[1])
