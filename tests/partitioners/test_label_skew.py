"""Balanced Dirichlet partitions, shards, and classes per client."""

import numpy as np
import pytest

from fedsim import heterogeneity, partitioners

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


def labels_of(parts, labels=LABELS):
    return [len(np.unique(labels[rows])) for rows in parts]


@pytest.mark.parametrize("clients", [1, 7, 100])
@pytest.mark.parametrize("alpha", [1e-4, 0.3, 100])
def test_balanced_sizes_differ_by_at_most_one(clients, alpha):
    parts = partitioners.dirichlet_balanced(LABELS, clients=clients, alpha=alpha, seed=0)
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@pytest.mark.parametrize(("alpha", "off"), [(0.1, 0.15), (1.0, 1.5), (10.0, 100.0)])
def test_balanced_mixtures_are_dirichlet(alpha, off):
    """The mean of sum p² is (a + 1) / (10 a + 1), plus a term of 1/60 for drawing 60 examples; another alpha fails the test."""
    labels = np.tile(np.arange(10), 6000)
    parts = partitioners.dirichlet_balanced(labels, clients=1000, alpha=alpha, seed=0)
    counts, _ = heterogeneity.label_counts(labels, parts)
    found = np.mean(((counts / 60) ** 2).sum(1))

    def expected(alpha):
        return 1 / 60 + (1 - 1 / 60) * (alpha + 1) / (10 * alpha + 1)

    # The tolerance is necessary because exhausted classes make the last examples of a client slightly more similar.
    assert found == pytest.approx(expected(alpha), rel=0.05)
    assert found != pytest.approx(expected(off), rel=0.05)


def test_shards_are_those_of_mcmahan_et_al():
    """60,000 sorted digits in 200 shards of 300 give each of 100 clients two shards: 600 examples of at most 2 digits."""
    digits = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    parts = partitioners.shards(digits, clients=100, seed=0)
    assert {len(rows) for rows in parts} == {600}
    assert set(labels_of(parts, digits)) == {1, 2}
    # Each shard consists of consecutive examples in sorted order.
    place = np.empty(60_000, int)
    place[np.argsort(digits, kind="stable")] = np.arange(60_000)
    for rows in parts:
        shards = np.unique(place[rows] // 300)
        assert len(shards) == 2


@pytest.mark.parametrize("shards_per_client", [1, 2, 5])
def test_uneven_shards_have_at_most_two_labels_each(shards_per_client):
    labels = np.repeat(np.arange(10), [40, 90, 55, 61, 43, 78, 120, 41, 66, 50])
    parts = partitioners.shards(labels, clients=20, shards_per_client=shards_per_client, seed=0)
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= shards_per_client
    assert max(labels_of(parts, labels)) <= 2 * shards_per_client


@pytest.mark.parametrize(("clients", "classes"), [(100, 2), (13, 3), (7, 10), (10, 1)])
def test_every_client_has_exactly_the_given_number_of_classes(clients, classes):
    parts = partitioners.classes_per_client(LABELS, clients=clients, classes=classes, seed=0)
    assert set(labels_of(parts)) == {classes}
    counts, _ = heterogeneity.label_counts(LABELS, parts)
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for column in counts.T:
        assert column[column > 0].max() - column[column > 0].min() <= 1


def test_combinations_of_classes_are_random():
    parts = partitioners.classes_per_client(LABELS, clients=100, classes=2, seed=0)
    pairs = {tuple(np.unique(LABELS[rows])) for rows in parts}
    assert len(pairs) > 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: partitioners.dirichlet_balanced(LABELS, clients=5, alpha=0, seed=0),
            "Expected alpha > 0 and finite, got alpha=0",
        ),
        (lambda: partitioners.shards(LABELS, clients=5, shards_per_client=0, seed=0), "got shards_per_client=0"),
        (lambda: partitioners.shards(LABELS, clients=5000, seed=0), "5000 with shards_per_client=2: 10000 shards"),
        (lambda: partitioners.classes_per_client(LABELS, clients=5, classes=0, seed=0), "got classes=0"),
        (lambda: partitioners.classes_per_client(LABELS, clients=5, classes=11, seed=0), "<= 10, got classes=11"),
        (lambda: partitioners.classes_per_client(LABELS, clients=3, classes=2, seed=0), "give at least 5 clients"),
        (
            lambda: partitioners.classes_per_client([0, 0, 1], clients=2, classes=2, seed=0),
            "Label 1 has 1 examples and should be held by 2 clients",
        ),
    ],
)
def test_invalid_skews_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
