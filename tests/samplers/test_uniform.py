"""Tests of `UniformSampler`."""

import time

import jax
import numpy as np
import pytest
from scipy import stats

from fedsim import rng
from fedsim.data import FederatedData
from fedsim.samplers import UniformSampler


def population(clients):
    return FederatedData({"x": np.zeros(clients)}, np.arange(clients + 1), [str(i) for i in range(clients)])


def test_a_cohort_is_a_function_of_seed_and_round_alone():
    data = population(50)
    in_order = [cohort.clients.tolist() for cohort in UniformSampler(data, clients=5, seed=3).rounds(20)]
    sampler = UniformSampler(data, clients=5, seed=3)
    assert [sampler.cohort(round).clients.tolist() for round in reversed(range(20))] == in_order[::-1]
    resumed = UniformSampler(data, clients=5, seed=rng.root(3)).rounds(20, start=12)
    assert [cohort.clients.tolist() for cohort in resumed] == in_order[12:]


def test_a_cohort_carries_round_and_root_key():
    cohort = UniformSampler(population(9), clients=4, seed=8).cohort(6)
    assert cohort.round == 6
    assert cohort.key == rng.root(8)
    assert len(cohort) == 4


def test_two_seeds_differ_in_cohorts_and_keys():
    first, second = (UniformSampler(population(1000), clients=10, seed=seed) for seed in (0, 1))
    assert all(set(first.cohort(r).clients) != set(second.cohort(r).clients) for r in range(20))
    keys = [jax.random.key_data(sampler.cohort(0).keys()) for sampler in (first, second)]
    assert not np.any(keys[0] == keys[1])


@pytest.mark.parametrize(("population_size", "clients"), [(7, 2), (30, 10), (100, 10)])
def test_every_client_is_included_equally_often(population_size, clients):
    rounds = 3000
    sampler = UniformSampler(population(population_size), clients=clients, seed=0)
    included = np.zeros(population_size, int)
    for cohort in sampler.rounds(rounds):
        included[cohort.clients] += 1
    low, high = stats.binom.interval(1 - 1e-4 / population_size, rounds, clients / population_size)
    assert included.sum() == rounds * clients
    assert low <= included.min()
    assert included.max() <= high


def test_every_pair_of_clients_meets_equally_often():
    rounds, size = 3000, 8
    together = np.zeros((size, size), int)
    for cohort in UniformSampler(population(size), clients=3, seed=1).rounds(rounds):
        together[np.ix_(cohort.clients, cohort.clients)] += 1
    pairs = together[np.triu_indices(size, 1)]
    low, high = stats.binom.interval(1 - 1e-4 / len(pairs), rounds, (3 * 2) / (size * (size - 1)))
    assert low <= pairs.min()
    assert pairs.max() <= high


def test_the_whole_population_can_be_a_cohort():
    assert sorted(UniformSampler(population(13), clients=13, seed=0).cohort(2).clients) == list(range(13))


def test_cost_does_not_grow_with_the_population():
    def seconds(size):
        sampler = UniformSampler(population(size), clients=10, seed=0)
        best = np.inf
        for start in range(0, 100, 20):
            begin = time.perf_counter()
            for _ in sampler.rounds(start + 20, start):
                pass
            best = min(best, time.perf_counter() - begin)
        return best

    # Anything linear would take a thousand times as long; the bound leaves room for a busy machine.
    assert seconds(300_000) < 10 * seconds(300)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (11, "clients=11 is larger than the population of 10. Ask for at most 10"),
        (0, "got clients=0"),
        (-2, "clients=-2"),
    ],
)
def test_cohorts_of_impossible_size_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        UniformSampler(population(10), clients=clients, seed=0)
