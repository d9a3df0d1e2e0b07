"""One partition for several splits: `same_shares` and `split_within_clients`, with every partitioner."""

from collections import Counter

import numpy as np
import pytest
from partitioners.test_every_partitioner import MAKERS, digest

from fedsim import FederatedData, heterogeneity, partitioners

# MAKERS divide the training labels. The other split has a fifth as many examples, with other label frequencies.
TRAIN = np.random.default_rng(0).integers(10, size=1000)
TEST = np.random.default_rng(7).choice(10, size=200, p=np.arange(5, 15) / 95)


def distance(train, test):
    """Returns the mean L1 distance between clients' label shares, computed from the definition with dictionaries."""
    distances = []
    for first, second in zip(train, test, strict=True):
        if len(first) and len(second):
            p, q = Counter(first.tolist()), Counter(second.tolist())
            distances.append(sum(abs(p[y] / len(first) - q[y] / len(second)) for y in {*p, *q}))
    return np.mean(distances)


@pytest.fixture(params=MAKERS)
def partition(request):
    return MAKERS[request.param](0)


def test_every_partitioner_tests_clients_on_the_labels_they_train_on(partition):
    """For 1,200 examples and 12 clients, Dirichlet(0.3) drawn separately for each split would give a distance above 1."""
    parts = partitioners.same_shares(TRAIN, partition, TRAIN, seed=3)
    assert distance([TRAIN[rows] for rows in partition], [TRAIN[rows] for rows in parts]) < 1e-12
    parts = partitioners.same_shares(TRAIN, partition, TEST, seed=3)
    train, test = (FederatedData.from_partition({"y": labels}, split) for labels, split in ((TRAIN, partition), (TEST, parts)))
    found = heterogeneity.split_distance(train, test)
    assert found == pytest.approx(distance([client["y"] for client in train], [client["y"] for client in test]))
    # The other split has other label frequencies, which changes the shares of all clients by 0.22 on average. Rounding adds
    # to the distance, because its clients have 17 examples on average, and fewer with quantity_skew.
    assert found < 0.65
    drawn_again = [TEST[rows] for rows in partitioners.dirichlet(TEST, clients=12, alpha=0.3, seed=0)]
    skewed = partitioners.dirichlet(TRAIN, clients=12, alpha=0.3, seed=0)
    assert distance([TRAIN[rows] for rows in skewed], drawn_again) > 0.7


def test_same_shares_are_rounded_down_or_up_and_lose_no_example(partition):
    parts = partitioners.same_shares(TRAIN, partition, TEST, seed=3)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(TEST)))
    assert all(rows.dtype == np.int64 and np.all(np.diff(rows) > 0) for rows in parts)
    for label in range(10):
        held = np.array([np.sum(TRAIN[rows] == label) for rows in partition])
        got = np.array([np.sum(TEST[rows] == label) for rows in parts])
        exact = np.sum(label == TEST) * held / held.sum()
        assert np.all((got >= np.floor(exact - 1e-9)) & (got <= np.ceil(exact + 1e-9)))
    shares = sum(
        np.sum(y == TEST) * np.array([np.sum(TRAIN[r] == y) for r in partition]) / np.sum(y == TRAIN) for y in range(10)
    )
    assert np.max(np.abs(np.subtract([len(rows) for rows in parts], shares))) < 3


def test_same_shares_depend_on_the_seed_and_on_nothing_global():
    partition = MAKERS["dirichlet"](0)
    first, again, other = (partitioners.same_shares(TRAIN, partition, TEST, seed=seed) for seed in (1, 1, 2))
    assert digest(first) == digest(again) != digest(other)


def test_labels_that_no_client_holds_follow_the_sizes_and_labels_may_be_names():
    partition = [np.arange(3), np.arange(3, 4), np.arange(0)]
    parts = partitioners.same_shares(["a", "a", "a", "b"], partition, ["c"] * 8, seed=0)
    assert [len(rows) for rows in parts] == [6, 2, 0]
    parts = partitioners.same_shares(["a", "a", "a", "b"], partition, ["b", "a", "b"], seed=0)
    assert [rows.tolist() for rows in parts] == [[1], [0, 2], []]


def test_rotations_are_the_same_in_both_splits():
    images = np.arange(16).reshape(4, 2, 2)
    train, test = (FederatedData.from_arrays({"x": images}, sizes=sizes) for sizes in ([2, 1, 1], [1, 2, 1]))
    for split in (train, test):
        for i, (before, after) in enumerate(zip(split.clients(), partitioners.rotation(split).clients(), strict=True)):
            np.testing.assert_array_equal(after["x"], np.rot90(before["x"], i, axes=(1, 2)))


@pytest.mark.parametrize(
    ("labels", "partition", "message"),
    [
        ([0, 1], [], "at least one client has examples"),
        ([0, 1], [np.arange(0)], "at least one client has examples"),
        ([0, 1], [np.arange(3)], "indices from 0 to 2, and there are 2 labels"),
        ([0.5, 1], [np.arange(2)], "one label per example"),
    ],
)
def test_partitions_that_do_not_match_the_labels_are_refused(labels, partition, message):
    with pytest.raises(ValueError, match=message):
        partitioners.same_shares(labels, partition, [0, 1], seed=0)


