"""Tests of `UniformSampler`."""

import numpy as np
import pytest
from federation import singletons
from scipy import stats

from fedsim.samplers import UniformSampler


def test_cohorts_are_those_of_version_0_1():
    """Published runs depend on these draws of version 0.1, where the class was fedsim.data.UniformSampler."""
    cohorts = [cohort.clients.tolist() for cohort in UniformSampler(singletons(1000), clients=5, seed=3).rounds(3)]
    assert cohorts == [[945, 351, 448, 174, 875], [18, 306, 345, 512, 490], [373, 795, 76, 310, 113]]


@pytest.mark.parametrize(("population_size", "clients"), [(7, 2), (30, 10), (100, 10)])
def test_every_client_is_included_equally_often(population_size, clients):
    rounds = 3000
    sampler = UniformSampler(singletons(population_size), clients=clients, seed=0)
    included = np.zeros(population_size, int)
    for cohort in sampler.rounds(rounds):
        included[cohort.clients] += 1
    low, high = stats.binom.interval(1 - 1e-4 / population_size, rounds, clients / population_size)
    assert included.sum() == rounds * clients
    assert low <= included.min()
    assert included.max() <= high


def test_every_pair_of_clients_is_drawn_equally_often():
    rounds, size = 3000, 8
    together = np.zeros((size, size), int)
    for cohort in UniformSampler(singletons(size), clients=3, seed=1).rounds(rounds):
        together[np.ix_(cohort.clients, cohort.clients)] += 1
    pairs = together[np.triu_indices(size, 1)]
    low, high = stats.binom.interval(1 - 1e-4 / len(pairs), rounds, (3 * 2) / (size * (size - 1)))
    assert low <= pairs.min()
    assert pairs.max() <= high


def test_the_whole_population_can_be_a_cohort():
    assert sorted(UniformSampler(singletons(13), clients=13, seed=0).cohort(2).clients) == list(range(13))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (11, "clients=11 is larger than the population of 10. Give at most clients=10"),
        (0, "got clients=0"),
        (-2, "clients=-2"),
    ],
)
def test_invalid_cohort_sizes_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        UniformSampler(singletons(10), clients=clients, seed=0)
