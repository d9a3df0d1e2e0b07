"""Exact results of queueing theory that every schedule must meet."""

import numpy as np
import pytest
from federation import singletons

from fedsim import rng, systems
from fedsim.samplers import ScheduleSampler, UniformSampler
from fedsim.systems._draws import BLOCK, purpose_generator

LAWS = [systems.Constant(1.0), systems.Exponential(1.0), systems.HalfNormal(1.0), systems.LogNormal(sigma=1.0)]


def run(rounds, *, clients=1000, cohort=10, variation=1.0, **arguments):
    sampler = UniformSampler(singletons(clients), clients=cohort, seed=0)
    devices = systems.Devices(variation=variation)
    return systems.schedule(sampler, rounds, steps=np.ones(clients, int), devices=devices, **arguments)


def harmonic(n, after=0):
    return sum(1 / k for k in range(after + 1, n + 1))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_mean_staleness_of_buffered_is_concurrency_less_one_over_size_for_any_law(law):
    found = run(1500, variation=law, synchronization=systems.Buffered(size=10, concurrency=100))
    mean = found.updates.staleness[found.updates.step >= 100].mean()
    assert mean == pytest.approx(9.9, abs=1e-9 if law == LAWS[0] else 0.04)  # It is not C / K = 10.


def test_staleness_of_equal_clients_is_the_number_of_others():
    found = run(400, synchronization=systems.Buffered(size=1, concurrency=20))
    assert set(found.updates.staleness[20:]) == {19}
    found = run(400, synchronization=systems.Asynchronous(concurrency=20))
    assert set(found.updates.staleness[20:]) == {19}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_throughput_is_concurrency_over_mean_duration(law):
    """Little's law."""
    found = run(1000, variation=law, synchronization=systems.Buffered(size=10, concurrency=100))
    half = found.steps.time[499]  # The clients that start together at time 0 are forgotten by then.
    rate = 10 * 500 / (found.steps.time[-1] - half)
    assert rate == pytest.approx(100 / law.mean, rel=0.06)


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 10])
def test_throughput_of_two_stale_synchronous_workers(bound):
    sampler = UniformSampler(singletons(2), clients=2, seed=0)
    devices = systems.Devices(variation=systems.Exponential(1.0))
    model = systems.StaleSynchronous(bound=bound)
    found = systems.schedule(sampler, 4000, steps=np.ones(2, int), devices=devices, synchronization=model)
    throughput = len(found.updates.step) / 2 / found.seconds
    assert throughput == pytest.approx((2 * bound + 2) / (2 * bound + 3), rel=0.035)


@pytest.mark.parametrize(
    ("cohort", "over_selection", "mean"),
    [(10, 1.0, 2.92897), (13, 1.3, 1.34680)],
)
def test_round_of_exponential_clients(cohort, over_selection, mean):
    kept = round(cohort / over_selection)
    assert harmonic(cohort, after=cohort - kept) == pytest.approx(mean, abs=1e-5)
    rounds = 2000
    law = systems.Exponential(1.0)
    found = run(rounds, cohort=cohort, variation=law, synchronization=systems.Synchronous(over_selection=over_selection))
    deviation = np.sqrt(sum(1 / k**2 for k in range(cohort - kept + 1, cohort + 1)) / rounds)
    assert found.seconds / rounds == pytest.approx(mean, abs=4 * deviation)
    assert (found.steps.updates == kept).all()


def test_synchronous_rounds_take_the_longest_of_their_draws_exactly():
    found = run(40, variation=systems.HalfNormal(1.0))
    draws = systems.HalfNormal(1.0).draw(purpose_generator(rng.root(0), "variation"), BLOCK)
    longest = draws[:400].reshape(40, 10).max(1)
    np.testing.assert_allclose(np.diff(found.steps.time, prepend=0.0), longest, rtol=1e-9)
    assert longest.mean() == pytest.approx(1.888, abs=0.4)


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "size", "mean"), [(1000, 10, 99.9), (100, 10, 9.9), (20, 1, 19.0)])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_mean_staleness_in_long_runs(law, concurrency, size, mean):
    found = run(
        10_000, clients=10_000, cohort=100, variation=law, synchronization=systems.Buffered(size=size, concurrency=concurrency)
    )
    assert found.updates.staleness[found.updates.step >= 3000].mean() == pytest.approx(mean, rel=0.003)


@pytest.mark.parametrize("bounds", [{"bound": 0}, {"bound": 5, "versions": 0}])
def test_bound_zero_is_the_synchronous_rounds_of_the_same_clients(bounds):
    data = singletons(6)
    sampler = ScheduleSampler(data, [["0", "2", "3", "5"]], seed=0, repeat=True)
    devices = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0), variation=systems.Exponential(1.0))
    models = systems.Synchronous(), systems.StaleSynchronous(**bounds)
    synchronous, stale = (
        systems.schedule(sampler, 30, steps=np.arange(6) + 1, devices=devices, synchronization=model) for model in models
    )
    for found, expected in zip((*stale.updates, *stale.steps), (*synchronous.updates, *synchronous.steps), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (stale.updates.staleness == 0).all() and (stale.updates.round == stale.updates.step).all()


def test_no_update_is_staler_than_the_bound_on_versions():
    devices = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0), variation=systems.Exponential(1.0))
    sampler, steps = UniformSampler(singletons(8), clients=8, seed=0), np.ones(8, int)
    largest = []
    for versions in (None, 5, 1):
        model = systems.StaleSynchronous(bound=3, versions=versions)
        found = systems.schedule(sampler, 200, steps=steps, devices=devices, synchronization=model)
        largest.append(found.largest_staleness)
    assert largest[0] > 5 and largest[1:] == [5, 1]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_is_further_ahead_than_the_bound(bound):
    sampler = UniformSampler(singletons(5), clients=5, seed=0)
    devices = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0), variation=systems.Exponential(1.0))
    model = systems.StaleSynchronous(bound=bound)
    updates = systems.schedule(sampler, 200, steps=np.ones(5, int), devices=devices, synchronization=model).updates
    ahead = 0
    for start, clock in zip(updates.start, updates.round, strict=True):
        done = [np.sum((updates.client == client) & (updates.stop <= start)) for client in range(5)]
        ahead = max(ahead, clock - min(done))
    assert ahead == bound
