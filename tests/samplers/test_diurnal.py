"""Availability by time of day."""

import numpy as np
import pytest
from federation import singletons
from scipy import stats

from fedsim.samplers import DiurnalSampler, UniformSampler


def counts(sampler, size, rounds, period):
    """How often each client takes part at each hour, ``[period, size]``."""
    table = np.zeros((period, size), int)
    for cohort in sampler.rounds(rounds):
        table[cohort.round % period, cohort.clients] += 1
    return table


def test_in_blocks_only_clients_of_the_current_block_take_part_uniformly():
    size, period, blocks, days = 12, 6, 3, 150
    phases = (np.arange(size) + 0.5) / size
    sampler = DiurnalSampler(singletons(size), clients=2, seed=0, period=period, blocks=blocks, phases=phases)
    table = counts(sampler, size, days * period, period)
    for hour in range(period):
        available = np.arange(size) // 4 == hour // 2
        assert table[hour, ~available].sum() == 0
        assert stats.chisquare(table[hour, available]).pvalue > 1e-4
        np.testing.assert_array_equal(sampler.availability(hour), available)


def test_with_as_many_blocks_as_rounds_every_hour_is_a_block():
    """29 / 100 * 100 is less than 29 in floating point, and the largest number below 1 belongs to the last hour."""
    for hours in (24, 49, 100):
        phases = [*np.arange(hours) / hours, np.nextafter(1, 0)]
        sampler = DiurnalSampler(singletons(hours + 1), clients=2, seed=0, period=hours, blocks=hours, phases=phases)
        available = [np.flatnonzero(sampler.availability(hour)).tolist() for hour in range(hours)]
        assert available == [[hour] for hour in range(hours - 1)] + [[hours - 1, hours]]


def test_uniform_cohorts_do_not_depend_on_the_hour():
    """The negative control of the test above."""
    table = counts(UniformSampler(singletons(12), clients=2, seed=0), 12, 600, 6)
    assert np.all(table.sum(1)[:, None] * 0.02 < table)


@pytest.mark.slow
def test_by_cosine_a_client_takes_part_as_often_as_it_is_available():
    """If every client fits into the cohort, the participation rate is the availability (1 + cos 2π(t - p)) / 2."""
    size, period, days = 4, 4, 400
    phases = [0.0, 0.25, 0.5, 0.125]
    sampler = DiurnalSampler(singletons(size), clients=size, seed=0, period=period, phases=phases)
    table = counts(sampler, size, days * period, period)
    diagonal = (1 + np.sqrt(0.5)) / 2
    expected = np.array(
        [
            [1, 0.5, 0, diagonal],
            [0.5, 1, 0.5, diagonal],
            [0, 0.5, 1, 1 - diagonal],
            [0.5, 0, 0.5, 1 - diagonal],
        ]
    )
    np.testing.assert_allclose([sampler.availability(hour) for hour in range(4)], expected, atol=1e-12)
    low, high = stats.binom.interval(1 - 1e-5, days, np.clip(expected, 1e-12, 1))
    assert np.all(table >= np.nan_to_num(low)) and np.all(table <= np.nan_to_num(high))


def test_all_available_clients_are_equally_likely():
    """Also if the permutation is read in several steps: 10 of 40 clients are available, and 2 are drawn."""
    phases = np.where(np.arange(40) % 4 == 0, 0.1, 0.6)
    sampler = DiurnalSampler(singletons(40), clients=2, seed=0, period=2, blocks=2, phases=phases)
    table = counts(sampler, 40, 2000, 2)
    assert stats.chisquare(table[0, ::4]).pvalue > 1e-4
    assert table[0].sum() == 2 * 1000 and table[1, ::4].sum() == 0


def test_cohorts_are_smaller_if_fewer_clients_are_available():
    sampler = DiurnalSampler(singletons(5), clients=4, seed=0, period=2, blocks=2, phases=[0, 0, 0, 0, 0])
    assert [len(cohort) for cohort in sampler.rounds(4)] == [4, 0, 4, 0]


def test_phases_are_drawn_from_the_seed():
    phases = [DiurnalSampler(singletons(1000), clients=1, seed=seed).phases for seed in (0, 0, 1)]
    np.testing.assert_array_equal(phases[0], phases[1])
    assert not np.any(phases[0] == phases[2])
    assert stats.kstest(phases[0], "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0}, "Expected period >= 1, got period=0"),
        ({"blocks": 0}, "Expected 1 <= blocks <= 24, or None, got blocks=0: a day has period=24 rounds"),
        ({"blocks": 25}, "got blocks=25"),
        ({"phases": [0.1] * 4}, r"phases of shape \[5\], one phase per client, got shape \[4\]"),
        ({"phases": [0.1, 0.2, 0.3, 0.4, 1.0]}, r"Expected phases in \[0, 1\)"),
        ({"phases": [0.1, 0.2, 0.3, 0.4, float("nan")]}, r"Expected phases in \[0, 1\)"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DiurnalSampler(singletons(5), **{"clients": 2, "seed": 0} | change)
