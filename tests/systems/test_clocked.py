"""Synchronous rounds on a virtual clock whose sampler sees values: the events are those of a schedule made beforehand."""

from __future__ import annotations

import federation
import numpy as np
import pytest

from fedsim import samplers, systems
from fedsim.samplers import Observation


class Uniform(samplers.SteeredSampler):
    """Ignores what it observes, and has the cohorts of a uniform sampler."""

    observes = ("loss",)

    def begin(self):
        return samplers.UniformSampler(self.data, clients=self.clients, seed=self.key)

    def learn(self, memory, round, observation):
        return self.begin()

    def choose(self, round, memory, draw):
        return memory.cohort(round).clients


def observed_all(sampler, rounds, loss=lambda clients: np.ones(len(clients))):
    for round in range(rounds):
        clients = sampler.cohort(round).clients
        sampler = sampler.observe(Observation(clients, {"loss": loss(clients)}))
    return sampler


SETTINGS = {
    "over-selection, where late clients are replaced": dict(synchronization=systems.Synchronous(over_selection=1.6)),
    "a deadline, after which some rounds do not count": dict(
        synchronization=systems.Synchronous(deadline=6.0, minimum=3), faults=systems.Faults(message_loss=0.3)
    ),
    "failures": dict(faults=systems.Faults(client_failures=0.2, recovery=3.0), policy=systems.Policy(timeout=30.0)),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_without_steering_the_events_are_those_of_a_schedule_made_beforehand(options):
    data, rounds = federation.data_of_zeros([1] * 40), 25
    arguments = dict(options, steps=np.full(40, 3), devices=systems.Devices(seconds_per_step=systems.LogNormal(sigma=0.7)))
    plain = samplers.UniformSampler(data, clients=8, seed=3)
    plan = systems.schedule(plain, rounds, **arguments)
    sampler = observed_all(systems.ClockedSampler(Uniform(data, clients=8, seed=3), **arguments), rounds)
    for mine, theirs in zip(
        [*sampler.schedule.steps, *sampler.schedule.updates, *sampler.schedule.timeline],
        [*plan.steps, *plan.updates, *plan.timeline],
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)
    beforehand = systems.ScheduledSampler(plain, plan)
    for round in (3, 24, 0):
        mine, theirs = sampler.cohort(round), beforehand.cohort(round)
        assert mine.measures == theirs.measures and mine.round == theirs.round and mine.slots >= theirs.slots
        np.testing.assert_array_equal(mine.clients, theirs.clients)
        np.testing.assert_array_equal(mine.arrivals.key_rounds, theirs.arrivals.key_rounds)


def test_a_copy_with_other_observations_has_its_own_events():
    """Two runs that branch off one sampler do not disturb each other."""
    data = federation.data_of_zeros([1] * 12)
    start = systems.ClockedSampler(samplers.PowerOfChoice(data, clients=2, candidates=12, seed=0), steps=np.full(12, 3))
    rising = observed_all(start, 9, lambda clients: clients + 1.0)
    falling = observed_all(start, 9, lambda clients: 12.0 - clients)
    again = observed_all(start, 9, lambda clients: clients + 1.0)
    cohorts = [[each.cohort(round).clients.tolist() for round in range(10)] for each in (rising, falling, again, rising)]
    assert cohorts[0] == cohorts[2] == cohorts[3]
    assert sorted(cohorts[0][9]) == [10, 11] and sorted(cohorts[1][9]) == [0, 1]


def test_oort_measures_durations_and_prefers_fast_clients():
    data = federation.data_of_zeros([1] * 12)
    arguments = dict(steps=np.where(np.arange(12) < 6, 1, 20))
    oort = samplers.Oort(data, clients=3, seed=0, exploration_decay=0.95, exploration_least=0, deadline=5.0)
    sampler = observed_all(systems.ClockedSampler(oort, **arguments), 40)
    later = np.concatenate([sampler.cohort(round).clients for round in range(25, 40)])
    assert np.mean(later < 6) > 0.9


def test_what_cannot_be_steered_is_refused():
    data = federation.data_of_zeros([1] * 8)
    oort, steps = samplers.Oort(data, clients=3, seed=0), np.ones(8, int)
    cases = {
        "Expected Synchronous": (oort, dict(synchronization=systems.Buffered(size=2, concurrency=3))),
        "late='use'": (oort, dict(policy=systems.Policy(late="use"))),
        "neither stragglers nor attackers": (samplers.Stragglers(oort, epochs=3), {}),
        "does not weight its clients": (samplers.ClusteredSampling(data, clients=3, seed=0), {}),
    }
    for error, (sampler, options) in cases.items():
        with pytest.raises(ValueError, match=error):
            systems.Simulator(sampler, steps=steps, **options)
    with pytest.raises(ValueError, match="use fedsim.systems.ClockedSampler"):
        systems.schedule(oort, 2, steps=steps)
    with pytest.raises(ValueError, match="has observed 0 rounds"):
        systems.ClockedSampler(oort, steps=steps).cohort(1)
    with pytest.raises(ValueError, match="whose state is its observations"):
        systems.Simulator(oort, steps=steps).state()
