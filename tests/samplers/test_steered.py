"""Samplers that values steer: their rules against NumPy, and that a cohort is a function of the key and the observations."""

import itertools
import types

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import samplers
from fedsim.rounds import check_scales
from fedsim.samplers import Observation

SIZES = (7, 0, 3, 12, 1, 5, 9, 2)


def data():
    return federation.data_of_zeros(SIZES)


def seen(clients, **values):
    return Observation(np.asarray(clients, np.int32), {name: np.asarray(column, float) for name, column in values.items()})


def trained(make, rounds=8):
    """Returns a sampler after rounds whose losses and norms are drawn at random."""
    sampler, draw = make(data(), 3), np.random.default_rng(0)
    for round in range(rounds):
        clients = sampler.cohort(round).clients
        drawn = draw.uniform(0.1, 3, len(clients))
        drawn[draw.random(len(clients)) < 0.1] = np.nan
        sampler = sampler.observe(seen(clients, **{sampler.observes[0]: drawn}))
    return sampler


@pytest.fixture(params=federation.STEERED)
def make(request):
    return federation.STEERED[request.param]


def test_a_cohort_is_a_function_of_the_key_and_what_was_observed_before(make):
    sampler = trained(make)
    known = [sampler.cohort(round).clients.tolist() for round in range(9)]
    assert [sampler.cohort(round).clients.tolist() for round in reversed(range(9))] == known[::-1]
    again = make(data(), 3)
    for round, observation in enumerate(sampler.observations):
        assert again.cohort(round).clients.tolist() == known[round]
        stored = Observation.from_json(observation.to_json())
        again, before = again.observe(stored), again
        assert len(before.observations) == round  # observe changes nothing
    assert again.cohort(8).clients.tolist() == known[8]
    assert all(1 not in clients for clients in known)  # it has no examples


def test_a_cohort_whose_rounds_before_were_not_observed_is_refused(make):
    with pytest.raises(ValueError, match="has observed 0 rounds"):
        make(data(), 0).cohort(1)
    with pytest.raises(ValueError, match="round=-1"):
        make(data(), 0).cohort(-1)


def test_samplers_around_a_steered_one_pass_observations_on(make):
    inner = make(data(), 3)
    sampler = samplers.Stragglers(samplers.Attacked(inner, fedsim.attacks.SignFlip(), seed=0), epochs=3)
    assert samplers.is_steered(sampler) and sampler.observes == inner.observes
    observation = seen(inner.cohort(0).clients, **{inner.observes[0]: np.ones(len(inner.cohort(0)))})
    assert sampler.observe(observation).cohort(1).clients.tolist() == inner.observe(observation).cohort(1).clients.tolist()


def test_power_of_choice_takes_the_candidates_with_the_largest_losses():
    sampler = samplers.PowerOfChoice(data(), clients=2, candidates=4, seed=1)
    losses, ties = np.full(len(SIZES), np.inf), set()
    for round in range(30):
        candidates = samplers.WeightedSampler(sampler.data, clients=4, seed=1).cohort(round).clients
        cohort = sampler.cohort(round).clients
        others = sorted(set(candidates) - set(cohort))
        assert set(cohort) <= set(candidates) and losses[cohort].min() >= losses[others].max()
        ties.add(np.isinf(losses[candidates]).sum())
        values = np.abs(np.sin(cohort + round))
        losses[cohort] = values
        sampler = sampler.observe(seen(cohort, loss=values))
    assert len(ties) > 1


def test_power_of_choice_keeps_the_loss_of_a_client_whose_update_was_dropped():
    sampler = samplers.PowerOfChoice(data(), clients=1, candidates=7, seed=0)
    later = sampler.observe(seen([3], loss=[0.5])).observe(seen([3], loss=[np.nan]))
    assert later.memory(2)[3] == 0.5


def test_oort_has_the_utilities_of_the_paper():
    seconds = np.array([1, 1, 4, 2, 8, 2, 1, 1.0])
    sampler = samplers.Oort(data(), clients=3, seed=0, seconds=seconds, deadline=2.0, alpha=2)
    history = [([0, 3, 4], [0.5, 0.1, 2.0]), ([0, 2, 6], [0.4, 3.0, 0.2])]
    for clients, losses in history:
        sampler = sampler.observe(seen(clients, loss=losses))
    loss, last = {0: 0.4, 2: 3.0, 3: 0.1, 4: 2.0, 6: 0.2}, {0: 2, 2: 2, 3: 1, 4: 1, 6: 2}
    high = np.quantile([SIZES[i] * loss[i] for i in loss], 0.95)
    expected = np.zeros(8)
    for i in loss:
        expected[i] = min(SIZES[i] * loss[i], high) + np.sqrt(0.1 * np.log(3) / last[i])
        expected[i] *= (2.0 / seconds[i]) ** 2 if seconds[i] > 2 else 1
    np.testing.assert_allclose(sampler.utility(2, sampler.memory(2)), expected, rtol=1e-12)