FRACTIONS = {"train": 0.6, "validation": 0.1, "test": 0.3}


def test_every_partitioner_can_be_split_within_its_clients(partition):
    data = FederatedData.from_partition({"y": TRAIN, "row": np.arange(1000)}, partition)
    splits = partitioners.split_within_clients(data, FRACTIONS, seed=0)
    assert list(splits) == list(FRACTIONS)
    np.testing.assert_array_equal(np.sort(np.concatenate([s.columns["row"] for s in splits.values()])), np.arange(1000))
    for split, population in splits.items():
        assert population.client_ids == data.client_ids
        exact = FRACTIONS[split] * data.sizes
        assert np.all((population.sizes >= np.floor(exact - 1e-9)) & (population.sizes <= np.ceil(exact + 1e-9)))
        for client in population:
            assert set(client["row"]) <= set(data[client.client_id]["row"])
            np.testing.assert_array_equal(client["y"], TRAIN[client["row"]])
    # Clients of quantity_skew have as few as seven examples.
    assert heterogeneity.split_distance(splits["train"], splits["test"]) < 0.45
    at_random = partitioners.split_within_clients(data, FRACTIONS, seed=0, labels=None)
    assert heterogeneity.split_distance(at_random["train"], at_random["test"]) > heterogeneity.split_distance(
        splits["train"], splits["test"]
    )


def test_stratified_counts_are_largest_remainders():
    """70/30 of 10 + 5 + 4 examples is 13.3 and 5.7, so 13 and 6; exact test counts 3.16, 1.58, 1.26 are rounded to 3, 2, 1."""
    data = FederatedData.from_arrays({"y": np.repeat([0, 1, 2], [10, 5, 4])}, sizes=[19])
    splits = partitioners.split_within_clients(data, {"train": 0.7, "test": 0.3}, seed=0)
    assert np.bincount(splits["test"].columns["y"]).tolist() == [3, 2, 1]
    assert np.bincount(splits["train"].columns["y"]).tolist() == [7, 3, 3]


def test_small_clients_are_kept_and_may_be_empty():
    data = FederatedData.from_arrays({"y": np.zeros(6, int)}, sizes=[0, 1, 2, 3], client_ids=list("abcd"))
    splits = partitioners.split_within_clients(data, {"train": 0.7, "test": 0.3}, seed=0)
    assert splits["train"].sizes.tolist() == [0, 1, 1, 2] and splits["test"].sizes.tolist() == [0, 0, 1, 1]
    halves = partitioners.split_within_clients(data, {"train": 0.5, "test": 0.5}, seed=0)
    assert halves["train"].sizes.tolist() == [0, 1, 1, 2]


def test_a_client_s_split_does_not_depend_on_other_clients():
    rows = {"y": np.arange(40) % 3}
    few = FederatedData.from_arrays({"y": rows["y"][10:]}, sizes=[5, 25])
    many = FederatedData.from_arrays(rows, sizes=[15, 25])
    fractions = {"train": 0.7, "test": 0.3}
    first, second = (partitioners.split_within_clients(data, fractions, seed=2)["test"]["1"]["y"] for data in (few, many))
    np.testing.assert_array_equal(first, second)
    seeds = [partitioners.split_within_clients(many, fractions, seed=s, labels=None)["test"].columns["y"] for s in (0, 0, 1)]
    assert np.array_equal(seeds[0], seeds[1]) and not np.array_equal(seeds[0], seeds[2])


def test_text_columns_and_clients_names_are_kept():
    text = np.array([b"one", b"two", b"three", b"four"], object)
    data = FederatedData.from_arrays({"x": text, "y": np.array([0, 0, 1, 1])}, sizes=[4], client_ids=["ann"])
    splits = partitioners.split_within_clients(data, {"train": 0.5, "test": 0.5}, seed=0)
    assert sorted([*splits["train"]["ann"]["x"], *splits["test"]["ann"]["x"]]) == sorted(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fractions": {}}, "at least one split"),
        ({"fractions": {"train": 0.7, "test": 0.2}}, "fractions with the sum 1, got .* with the sum 0.9"),
        ({"fractions": {"train": 1.2, "test": -0.2}}, r"Expected fractions\['test'\] > 0 and finite"),
        ({"labels": "label"}, r"no feature 'label'; the data has \['x', 'y'\]"),
        ({"labels": "x"}, r"'x' is float64 \[2\] per example, not one label: give labels=None"),
    ],
)
def test_invalid_splits_are_refused(change, message):
    data = FederatedData.from_arrays({"x": np.zeros([3, 2]), "y": np.zeros(3, int)}, sizes=[3])
    with pytest.raises(ValueError, match=message):
        partitioners.split_within_clients(data, **{"fractions": {"train": 0.5, "test": 0.5}, "seed": 0} | change)
