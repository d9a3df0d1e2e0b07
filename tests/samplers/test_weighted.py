"""Weighted sampling, against probabilities that are summed up over all orders of drawing."""

import itertools

import numpy as np
import pytest
from scipy import stats

from fedsim.data import FederatedData
from fedsim.samplers import UniformSampler, WeightedSampler, _weighted

WEIGHTS = np.array([8.0, 1, 0, 4, 2, 1])
CLIENTS, ROUNDS = 4, 4000
DATA = FederatedData.from_arrays({"x": np.zeros(16)}, sizes=WEIGHTS.astype(int))


def probability(order):
    """Of drawing these clients in this order."""
    left, result = WEIGHTS.sum(), 1.0
    for client in order:
        result *= WEIGHTS[client] / left
        left -= WEIGHTS[client]
    return result


def misfit(sampler):
    """Chi-square of ordered cohorts against `probability`, as the chance of a misfit at least so large."""
    orders = [order for order in itertools.permutations(range(6), CLIENTS) if probability(order) > 0]
    place = {order: i for i, order in enumerate(orders)}
    counts = np.zeros(len(orders))
    for cohort in sampler.rounds(ROUNDS):
        if tuple(cohort.clients.tolist()) not in place:
            return 0.0
        counts[place[tuple(cohort.clients.tolist())]] += 1
    return stats.chisquare(counts, ROUNDS * np.array([probability(order) for order in orders])).pvalue


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_cohorts_follow_the_law_of_successive_sampling(batches, monkeypatch):
    """Drawn again and again, by exponential keys alone, and by both."""
    monkeypatch.setattr(_weighted, "_BATCHES", batches)
    assert misfit(WeightedSampler(DATA, clients=CLIENTS, seed=0)) > 1e-3


def test_the_law_is_not_that_of_other_weights():
    """The negative control: uniform cohorts, and weights that are a little off."""
    assert misfit(UniformSampler(DATA, clients=CLIENTS, seed=0)) < 1e-6
    assert misfit(WeightedSampler(DATA, clients=CLIENTS, seed=0, weights=WEIGHTS * [1, 1, 0, 1, 1.5, 1])) < 1e-6


def test_a_client_that_holds_nearly_everything_does_not_hinder_the_others():
    weights = np.full(1000, 1e-12)
    weights[7] = 1.0
    data = FederatedData.from_arrays({"x": np.zeros(1000)}, sizes=[1] * 1000)
    for cohort in WeightedSampler(data, clients=5, seed=0, weights=weights).rounds(10):
        assert len(cohort) == 5
        assert 7 in cohort.clients


def test_all_with_weight_can_be_a_cohort():
    assert sorted(WeightedSampler(DATA, clients=5, seed=0).cohort(0).clients) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1, 2]}, r"one weight for each of 6 clients, got shape \[2\]"),
        ({"weights": [1, 1, 1, -2, 1, 1]}, "got -2.0 for client '3'"),
        ({"weights": [1, 1, 1, 1, 1, np.nan]}, "got nan for client '5'"),
        ({"weights": [1, np.inf, 1, 1, 1, 1]}, "got inf for client '1'"),
        ({"clients": 6}, "Only 5 clients have a weight above 0, too few for a cohort of clients=6"),
        ({"clients": 0}, "got clients=0"),
        ({"clients": 7}, "larger than the population"),
    ],
)
def test_impossible_weights_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        WeightedSampler(DATA, **{"clients": 3, "seed": 0} | change)
