"""The guarantees that every sampler gives."""

import inspect
import tracemalloc

import federation
import jax
import numpy as np
import pytest

from fedsim import rng, samplers
from fedsim.data import FederatedData


def population(clients):
    sizes = 1 + np.arange(clients) % 5
    columns = {"x": np.zeros(int(sizes.sum()), np.int8)}
    return FederatedData(columns, np.concatenate([[0], np.cumsum(sizes)]), np.arange(clients).astype(str).tolist())


def test_every_sampler_is_in_the_table():
    exported = {name for name, thing in vars(samplers).items() if inspect.isclass(thing)}
    others = {"Sampler", "SteeredSampler", "Observation", "WrappedSampler"}
    assert exported - others == {*federation.SAMPLERS, *federation.STEERED}


@pytest.fixture(params=federation.SAMPLERS)
def make(request):
    return federation.SAMPLERS[request.param]


def test_a_cohort_is_a_function_of_seed_and_round_alone(make):
    data = population(52)
    in_order = [cohort.clients.tolist() for cohort in make(data, 3).rounds(24)]
    sampler = make(data, 3)
    assert [sampler.cohort(round).clients.tolist() for round in reversed(range(24))] == in_order[::-1]
    resumed = make(data, rng.root(3)).rounds(24, start=12)
    assert [cohort.clients.tolist() for cohort in resumed] == in_order[12:]


def test_a_cohort_has_the_round_the_root_key_and_the_slots_of_its_sampler(make):
    data = population(30)
    sampler = make(data, 8)
    for round in (0, 6):
        cohort = sampler.cohort(round)
        assert cohort.round == round and cohort.data is data is sampler.data
        assert cohort.key == sampler.key == rng.root(8)
        assert len(cohort) <= cohort.slots == sampler.clients


def test_two_seeds_differ_in_cohorts_and_keys(make):
    data = population(200)
    first, second = make(data, 0), make(data, 1)
    assert jax.random.key_data(first.key).tolist() != jax.random.key_data(second.key).tolist()
    same = [first.cohort(round).clients.tolist() == second.cohort(round).clients.tolist() for round in range(10)]
    assert all(same) if isinstance(first, samplers.ScheduleSampler) else not any(same)


def test_rounds_differ(make):
    sampler = make(population(200), 0)
    drawn = {tuple(cohort.clients.tolist()) for cohort in sampler.rounds(10)}
    assert len(drawn) >= 9


def test_invalid_rounds_are_refused(make):
    sampler = make(population(20), 0)
    for round in (-1, 2**31):
        with pytest.raises(ValueError, match="round"):
            sampler.cohort(round)
    with pytest.raises(TypeError):
        sampler.cohort(1.5)


def test_the_last_possible_round_has_a_cohort(make):
    if make is not federation.schedule:
        assert make(population(20), 0).cohort(2**31 - 1).round == 2**31 - 1


@pytest.mark.parametrize("name", sorted(set(federation.SAMPLERS) - {"ScheduleSampler"}))
def test_cost_does_not_grow_with_the_population(name):
    """Measured by allocated memory, which does not depend on the load of the machine."""

    def allocated(size):
        sampler = federation.SAMPLERS[name](population(size), 0)
        sampler.cohort(0)
        tracemalloc.start()
        for _ in sampler.rounds(20):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    # Linear cost would be at least one byte per client.
    assert allocated(300_000) < allocated(1000) + 100_000
