"""Distributed discrete Gaussian and Skellam noise: parameters, laws of rounding and noise, exact sums, and their accountant."""

import dataclasses
import functools
import math

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import fedsim
from fedsim.aggregators import AuxMean, Compressed, DistributedMechanism, Grouped, TrimmedMean
from fedsim.aggregators._distributed_mechanism import draw_noise, probabilities, rotate, round_at_random, unrotate
from fedsim.privacy import EveryRound, FixedSize, Poisson, SecureAggregation, distributed_epsilon, distributed_noise_multiplier

KEY = jax.random.key(5)
# 1.5 of 34 clients in a round on average and 1,500 rounds; the parameters that the authors' code selects for ε = 10 are an
# inverse scale γ = 3.2926e-6 and a local deviation of 0.00268133, with k = 4 deviations of the sum in 16 bits.
PUBLISHED = DistributedMechanism(
    0.00268133 * 10 / 0.03, clip=0.03, clients=100, wrap_probability=2 * stats.norm.sf(4), law="gaussian"
)


def test_the_scale_is_the_published_one():
    assert PUBLISHED.num_deviations == pytest.approx(4)
    assert 1 / PUBLISHED.scale(2**20) == pytest.approx(3.2926e-6, rel=2e-5)
    assert PUBLISHED.scale(2**20) == pytest.approx(303_712, rel=2e-5)


@pytest.mark.parametrize("law", ["gaussian", "skellam"])
def test_the_published_noise_has_the_published_epsilon(law):
    mechanism = dataclasses.replace(PUBLISHED, law=law)
    found = distributed_epsilon(mechanism, 2**20, Poisson(100 / 3400), rounds=1500, delta=1 / 3400)
    assert found == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("law", ["gaussian", pytest.param("skellam", marks=pytest.mark.slow)])
def test_the_calibration_finds_the_published_parameters(law):
    """TensorFlow Federated's search ends at γ = 3.2926e-6, or a scale of 303,712, and a local deviation of 0.00268133."""
    unknown = dataclasses.replace(PUBLISHED, noise_multiplier=0.1, law=law)
    settings = {"rounds": 1500, "delta": 1 / 3400}
    found = distributed_noise_multiplier(10.0, unknown, 2**20, Poisson(100 / 3400), **settings)
    calibrated = dataclasses.replace(unknown, noise_multiplier=found)
    assert calibrated.local_deviation == pytest.approx(0.00268133, rel=1e-4)
    assert 1 / calibrated.scale(2**20) == pytest.approx(3.2926e-6, rel=1e-4)
    assert calibrated.scale(2**20) == pytest.approx(303_712, rel=1e-4)
    assert distributed_epsilon(calibrated, 2**20, Poisson(100 / 3400), **settings) <= 10


def test_an_epsilon_that_the_bits_do_not_allow_is_refused():
    """The rounding grows with the noise, for which it leaves room, so more noise does not help."""
    few = DistributedMechanism(1.0, clip=1.0, clients=10, bits=8)
    with pytest.raises(ValueError, match=r"epsilon=0.1: with bits=8, delta=0.001 and rounds=5, .* no less than .* more bits"):
        distributed_noise_multiplier(0.1, few, 1000, EveryRound(), rounds=5, delta=1e-3)


def test_a_very_large_epsilon_is_refused():
    mechanism = DistributedMechanism(1.0, clip=1.0, clients=10, bits=20)
    with pytest.raises(ValueError, match="Expected epsilon <= 1000, got epsilon=2000000.0"):
        distributed_noise_multiplier(2e6, mechanism, 10, EveryRound(), rounds=10, delta=1e-3)


def test_with_many_bits_the_epsilon_is_that_of_gaussian_noise():
    """By the closed form of Rényi divergences, order / (2 z²), where the rounding hardly changes the norm."""
    dp = pytest.importorskip("dp_accounting")
    for law in ("gaussian", "skellam"):
        mechanism = DistributedMechanism(2.0, clip=1.0, clients=10, bits=22, law=law)
        accountant = dp.rdp.RdpAccountant([*range(2, 129), 256]).compose(dp.GaussianDpEvent(2.0), 5)
        found = distributed_epsilon(mechanism, 10, EveryRound(), rounds=5, delta=1e-5)
        assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
        assert found >= accountant.get_epsilon(1e-5)