def test_oort_explores_less_and_exploits_by_utility():
    population = federation.data_of_zeros([1] * 60)
    sampler = samplers.Oort(population, clients=10, seed=0, exploration=0.8, exploration_decay=0.5, exploration_least=0.2)
    new, taken = [], np.zeros(60, bool)
    for round in range(5):
        cohort = sampler.cohort(round).clients
        new.append(int(np.sum(~taken[cohort])))
        if round:
            utility = sampler.utility(round, sampler.memory(round))
            old, epsilon = cohort[taken[cohort]], max(0.8 * 0.5**round, 0.2)
            assert len(old) == 10 - round_half_up(10 * epsilon)
            assert utility[old].min() >= 0.95 * np.sort(utility)[-len(old)]
        taken[cohort] = True
        sampler = sampler.observe(seen(cohort, loss=cohort / 60))
    assert new == [10, 4, 2, 2, 2]


def round_half_up(number):
    return int(number + 0.5)


def test_oort_fills_a_cohort_when_no_client_is_new_and_prefers_fast_ones_when_exploring():
    seconds = np.where(np.arange(60) < 30, 1.0, 9.0)
    first = [samplers.Oort(federation.data_of_zeros([1] * 60), clients=6, seed=seed, seconds=seconds) for seed in range(60)]
    fast = np.mean([sampler.cohort(0).clients < 30 for sampler in first])
    assert 0.8 < fast < 0.95  # 0.9 with replacement
    small = samplers.Oort(federation.data_of_zeros([1, 1, 0]), clients=2, seed=0)
    assert sorted(small.observe(seen([0, 1], loss=[0.0, np.nan])).cohort(1).clients) == [0, 1]


def test_clustered_sampling_is_unbiased_and_varies_less_than_sampling_with_replacement():
    groups, rounds = 4, 2000
    sampler, shares = samplers.ClusteredSampling(data(), clients=groups, seed=0), np.array(SIZES) / sum(SIZES)
    weights = np.zeros((rounds, len(SIZES)))
    for row, cohort in zip(weights, sampler.rounds(rounds), strict=True):
        row[cohort.clients] = cohort.arrivals.weights
    assert np.all(weights.sum(1) == groups)
    # The paper's table r: urn k has a part of each client's m n_i examples, the largest clients first.
    urns, left, at = np.zeros((groups, len(SIZES))), np.full(groups, sum(SIZES)), 0
    for client in np.argsort(-np.array(SIZES), kind="stable"):
        rest = groups * SIZES[client]
        while rest:
            part = min(rest, left[at])
            urns[at, client] += part / sum(SIZES)
            rest, left[at] = rest - part, left[at] - part
            at += left[at] == 0
    variance = (urns * (1 - urns)).sum(0)
    assert np.all(variance <= groups * shares * (1 - shares) + 1e-12)
    np.testing.assert_allclose(urns.sum(0), groups * shares)
    assert np.all(np.abs(weights.mean(0) - groups * shares) <= 5 * np.sqrt(variance / rounds) + 1e-12)
    np.testing.assert_allclose(weights.var(0), variance, atol=0.06)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_importance_sampling_is_unbiased(weighting):
    """The mean over all 2^n cohorts, each with its probability, is the mean update of the population."""
    sampler = samplers.ImportanceByNorm(data(), clients=3, seed=0, weighting=weighting)
    sampler = sampler.observe(seen(range(8), update_norm=[1, 0, 5, 0, 2, 9, 1, np.nan]))
    updates = np.random.default_rng(0).normal(size=8)
    weights = np.array(SIZES, float) if weighting == "examples" else (np.array(SIZES) > 0).astype(float)
    probabilities, expected = sampler.probabilities(1), 0.0
    assert np.isclose(probabilities.sum(), 3) and probabilities[1] == 0
    for selected in itertools.product([False, True], repeat=8):
        chosen = np.flatnonzero(selected)
        probability = np.prod(np.where(selected, probabilities, 1 - probabilities))
        if len(chosen) and probability:
            scales = sampler._arrivals(1, chosen).scales.astype(float)
            expected += probability * np.average(scales * updates[chosen], weights=weights[chosen])
    np.testing.assert_allclose(expected, np.average(updates, weights=weights), rtol=1e-5)


