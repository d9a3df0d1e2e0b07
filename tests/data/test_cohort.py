"""Tests of `Cohort`."""

import jax
import numpy as np
import pytest

from fedsim import rng
from fedsim.data import Cohort, FederatedData


@pytest.fixture
def data():
    return FederatedData.from_arrays({"y": np.arange(6)}, sizes=[1, 2, 0, 3], client_ids=["a", "b", "c", "d"])


def test_iteration_yields_the_clients_in_order_with_their_keys(data):
    cohort = Cohort.of(data, ["d", "a", "c"], round=4, seed=1)
    rows = list(cohort)
    assert len(cohort) == 3
    assert cohort.client_ids == [client_id for client_id, _, _ in rows] == ["d", "a", "c"]
    assert [dataset["y"].tolist() for _, dataset, _ in rows] == [[3, 4, 5], [0], []]
    assert cohort.sizes.tolist() == [3, 1, 0]
    for (_, _, key), expected in zip(rows, rng.client_keys(rng.root(1), 4, np.array([3, 0, 2])), strict=True):
        assert key == expected


def test_a_clients_key_does_not_depend_on_the_rest_of_the_cohort(data):
    alone, *_ = Cohort.of(data, ["b"], round=2).keys()
    last = Cohort.of(data, ["a", "d", "b"], round=2).keys()[-1]
    assert alone == last


def test_two_experiment_seeds_give_different_client_keys(data):
    keys = [Cohort.of(data, ["a", "b"], seed=seed).keys() for seed in range(2)]
    assert not np.any(jax.random.key_data(keys[0]) == jax.random.key_data(keys[1]))


def test_unknown_clients_are_refused(data):
    with pytest.raises(KeyError, match="'e' among 4"):
        Cohort.of(data, ["a", "e"])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "cohort is empty"),
        ([0, 4], r"\[0, 4\) in clients, got 0 to 4"),
        ([-1], "got -1 to -1"),
        ([1, 2, 1], "more than once"),
    ],
)
def test_invalid_positions_are_refused(data, clients, message):
    with pytest.raises(ValueError, match=message):
        Cohort(data, np.array(clients, np.int32), 0, rng.root(0))


@pytest.mark.parametrize("clients", [np.array([False, True]), np.array([1.0]), np.array([2**32])])
def test_positions_that_are_no_whole_numbers_in_range_are_refused(data, clients):
    with pytest.raises(ValueError, match=r"np.flatnonzero\(mask\)|positions in \[0, 4\)"):
        Cohort(data, clients, 0, rng.root(0))