def test_epsilon_grows_with_fewer_bits_and_vanishes_without_rounds():
    few, many = (DistributedMechanism(1.0, clip=1.0, clients=10, bits=bits) for bits in (8, 20))
    epsilons = [distributed_epsilon(each, 1000, Poisson(0.1), rounds=10, delta=1e-3) for each in (few, many)]
    assert epsilons[0] > 1.2 * epsilons[1] > 0
    assert distributed_epsilon(few, 1000, EveryRound(), rounds=0, delta=1e-3) == 0
    silent = dataclasses.replace(few, noise_multiplier=0.0)
    assert distributed_epsilon(silent, 1000, EveryRound(), rounds=1, delta=1e-3) == math.inf
    with pytest.raises(ValueError, match="Expected Poisson sampling or all clients in every round"):
        distributed_epsilon(few, 1000, FixedSize(10, 100), rounds=1, delta=1e-3)


@pytest.mark.parametrize("deviation", [0.6, 7.5])
def test_the_probabilities_of_the_noise_are_those_of_its_law(deviation):
    skellam = probabilities("skellam", deviation)
    k = np.arange(len(skellam)) - len(skellam) // 2
    np.testing.assert_allclose(skellam, stats.skellam.pmf(k, deviation**2 / 2, deviation**2 / 2), atol=1e-12)
    gaussian = probabilities("gaussian", deviation)
    weights = [math.exp(-(int(i) ** 2) / (2 * deviation**2)) for i in k]
    np.testing.assert_allclose(gaussian, np.array(weights) / math.fsum(weights), rtol=1e-9)


