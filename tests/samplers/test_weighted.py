"""Weighted sampling, compared with the exact probability of every order of drawing."""

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
    """The probability of drawing these clients in this order."""
    remaining, result = WEIGHTS.sum(), 1.0
    for client in order:
        result *= WEIGHTS[client] / remaining
        remaining -= WEIGHTS[client]
    return result


def p_value(sampler):
    """The p-value of a chi-square test of ordered cohorts against `probability`."""
    orders = [order for order in itertools.permutations(range(6), CLIENTS) if probability(order) > 0]
    place = {order: i for i, order in enumerate(orders)}
    counts = np.zeros(len(orders))
    for cohort in sampler.rounds(ROUNDS):
        if tuple(cohort.clients.tolist()) not in place:
            return 0.0
        counts[place[tuple(cohort.clients.tolist())]] += 1
    return stats.chisquare(counts, ROUNDS * np.array([probability(order) for order in orders])).pvalue


@pytest.mark.parametrize("attempts", [0, 1, 4])
def test_cohorts_follow_successive_sampling(attempts, monkeypatch):
    """By repeated drawing, by exponential keys alone, and by both."""
    monkeypatch.setattr(_weighted, "_ATTEMPTS", attempts)
    assert p_value(WeightedSampler(DATA, clients=CLIENTS, seed=0)) > 1e-3


def test_other_weights_have_another_distribution():
    """The negative control: uniform cohorts, and slightly different weights."""
    assert p_value(UniformSampler(DATA, clients=CLIENTS, seed=0)) < 1e-6
    assert p_value(WeightedSampler(DATA, clients=CLIENTS, seed=0, weights=WEIGHTS * [1, 1, 0, 1, 1.5, 1])) < 1e-6


def test_cohorts_are_complete_if_one_client_has_nearly_all_the_weight():
    weights = np.full(1000, 1e-12)
    weights[7] = 1.0
    data = FederatedData.from_arrays({"x": np.zeros(1000)}, sizes=[1] * 1000)
    for cohort in WeightedSampler(data, clients=5, seed=0, weights=weights).rounds(10):
        assert len(cohort) == 5
        assert 7 in cohort.clients


def test_all_clients_of_positive_weight_can_be_a_cohort():
    assert sorted(WeightedSampler(DATA, clients=5, seed=0).cohort(0).clients) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1, 2]}, r"weights of shape \[6\], one per client, got shape \[2\]"),
        ({"weights": [1, 1, 1, -2, 1, 1]}, "got -2.0 for client '3'"),
        ({"weights": [1, 1, 1, 1, 1, np.nan]}, "got nan for client '5'"),
        ({"weights": [1, np.inf, 1, 1, 1, 1]}, "got inf for client '1'"),
        ({"clients": 6}, "Only 5 clients have a weight above 0, too few for a cohort of clients=6"),
        ({"clients": 0}, "got clients=0"),
        ({"clients": 7}, "larger than the population"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        WeightedSampler(DATA, **{"clients": 3, "seed": 0} | change)
