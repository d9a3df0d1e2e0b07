"""Dirichlet label skew by class."""

import hashlib

import numpy as np
import pytest

from fedsim.partitioners import dirichlet

LABELS = np.random.default_rng(0).integers(10, size=4000)


def skew(parts):
    """Mean share of a client's most frequent label: 0.1 if labels were alike everywhere, 1 if each client had one."""
    return np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts])


@pytest.mark.parametrize("alpha", [0.01, 0.3, 1, 100])
@pytest.mark.parametrize("clients", [1, 7, 200])
def test_each_example_goes_to_exactly_one_client(alpha, clients):
    parts = dirichlet(LABELS, clients=clients, alpha=alpha, seed=0)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_same_seed_same_partition_and_another_seed_another():
    first, again, other = (dirichlet(LABELS, clients=20, alpha=0.3, seed=seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_skew_grows_as_alpha_falls():
    skews = [skew(dirichlet(LABELS, clients=20, alpha=alpha, seed=0)) for alpha in (1000, 10, 1, 0.3, 0.05)]
    assert skews == sorted(skews)
    assert skews[0] < 0.2
    assert skews[-1] > 0.7


def test_every_client_gets_min_size_even_when_that_takes_all():
    parts = dirichlet(LABELS[:300], clients=100, alpha=0.05, seed=0, min_size=3)
    assert {len(part) for part in parts} == {3}
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(300))


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
def test_impossible_partitions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dirichlet(LABELS, **{"clients": 20, "alpha": 0.3, "seed": 0} | change)


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        ({"clients": 20, "alpha": 0.3, "seed": 5}, "d6a3d8bebc6010cd"),
        ({"clients": 7, "alpha": 100, "seed": 0}, "a390fd8723899445"),
        ({"clients": 300, "alpha": 0.05, "seed": 1, "min_size": 3}, "6a4b066e19dd9f6e"),
        ({"clients": 100, "alpha": 0.3, "seed": 2**40, "min_size": 0}, "bab4f9b831988e15"),
    ],
)
def test_partitions_are_those_of_version_0_1(arguments, digest):
    """Before it moved here, as fedsim.data.dirichlet_partition: the digits' clients depend on it."""
    result = hashlib.sha256()
    for rows in dirichlet(LABELS, **arguments):
        result.update(np.int64(len(rows)).tobytes() + rows.tobytes())
    assert result.hexdigest()[:16] == digest
