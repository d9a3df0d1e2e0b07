"""The accountant: published values, closed forms, and what is refused."""

import functools
import sys

import federation
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import norm

import fedsim
from fedsim.privacy import (
    CyclicPoisson,
    Epochs,
    EveryRound,
    FixedSize,
    Poisson,
    epsilon,
    noise_multiplier,
    participation_of,
)

MNIST = {"delta": 1e-5, "interval": 1e-4}


@pytest.mark.parametrize(
    ("noise", "participation", "options", "expected"),
    [
        # The tutorial of TensorFlow Federated: 120 of 3,383 clients.
        (1.2, Poisson(120 / 3383), {"rounds": 100, "delta": 1e-5, "method": "rdp"}, 1.9861),
        (1.2, Poisson(120 / 3383), {"rounds": 100, "delta": 1e-5, "interval": 1e-4}, 1.7075),
        # The tutorial of TensorFlow Privacy: batches of 256 of 60,000 images.
        (1.12, Poisson(256 / 60000), {"rounds": 60 * 60000 // 256, **MNIST}, 2.3102),
        pytest.param(0.6, Poisson(256 / 60000), {"rounds": 30 * 60000 // 256, **MNIST}, 7.69, marks=pytest.mark.slow),
        (1.2, Poisson(256 / 60000), {"rounds": 10 * 60000 // 256, **MNIST}, 0.79229),
        pytest.param(
            1, Poisson(1 / 34), {"rounds": 1500, "delta": 1 / 3400, "interval": 1e-4}, 5.96843, marks=pytest.mark.slow
        ),
        (1, Poisson(1 / 34), {"rounds": 1500, "delta": 1 / 3400, "method": "rdp"}, 6.697),
    ],
)
def test_published_values(noise, participation, options, expected):
    assert epsilon(noise, participation, **options) == pytest.approx(expected, rel=1e-4)


def test_a_wide_interval_gives_a_slightly_larger_bound():
    fine, wide = (epsilon(1.2, Poisson(120 / 3383), rounds=100, delta=1e-5, interval=x) for x in (1e-4, 1e-3))
    assert fine < wide < fine + 5e-4


def test_the_noise_of_a_published_budget():
    """It is rounded up, so that the bound holds; the published one has a finer interval."""
    noise = noise_multiplier(2.0, Poisson(1 / 34), rounds=1500, delta=1 / 3400)
    assert 1.98118 < noise < 1.98118 * 1.0005
    assert 1.9998 < epsilon(noise, Poisson(1 / 34), rounds=1500, delta=1 / 3400) <= 2


@pytest.mark.parametrize(("relation", "sensitivity"), [("add_or_remove", 1), ("replace_one", 2)])
def test_without_sampling_it_is_the_analytic_gaussian_mechanism(relation, sensitivity):
    """B. Balle, Y.-X. Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem 8."""
    noise, rounds, delta = 3.0, 10, 1e-5
    mu = sensitivity * np.sqrt(rounds) / noise

    def excess(e):
        return norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta

    found = epsilon(noise, EveryRound(), rounds=rounds, delta=delta, relation=relation)
    assert found == pytest.approx(brentq(excess, 0, 100), rel=1e-3)


def test_sampling_without_replacement_is_bounded_by_the_published_theorem():
    """Theorem 9 of Wang, Balle and Kasiviswanathan in whole orders, where one replaced client changes the sum by two norms."""
    noise, clients, population, rounds, delta = 2.0, 30, 1000, 100, 1e-5
    rate, deviation, orders = clients / population, noise / 2, np.arange(2, 65)

    def log_binomial(n, k):
        return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)

    found = []
    for order in orders:
        j = np.arange(2, order + 1)
        terms = j * np.log(rate) + log_binomial(order, j) + j * (j - 1) / (2 * deviation**2) + np.log(2)
        second = 1 / deviation**2  # ε(2); the first of the two bounds of the theorem for j = 2
        terms[0] = 2 * np.log(rate) + log_binomial(order, 2) + min(np.log(4 * np.expm1(second)), second + np.log(2))
        divergence = np.logaddexp.reduce([0, *terms]) / (order - 1)
        found.append(rounds * divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    bound = min(found)
    assert 0.9 * bound < epsilon(noise, FixedSize(clients, population), rounds=rounds, delta=delta) <= bound * 1.001


def test_a_small_budget_that_renyi_divergences_cannot_prove():
    noise = noise_multiplier(0.03, EveryRound(), rounds=1, delta=1e-6)
    assert 0.0299 < epsilon(noise, EveryRound(), rounds=1, delta=1e-6) <= 0.03
    assert noise_multiplier(0.06, EveryRound(), rounds=1, delta=1e-6) < noise


def test_where_the_least_noise_suffices_it_is_returned():
    assert noise_multiplier(1000, EveryRound(), rounds=1, delta=1e-5) == 0.1
    assert epsilon(0.1, EveryRound(), rounds=1, delta=1e-5) < 100


def test_a_delta_that_needs_no_noise_has_the_least_noise(monkeypatch):
    """One of 1,000 clients takes part, so nothing is revealed of a client with a probability of 0.999."""
    monkeypatch.setattr("fedsim.privacy._accountant._LEAST_NOISE", 0.5)  # The search down to 0.1 takes longer.
    assert noise_multiplier(1.0, Poisson(0.001), rounds=1, delta=0.002) == 0.5


def test_no_noise_and_no_rounds():
    assert epsilon(0.0, Poisson(0.1), rounds=3, delta=1e-5) == np.inf
    assert epsilon(0.0, Poisson(0.1), rounds=0, delta=1e-5) == 0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: epsilon(-1, Poisson(0.1), rounds=1, delta=1e-5), "Expected noise_multiplier >= 0 and finite, got"),
        (lambda: epsilon(1, Poisson(0.1), rounds=1, delta=0), "Expected 0 < delta < 1, got delta=0: it should be below"),
        (lambda: Poisson(0), "Expected 0 < probability <= 1, got probability=0: it is the probability"),
        (lambda: FixedSize(5, 5), "Expected population >= 6, got population=5: if all clients take part, use EveryRound"),
        (
            lambda: epsilon(1, Poisson(0.1), rounds=1, delta=1e-5, relation="replace_one"),
            "Expected relation to be 'add_or_remove' where every client .*, got relation='replace_one': no other",
        ),
        (
            lambda: epsilon(1, FixedSize(5, 9), rounds=1, delta=1e-5, method="pld"),
            "Expected method to be 'rdp' where 5 of 9 clients .*, got method='pld': no other",
        ),
        (
            lambda: noise_multiplier(0, Poisson(0.1), rounds=1, delta=1e-5),
            "Expected epsilon > 0 and finite, got epsilon=0: 8 is",
        ),
        (
            lambda: noise_multiplier(1e6, Poisson(0.1), rounds=1, delta=1e-5),
            "Expected epsilon <= 1000, got epsilon=1000000.0: a larger one protects nobody",
        ),
        (
            lambda: noise_multiplier(1e-4, FixedSize(5, 9), rounds=1, delta=1e-5),
            "Expected an epsilon that noise can reach, got epsilon=0.0001: with delta=1e-05 and rounds=1, the acc",
        ),
    ],
)
def test_arguments_that_are_refused(use, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        use()


def test_a_missing_accountant_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"needs dp-accounting: pip install 'fedsim-jax\[privacy\]'"):
        epsilon(1.2345678, Poisson(0.1), rounds=1, delta=1e-5)


def test_the_participation_is_that_of_the_sampler():
    data = federation.data()
    samplers, sign_flip = fedsim.samplers, fedsim.attacks.SignFlip()
    uniform, every = (samplers.UniformSampler(data, clients=count, seed=0) for count in (3, 8))
    poisson, certain = (samplers.PoissonSampler(data, probability=p, seed=0) for p in (0.25, 1))
    assert [participation_of(s) for s in (uniform, every, poisson, certain)] == [
        FixedSize(3, 8), EveryRound(), Poisson(0.25), EveryRound(),
    ]  # fmt: skip
    in_turns = [
        cls(data, clients=count, seed=0) for cls in (samplers.CyclicSampler, samplers.ShuffledSampler) for count in (3, 8)
    ]
    assert [participation_of(s) for s in in_turns] == [
        Epochs(3, separation=3), EveryRound(), Epochs(3, separation=1), EveryRound(),
    ]  # fmt: skip
    groups = [samplers.CyclicPoissonSampler(data, clients=count, cycle=4, seed=0) for count in (1, 2)]
    assert [participation_of(s) for s in groups] == [CyclicPoisson(0.5, cycle=4), Epochs(4, separation=4)]
    attacked = samplers.Attacked(poisson, sign_flip, attackers=["client1"], seed=0)
    assert participation_of(attacked) == Poisson(0.25)
    others = {
        name: make(data, 0)
        for name, make in federation.SAMPLERS.items()
        if name
        not in ("UniformSampler", "PoissonSampler", "CyclicSampler", "ShuffledSampler", "CyclicPoissonSampler", "Attacked")
    }
    for name, sampler in others.items():
        with pytest.raises(ValueError, match=f"^Expected a PoissonSampler or a UniformSampler, got {name}: who takes part"):
            participation_of(sampler)
    for attack, every_round in ((sign_flip, True), (fedsim.attacks.ALittleIsEnough(), False)):
        sampler = samplers.Attacked(poisson, attack, fraction=0.5, every_round=every_round, seed=0)
        with pytest.raises(ValueError, match=r"^Expected attackers who decide by themselves, got the attack"):
            participation_of(sampler)


def test_noise_that_protects_nobody_needs_no_distribution_of_losses():
    """It would have up to 5e8 points, as many as ε has intervals, also if the noise is not small and the rounds are many."""
    for noise, probability, rounds in ((0.001, 0.1, 1), (0.01, 0.1, 100), (1.0, 0.5, 10_000)):
        whole = functools.partial(epsilon, noise, Poisson(probability), rounds=rounds, delta=1e-5)
        assert whole() == whole(method="rdp") > 1000
