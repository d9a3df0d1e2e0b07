"""Poisson sampling: cohort sizes, inclusion and independence, compared with the binomial distribution."""

import numpy as np
import pytest
from federation import singletons
from scipy import stats

from fedsim.samplers import CyclicPoissonSampler, PoissonSampler, UniformSampler

ROUNDS = 2000


def size_misfit(sampler, probability):
    """Chi-square of the cohorts' sizes against Binomial(12, probability)."""
    sizes = [len(cohort) for cohort in sampler.rounds(ROUNDS)]
    expected = ROUNDS * stats.binom.pmf(np.arange(8), 12, probability)
    expected = np.append(expected, ROUNDS - expected.sum())
    return stats.chisquare(np.bincount(np.minimum(sizes, 8), minlength=9), expected).pvalue


def test_sizes_are_binomial():
    assert size_misfit(PoissonSampler(singletons(12), probability=0.3, seed=0), 0.3) > 1e-3


def test_sizes_of_another_distribution_are_rejected():
    """The negative control: cohorts of constant size, and a slightly different probability."""
    assert size_misfit(UniformSampler(singletons(12), clients=4, seed=0), 0.3) < 1e-6
    assert size_misfit(PoissonSampler(singletons(12), probability=0.34, seed=0), 0.3) < 1e-6


def test_clients_and_pairs_of_clients_are_included_as_often_as_independence_implies():
    size, q = 9, 0.25
    together = np.zeros((size, size), int)
    for cohort in PoissonSampler(singletons(size), probability=q, seed=1).rounds(ROUNDS):
        together[np.ix_(cohort.clients, cohort.clients)] += 1
    for counts, chance in ((np.diag(together), q), (together[np.triu_indices(size, 1)], q * q)):
        low, high = stats.binom.interval(1 - 1e-4 / len(counts), ROUNDS, chance)
        assert low <= counts.min() and counts.max() <= high


def test_rounds_are_independent():
    """Counts how often one of 9 clients takes part in two successive rounds."""
    sampler = PoissonSampler(singletons(9), probability=0.25, seed=2)
    included = np.zeros((ROUNDS, 9), bool)
    for cohort in sampler.rounds(ROUNDS):
        included[cohort.round, cohort.clients] = True
    both = int((included[1:] & included[:-1]).sum())
    low, high = stats.binom.interval(1 - 1e-4, (ROUNDS - 1) * 9, 0.25**2)
    assert low <= both <= high


def test_slots_suffice_and_a_cohort_beyond_them_is_not_cut(monkeypatch):
    sampler = PoissonSampler(singletons(10_000), probability=0.01, seed=0)
    assert stats.binom.sf(sampler.clients, 10_000, 0.01) < 1e-12
    assert sampler.clients < 200
    assert {cohort.slots for cohort in sampler.rounds(300)} == {sampler.clients}
    drawn = sampler.cohort(0)
    monkeypatch.setattr(sampler, "clients", 3)
    beyond = sampler.cohort(0)
    assert beyond.slots == len(beyond) > 3
    # Drawn in smaller steps, but as far.
    assert abs(len(beyond) - len(drawn)) < 60


def test_cohorts_may_be_empty_or_everybody():
    data = singletons(5)
    assert 0 in {len(cohort) for cohort in PoissonSampler(data, probability=0.01, seed=0).rounds(20)}
    everybody = PoissonSampler(data, probability=1.0, seed=0).cohort(3)
    assert everybody.clients.tolist() == [0, 1, 2, 3, 4]
    assert len(PoissonSampler(data, probability=1e-300, seed=0).cohort(0)) == 0


@pytest.mark.parametrize("probability", [0, -0.1, 1.5, float("nan")])
def test_probabilities_that_are_none_are_refused(probability):
    with pytest.raises(ValueError, match="Expected 0 < probability <= 1, got probability="):
        PoissonSampler(singletons(5), probability=probability, seed=0)


def test_groups_take_turns_and_their_clients_are_independent():
    """Ten clients in three groups of 3 or 4; of the pairs of a group, both take part as often as chance implies."""
    sampler = CyclicPoissonSampler(singletons(10), clients=2, cycle=3, seed=4)
    included = np.zeros((3 * ROUNDS, 10), bool)
    for cohort in sampler.rounds(3 * ROUNDS):
        included[cohort.round, cohort.clients] = True
    turns = [set(np.flatnonzero(included[turn::3].any(0))) for turn in range(3)]
    assert sorted(map(len, turns)) == [3, 3, 4] and set.union(*turns) == set(range(10))
    for turn, group in enumerate(turns):
        own = included[turn::3][:, sorted(group)].astype(int)
        together = own.T @ own
        pairs = together[np.triu_indices(len(group), 1)]
        again = (own[1:] * own[:-1]).sum(0)  # in two turns after each other
        for counts, chance, count in ((np.diag(together), 0.6, ROUNDS), (pairs, 0.36, ROUNDS), (again, 0.36, ROUNDS - 1)):
            low, high = stats.binom.interval(1 - 1e-4 / len(counts), count, chance)
            assert low <= counts.min() and counts.max() <= high
    with pytest.raises(ValueError, match="at least clients=4 of the 10 clients, got cycle=3 groups"):
        CyclicPoissonSampler(singletons(10), clients=4, cycle=3, seed=0)
