"""Shuffled epochs."""

import numpy as np
import pytest
from federation import singletons
from scipy import stats

from fedsim.samplers import ShuffledSampler, UniformSampler


@pytest.mark.parametrize(("size", "clients"), [(10, 5), (11, 5), (7, 7), (3, 1), (100, 33)])
def test_every_client_takes_part_exactly_once_per_epoch(size, clients):
    sampler = ShuffledSampler(singletons(size), clients=clients, seed=0)
    length = -(-size // clients)
    for epoch in range(4):
        cohorts = [cohort.clients for cohort in sampler.rounds((epoch + 1) * length, epoch * length)]
        assert sorted(np.concatenate(cohorts)) == list(range(size))
        assert {len(cohort) for cohort in cohorts[:-1]} <= {clients}
        assert len(cohorts[-1]) == (size - 1) % clients + 1


def test_uniform_cohorts_do_not_form_epochs():
    """The negative control of the test above."""
    cohorts = [cohort.clients for cohort in UniformSampler(singletons(10), clients=5, seed=0).rounds(2)]
    assert len(np.unique(np.concatenate(cohorts))) < 10


def test_every_epoch_has_its_own_uniformly_shuffled_order():
    size, epochs = 6, 1200
    sampler = ShuffledSampler(singletons(size), clients=6, seed=0)
    orders = np.array([cohort.clients for cohort in sampler.rounds(epochs)])
    assert len(np.unique(orders[:20], axis=0)) > 18
    for position in range(size):
        assert stats.chisquare(np.bincount(orders[:, position], minlength=size)).pvalue > 1e-4
