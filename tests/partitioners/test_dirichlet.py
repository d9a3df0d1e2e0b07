"""Dirichlet label skew by class."""

import hashlib

import numpy as np
import pytest

from fedsim.partitioners import dirichlet
from fedsim.partitioners._draw import generator

LABELS = np.random.default_rng(0).integers(10, size=4000)


def skew(parts):
    """Returns the mean share of a client's most frequent label: 0.1 for equal label shares, 1 for one label per client."""
    return np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts])


@pytest.mark.parametrize("alpha", [0.01, 0.3, 1, 100])
@pytest.mark.parametrize("clients", [1, 7, 200])
def test_each_example_goes_to_exactly_one_client(alpha, clients):
    parts = dirichlet(LABELS, clients=clients, alpha=alpha, seed=0)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_equal_seeds_give_equal_partitions_and_other_seeds_others():
    first, again, other = (dirichlet(LABELS, clients=20, alpha=0.3, seed=seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_skew_increases_as_alpha_decreases():
    skews = [skew(dirichlet(LABELS, clients=20, alpha=alpha, seed=0)) for alpha in (1000, 10, 1, 0.3, 0.05)]
    assert skews == sorted(skews)
    assert skews[0] < 0.2
    assert skews[-1] > 0.7


def test_every_client_gets_min_size_even_if_this_requires_all_examples():
    parts = dirichlet(LABELS[:300], clients=100, alpha=0.05, seed=0, min_size=3)
    assert {len(part) for part in parts} == {3}
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(300))


def test_the_largest_clients_give_examples_of_all_their_classes():
    given, expected = np.zeros(10), np.zeros(10)
    for seed in range(20):
        before, after = (dirichlet(LABELS, clients=50, alpha=0.1, seed=seed, min_size=size) for size in (0, 30))
        for own, kept in zip(before, after, strict=True):
            lost = np.bincount(LABELS[np.setdiff1d(own, kept)], minlength=10)
            given += lost
            expected += lost.sum() * np.bincount(LABELS[own], minlength=10) / max(len(own), 1)
    assert given.sum() > 3000
    np.testing.assert_allclose(given, expected, rtol=0.15)


def test_without_min_size_clients_may_be_empty():
    parts = dirichlet(LABELS[:50], clients=100, alpha=0.3, seed=0, min_size=0)
    assert min(map(len, parts)) == 0
    assert sum(map(len, parts)) == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0}, "alpha=0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"clients": 0}, "clients=0"),
        ({"clients": 5000}, "4000 examples are too few for clients=5000"),
        ({"min_size": 300}, "min_size=300"),
    ],
)
def test_invalid_partitions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dirichlet(LABELS, **{"clients": 20, "alpha": 0.3, "seed": 0} | change)


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        ({"clients": 20, "alpha": 0.3, "seed": 5}, "d6a3d8bebc6010cd"),
        ({"clients": 7, "alpha": 100, "seed": 0}, "a390fd8723899445"),
        ({"clients": 100, "alpha": 0.3, "seed": 2**40, "min_size": 0}, "bab4f9b831988e15"),
    ],
)
def test_partitions_are_those_of_version_0_1(arguments, digest):
    """The clients of the dataset `digits` depend on them. In version 0.1 the function was fedsim.data.dirichlet_partition."""
    assert digest_of(dirichlet(LABELS, **arguments)) == digest


def test_partitions_with_clients_that_are_given_examples_stay_what_they_are():
    assert digest_of(dirichlet(LABELS, clients=300, alpha=0.05, seed=1, min_size=3)) == "5e788704b36d3b00"


def digest_of(parts):
    result = hashlib.sha256()
    for rows in parts:
        result.update(np.int64(len(rows)).tobytes() + rows.tobytes())
    return result.hexdigest()[:16]


def niid_bench(labels, clients, alpha, draw):
    """The loop of NIID-Bench (utils.py, "noniid-labeldir") and FedLab (hetero_dir_partition), with a given generator."""
    parts = [[] for _ in range(clients)]
    for label in range(labels.max() + 1):
        rows = draw.permutation(np.where(labels == label)[0])
        shares = draw.dirichlet(np.repeat(alpha, clients))
        shares = np.array([share * (len(part) < len(labels) / clients) for share, part in zip(shares, parts, strict=True)])
        shares = shares / shares.sum()
        cuts = (np.cumsum(shares) * len(rows)).astype(int)[:-1]
        parts = [part + chunk.tolist() for part, chunk in zip(parts, np.split(rows, cuts), strict=True)]
    return [sorted(part) for part in parts]


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(20, 0.3, 0), (7, 5.0, 1), (100, 0.1, 2)])
def test_capped_partitions_are_those_of_niid_bench_and_fedlab(clients, alpha, seed):
    expected = niid_bench(LABELS, clients, alpha, generator(seed))
    parts = dirichlet(LABELS, clients=clients, alpha=alpha, seed=seed, min_size=0, capped=True)
    assert [rows.tolist() for rows in parts] == expected


def test_capped_sizes_vary_less():
    """The coefficients of variation are means over seeds for 100 clients and Dirichlet(0.3); those of both libraries agree."""

    def variation(partition):
        return np.mean([np.std(sizes) / np.mean(sizes) for sizes in ([len(rows) for rows in partition(s)] for s in range(10))])

    plain = variation(lambda seed: dirichlet(LABELS, clients=100, alpha=0.3, seed=seed))
    capped = variation(lambda seed: dirichlet(LABELS, clients=100, alpha=0.3, seed=seed, capped=True))
    theirs = variation(lambda seed: niid_bench(LABELS, 100, 0.3, np.random.default_rng(seed)))
    # A share of Dirichlet(0.3) over 100 clients has a coefficient of variation of 1.8, so the sum of ten shares has 0.57.
    assert plain == pytest.approx(1.8 / np.sqrt(10), rel=0.1)
    assert capped < 0.85 * plain
    assert capped == pytest.approx(theirs, rel=0.1)


def test_capped_partitions_with_a_tiny_alpha_lose_nothing():
    parts = dirichlet(LABELS, clients=20, alpha=1e-3, seed=0, capped=True)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