def chi_square(draws, chances):
    """Returns the p-value of integers under probabilities of -w to w, with the rare ones in one class."""
    observed = np.bincount(np.asarray(draws) + len(chances) // 2, minlength=len(chances))
    common = chances * len(draws) > 20
    counts, expected = (np.append(x[common], x[~common].sum()) for x in (observed, chances * len(draws)))
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("law", ["gaussian", "skellam"])
def test_the_noise_has_its_law_and_the_test_would_see_another_one(law):
    draws = np.asarray(draw_noise(KEY, (300_000,), law, 2.5))
    assert chi_square(draws, probabilities(law, 2.5)) > 1e-3
    assert abs(draws.var() / 2.5**2 - 1) < 0.02
    wrong = np.asarray(jnp.round(2.5 * jax.random.normal(KEY, (300_000,)))).astype(int)
    assert chi_square(wrong, probabilities(law, 2.5)) < 1e-4  # a rounded normal variable has a variance larger by 1 / 12
    other = {"gaussian": "skellam", "skellam": "gaussian"}[law]
    assert chi_square(draws, probabilities(other, 2.5)) < 1e-6


def test_rotation_keeps_norms_and_flattens():
    x = jnp.zeros(4001).at[7].set(3.0)
    rotated = rotate(x, jnp.uint32(2))
    assert rotated.shape == (4002,) and float(jnp.linalg.norm(rotated)) == pytest.approx(3, rel=1e-5)
    assert float(jnp.abs(rotated).max()) < 5 * 3 / math.sqrt(4002)
    np.testing.assert_allclose(unrotate(rotated, jnp.uint32(2))[:4001], x, atol=1e-5)
    assert not np.allclose(unrotate(rotated, jnp.uint32(3))[:4001], x, atol=0.1)


@pytest.mark.slow
def test_rounding_is_unbiased_without_a_bound_and_keeps_to_the_bound():
    x = jnp.array([0.25, -1.75, 3.0, 0.5])
    rounded = jax.vmap(lambda key: round_at_random(x, key, None))(jax.random.split(KEY, 20_000))
    assert set(np.unique(rounded[:, 1]).tolist()) == {-2.0, -1.0}
    np.testing.assert_allclose(rounded.mean(0), x, atol=4 * 0.5 / math.sqrt(20_000))
    assert np.abs(np.asarray(jnp.round(x) - x)).max() > 0.2  # a control: rounding to the nearest number is biased

    mechanism = DistributedMechanism(0.0, clip=1.0, clients=50, bits=8)
    long = jax.random.normal(KEY, (1000,))
    scaled = long / jnp.linalg.norm(long) * mechanism.scale(1000)
    bound = mechanism.norm_bound(1000)
    norms = [float(jnp.linalg.norm(round_at_random(scaled, key, bound))) for key in jax.random.split(KEY, 50)]
    assert max(norms) <= bound < dataclasses.replace(mechanism, beta=0.0).norm_bound(1000)


@pytest.mark.first(1)
@pytest.mark.parametrize("law", ["gaussian", "skellam"])
def test_the_sum_is_exact_and_that_of_the_protocol(law):
    mechanism = DistributedMechanism(1.0, clip=2.0, clients=6, bits=12, law=law)
    updates = [{"a": jax.random.normal(key, (5, 3)), "b": jax.random.normal(key, (4,))} for key in jax.random.split(KEY, 6)]
    memory = mechanism.init(updates[0])
    sent = [mechanism.send(u, memory, (), jax.random.fold_in(KEY, i)).update for i, u in enumerate(updates)]
    total = mechanism.zero(sent[0], slots=6)
    for slot, message in enumerate(sent):
        total = mechanism.accumulate(total, message, jnp.float32(1), slot)
    rows = np.stack([np.concatenate([np.ravel(x) for x in jax.tree.leaves((s.total, s.padding))]) for s in sent])
    assert (rows == rows.round()).all() and rows.min() >= 0 and rows.max() < 2**12
    rows = rows.astype(np.uint32)
    exact = [sum(map(int, column)) % 2**12 for column in rows.T]
    protocol = SecureAggregation(threshold=3, modulus_bits=12).run(rows, jax.random.key(0))
    assert protocol.sum.tolist() == exact
    found = np.concatenate([np.ravel(x) for x in jax.tree.leaves((total.total, total.padding))])
    assert (found % 2**12).tolist() == exact

    aggregate, memory = mechanism.finish_round(total, memory, KEY)
    signed = np.array([x - 2**12 if x >= 2**11 else x for x in exact], np.float64)
    half = len(signed) // 2
    angles = np.asarray(jax.random.uniform(jax.random.key(jnp.uint32(0)), (half,), jnp.float32, 0, 2 * math.pi), np.float64)
    x = np.fft.ifft(signed[:half] + 1j * signed[half:], norm="ortho") * np.exp(-1j * angles)
    expected = np.concatenate([x.real, x.imag])[:19] / (mechanism.scale(19) * 6)
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(aggregate)])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert int(memory) != 0


@pytest.mark.first(1)
@pytest.mark.parametrize(("law", "minimum"), [("gaussian", None), ("skellam", 4)])
def test_the_noise_on_the_mean_has_its_deviation(law, minimum):
    """z c / n with n clients, and more by √(n / minimum); rounding adds up to a fourth of a level for each client."""
    mechanism = DistributedMechanism(0.8, clip=2.0, clients=8, minimum=minimum, bits=18, law=law)
    zeros = jnp.zeros(20_000)
    total = None
    for i in range(8):
        message = mechanism.send(zeros, mechanism.init(zeros), (), jax.random.fold_in(KEY, i)).update
        total = mechanism.zero(message, 8) if total is None else total
        total = mechanism.accumulate(total, message, jnp.float32(1), i)
    mean, _ = mechanism.finish_round(total, mechanism.init(zeros), KEY)
    expected = 0.8 * 2 / 8 * math.sqrt(8 / (minimum or 8))
    assert float(jnp.std(mean)) == pytest.approx(expected, rel=0.03)
    same = mechanism.send(zeros, mechanism.init(zeros), (), KEY).update
    repeated = jax.tree.map(lambda x: 8 * x.astype(jnp.uint32), same)
    wrong, _ = mechanism.finish_round(repeated, mechanism.init(zeros), KEY)
    assert float(jnp.std(wrong)) > 2 * expected  # a control: the same noise on all clients is larger by √8


