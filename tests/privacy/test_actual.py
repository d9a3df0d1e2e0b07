"""What finished rounds have revealed: by the rounds of each client, with stragglers, and the accountant of a closed form."""

import tracemalloc

import federation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import fedsim
from fedsim.aggregators import BandedToeplitz, BinaryTree, GaussianMechanism
from fedsim.privacy import Actual, Epochs, Guarantee, actual, participation_of
from fedsim.samplers import CyclicSampler, PoissonSampler, ScheduleSampler, ShuffledSampler, Stragglers

DATA = federation.singletons(12)


def closed_form(mu, delta):
    """Returns ε of a Gaussian mechanism with sensitivity mu (theorem 8 of Balle and Wang)."""
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 100)


def guarantee(sampler, **options):
    return Guarantee(noise_multiplier=3.0, participation=participation_of(sampler), delta=0.01, **options)


def test_independent_noise_is_counted_by_a_clients_rounds():
    sampler = PoissonSampler(DATA, probability=0.3, seed=0)
    found = actual(guarantee(sampler), sampler.rounds(20))
    counts = np.zeros(12, int)
    for cohort in sampler.rounds(20):
        for client in cohort.client_ids:
            counts[DATA.client_ids.index(client)] += 1
    np.testing.assert_array_equal(found.rounds, counts)
    assert found.epsilon() == pytest.approx(closed_form(np.sqrt(counts.max()) / 3, 0.01), rel=3e-3)
    assert found.epsilon(0.5) == pytest.approx(closed_form(np.sqrt(np.sort(counts)[6]) / 3, 0.01), rel=3e-3)


@pytest.mark.parametrize("matrix", [BandedToeplitz(rounds=8, coefficients=(1.0, 0.5)), BinaryTree(rounds=8)])
def test_correlated_noise_is_counted_by_where_the_rounds_are(matrix):
    sampler = ShuffledSampler(DATA, clients=4, seed=0)
    found = actual(guarantee(sampler, matrix=matrix), sampler.rounds(8))
    for client in range(12):
        u = np.array([client in cohort.clients for cohort in sampler.rounds(8)], float)
        assert found.sensitivity[client] == pytest.approx(np.linalg.norm(matrix.dense(8) @ u))
    with pytest.raises(ValueError, match="^Expected 1 <= rounds <= 8, got rounds=9"):
        actual(guarantee(sampler, matrix=matrix), sampler.rounds(9))


def test_the_guarantee_bounds_what_was_revealed_and_dropped_stragglers_reveal_nothing():
    cyclic = CyclicSampler(DATA, clients=4, seed=0)
    dropping = Stragglers(cyclic, fraction=0.5, epochs=4, drop=True)
    assert participation_of(dropping) == Epochs(3, separation=3)
    matrix = BinaryTree(rounds=9)
    whole, less = (actual(guarantee(sampler, matrix=matrix), sampler.rounds(9)) for sampler in (cyclic, dropping))
    assert whole.epsilon() == pytest.approx(guarantee(cyclic, matrix=matrix).epsilon(9), rel=1e-3)
    assert (less.rounds <= whole.rounds).all() and less.rounds.sum() == 18
    assert less.epsilon() <= whole.epsilon() and less.epsilon(0.5) < whole.epsilon(0.5)


def test_a_client_that_never_took_part_has_revealed_nothing():
    sampler = ScheduleSampler(DATA, [["0"], ["0", "1"]], seed=0)
    found = actual(Guarantee(noise_multiplier=3.0, participation=Epochs(1, separation=1), delta=0.01), sampler.rounds(2))
    assert found.rounds.tolist() == [2, 1] + [0] * 10 and found.epsilon(0.5) == 0
    with pytest.raises(ValueError, match="^Expected one cohort or more"):
        actual(guarantee(CyclicSampler(DATA, clients=4, seed=0)), [])


def test_the_text_has_the_rounds_of_the_client_whose_epsilon_it_has():
    """With correlated noise, two successive rounds may reveal more than three others."""
    known = guarantee(CyclicSampler(DATA, clients=4, seed=0))
    found = Actual(rounds=np.array([2, 3, 1]), sensitivity=np.sqrt([6.0, 5.0, 2.0]), guarantee=known)
    most, middle = (f"{closed_form(np.sqrt(square) / 3, 0.01):.2f}" for square in (6, 5))
    text = found.text()
    assert f"ε = {most} for the client whose rounds reveal most (it has 2), and {middle} for the median (3)" in text


@pytest.mark.parametrize("matrix", [None, BinaryTree(rounds=200)], ids=["independent", "tree"])
def test_many_clients_take_little_memory(matrix):
    """A number for each of 100,000 clients in each of 200 rounds would take 160 MB."""
    sampler = CyclicSampler(federation.singletons(100_000), clients=10, seed=0)
    cohorts, known = list(sampler.rounds(200)), guarantee(sampler, matrix=matrix)
    tracemalloc.start()
    found = actual(known, cohorts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
    assert found.rounds.sum() == 2000 and (found.rounds > 0).sum() == 2000
    norms = np.ones(200) if matrix is None else np.linalg.norm(matrix.dense(200), axis=0)
    for round, cohort in enumerate(cohorts):
        np.testing.assert_allclose(found.sensitivity[cohort.clients], norms[round], rtol=1e-12)


def test_stragglers_of_a_random_cohort_are_refused():
    """One more client in a cohort could change which others are stragglers."""
    sampler = Stragglers(PoissonSampler(DATA, probability=0.5, seed=0), fraction=0.5, epochs=4)
    with pytest.raises(ValueError, match="^Expected a PoissonSampler or a UniformSampler, got Stragglers"):
        participation_of(sampler)
    everyone = Stragglers(fedsim.UniformSampler(DATA, clients=12, seed=0), fraction=0.5, epochs=4)
    assert participation_of(everyone) == Epochs(1, separation=1)


@pytest.mark.parametrize("matrix", [None, BandedToeplitz(rounds=6, coefficients=(1.0, 0.5))], ids=["independent", "banded"])
def test_a_client_that_sends_zeros_changes_the_sums_by_the_sensitivity_and_a_replaced_one_by_twice_as_much(matrix):
    """With the aggregators themselves, without noise: the sums, multiplied by C, of clients that are all long."""
    sampler = CyclicSampler(DATA, clients=4, seed=0)
    known = Guarantee(noise_multiplier=1.0, participation=participation_of(sampler), delta=0.01, matrix=matrix)
    found, clip, client = actual(known, sampler.rounds(6)), 0.5, sampler.cohort(0).clients[0]
    mechanism = GaussianMechanism(0.0, clip=clip, denominator=1)

    def sums(own):
        rows = []
        for cohort in sampler.rounds(6):
            total = mechanism.zero(jnp.zeros(3), slots=4)
            for slot, each in enumerate(cohort.clients):
                update = own if each == client else jnp.array([0.0, 9.0, 0.0])
                sent = mechanism.send(update, (), (), jax.random.key(slot)).update
                total = mechanism.accumulate(total, sent, jnp.float32(1), slot)
            rows.append(np.asarray(mechanism.finish(total)))
        return (np.eye(6) if matrix is None else matrix.dense(6)) @ np.stack(rows)

    long, zeros, other = (sums(jnp.array([x, 0.0, 0.0])) for x in (7.0, 0.0, -8.0))
    assert np.linalg.norm(long - zeros) == pytest.approx(clip * found.sensitivity[client], rel=1e-5)
    assert np.linalg.norm(long - other) == pytest.approx(2 * clip * found.sensitivity[client], rel=1e-5)