def test_the_probabilities_of_importance_sampling_have_the_least_variance():
    from scipy.optimize import minimize

    from fedsim.samplers._importance import least_variance

    draw = np.random.default_rng(0)
    for norms in (draw.uniform(0, 1, 6), draw.pareto(1, 6), np.array([0, 0, 1, 1, 1, 50.0])):
        found = minimize(
            lambda p, norms=norms: np.sum(norms**2 / p),
            np.full(6, 0.5),
            bounds=[(1e-3, 1)] * 6,
            constraints={"type": "eq", "fun": lambda p: p.sum() - 3},
            options={"maxiter": 500, "ftol": 1e-12},
        )
        ours = least_variance(norms, 3)
        variance = np.sum(norms[norms > 0] ** 2 / ours[norms > 0])
        assert np.isclose(ours.sum(), 3) and np.all(ours <= 1) and variance <= found.fun * (1 + 1e-4)
    np.testing.assert_allclose(least_variance(np.zeros(4), 2), 0.5)


def test_importance_sampling_selects_with_its_probabilities():
    sampler = samplers.ImportanceByNorm(data(), clients=3, seed=0)
    sampler = sampler.observe(seen(range(8), update_norm=[1, 0, 5, 0, 2, 9, 1, 1]))
    selected = np.zeros((2000, 8))
    for row in selected:
        sampler = sampler.observe(seen([], update_norm=[]))
        row[sampler.cohort(len(sampler.observations)).clients] = 1
    probabilities = sampler.probabilities(1)
    assert np.all(np.abs(selected.mean(0) - probabilities) <= 5 * np.sqrt(probabilities * (1 - probabilities) / 2000))


def test_wrong_values_are_refused():
    population = data()
    for error, wrong in {
        "Expected candidates >= 3": lambda: samplers.PowerOfChoice(population, clients=3, candidates=2, seed=0),
        "Expected candidates <= 7": lambda: samplers.PowerOfChoice(population, clients=3, candidates=8, seed=0),
        "Expected clients <= 7": lambda: samplers.Oort(population, clients=8, seed=0),
        "Expected seconds to be a finite": lambda: samplers.Oort(population, clients=3, seed=0, seconds=[1.0]),
        "exploration": lambda: samplers.Oort(population, clients=3, seed=0, exploration=2.0),
        "Expected clients <= 7, ": lambda: samplers.ImportanceByNorm(population, clients=8, seed=0),
        "Expected 0 < exploration <= 1, got exploration=0": lambda: samplers.ImportanceByNorm(
            population, clients=3, seed=0, exploration=0
        ),
        "weighting": lambda: samplers.ImportanceByNorm(population, clients=3, seed=0, weighting="size"),
    }.items():
        with pytest.raises(ValueError, match=error):
            wrong()


def test_samplers_that_scale_updates_need_the_mean_and_all_examples():
    clusters = samplers.ClusteredSampling(data(), clients=3, seed=0)
    median = types.SimpleNamespace(weighting="uniform", aggregator=fedsim.aggregators.CoordinateMedian())
    with pytest.raises(ValueError, match="the aggregator Mean for ClusteredSampling, got aggregator=CoordinateMedian"):
        samplers.check_fits(clusters, median)
    arriving = samplers.Arriving(clusters, np.zeros(clusters.data.num_examples, int))
    with pytest.raises(ValueError, match="neither scales updates nor starts clients .*, got ClusteredSampling"):
        arriving.cohort(0)


def test_oort_takes_losses_below_zero():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    sampler = samplers.Oort(data, clients=2, seed=0, exploration=0, exploration_least=0)
    sampler = sampler.observe(Observation(np.array([0, 1]), {"loss": np.array([-1.0, -2.0])}))
    sampler = sampler.observe(Observation(np.array([2, 3]), {"loss": np.array([-3.0, -4.0])}))
    assert len(set(sampler.cohort(2).clients.tolist())) == 2


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDC", "FedDyn"])
def test_a_client_drawn_three_times_is_refused_where_its_memory_changes_by_its_weight(name):
    clusters = samplers.ClusteredSampling(federation.data([60, 5, 5, 5, 5]), clients=4, seed=0)
    cls = getattr(fedsim.algorithms, name)
    settings = {"client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    algorithm = cls(model=federation.model(), staleness=fedsim.Staleness(bound=0), **settings)
    assert clusters.cohort(0).arrivals.weights.max() == 3
    with pytest.raises(ValueError, match=f"ClusteredSampling may draw a client twice for a round, and clients of {name} keep"):
        samplers.check_fits(clusters, algorithm)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    with pytest.raises(ValueError, match=f"weights of at most 1 in arrivals for {name}, got 3: .* such as UniformSampler"):
        algorithm.apply(state, clusters.cohort(0))
    check_scales(algorithm, weights=np.array([1.0, 0.5, 0.0]), scales=np.ones(3))