def test_coordinates_wrap_as_often_as_the_given_probability():
    """Two deviations of the sum fit; updates of one direction after rotation are nearly Gaussian, with all clients alike."""
    mechanism = DistributedMechanism(1.0, clip=1.0, clients=4, bits=10, wrap_probability=0.0455)
    size, wrapped = 4000, 0
    x = jax.random.normal(KEY, (size,))
    update = 0.999 * x / jnp.linalg.norm(x)
    sums = np.zeros(size, np.int64)
    for i in range(4):
        key = jax.random.fold_in(KEY, i)
        scaled = rotate(update, jnp.uint32(1)) * mechanism.scale(size)
        noise = draw_noise(key, (size,), "skellam", mechanism.local_deviation * mechanism.scale(size))
        sums += np.asarray(jnp.round(scaled)).astype(np.int64) + np.asarray(noise)
    wrapped = np.mean((sums < -(2**9)) | (sums >= 2**9))
    assert wrapped == pytest.approx(0.0455, abs=4 * math.sqrt(0.0455 / size))


def test_too_few_clients_reveal_nothing_and_an_absent_client_adds_nothing():
    mechanism = DistributedMechanism(0.5, clip=1.0, clients=3, minimum=2)
    update = jnp.ones(5)
    message = mechanism.send(update, mechanism.init(update), (), KEY).update
    one = mechanism.accumulate(mechanism.zero(message, 3), message, jnp.float32(1), 0)
    absent = mechanism.accumulate(one, message, jnp.float32(0), 1)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, absent))
    assert not mechanism.finish_round(absent, mechanism.init(update), KEY)[0].any()
    two = mechanism.accumulate(one, message, jnp.float32(1), 2)
    assert mechanism.finish_round(two, mechanism.init(update), KEY)[0].any()


def fedavg(aggregator, **options):
    return fedsim.algorithms.FedAvg(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        aggregator=aggregator,
        **options,
    )


@pytest.mark.slow
def test_a_round_has_the_same_bits_on_any_number_of_devices_and_the_audit_names_what_the_server_sees():
    mechanism = DistributedMechanism(0.3, clip=1.0, clients=4, minimum=3)
    states = []
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=2, lanes=2)):
        algorithm = fedavg(mechanism, weighting="uniform", execution=execution)
        states.append(algorithm.apply(algorithm.init(KEY), federation.cohort())[0].params)
    federation.assert_trees_equal(*states)
    audit = fedsim.audit(fedavg(mechanism, weighting="uniform"), federation.cohort())
    assert audit.minimum == 3 and "no more than the sum of at least 3" in str(audit)


def test_what_does_not_fit_is_refused():
    mechanism = DistributedMechanism(1.0, clip=1.0, clients=3)
    with pytest.raises(ValueError, match="Expected weighting='uniform' with DistributedMechanism"):
        fedavg(mechanism).apply(None, federation.cohort())
    with pytest.raises(ValueError, match="Expected bits of at least 7 for the rounding of 1000 clients, got bits=2"):
        DistributedMechanism(1.0, clip=1.0, clients=1000, bits=2)
    with pytest.raises(ValueError, match="at least minimum=3 clients for DistributedMechanism, got 2"):
        mechanism.check(jnp.zeros(3), slots=2)
    with pytest.raises(ValueError, match="got updates of norm .* after scaling .* give fewer bits"):
        DistributedMechanism(0.0, clip=1000.0, clients=3, bits=22).check(jnp.zeros(100_000), slots=3)
    with pytest.raises(ValueError, match="at most 65536 integers, got"):
        DistributedMechanism(5.0, clip=1.0, clients=2, bits=22).check(jnp.zeros(3), slots=3)
    for wrap in (functools.partial(Grouped, groups=2), AuxMean):
        with pytest.raises(ValueError, match="Expected an aggregator other than DistributedMechanism inside"):
            wrap(inner=mechanism)
    with pytest.raises(ValueError, match="other than DistributedMechanism inside Compressed"):
        Compressed(fedsim.compressors.TopK(fraction=0.5), inner=mechanism)
    assert not TrimmedMean(0.1).is_secure
