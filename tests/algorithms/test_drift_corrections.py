"""FedExP, FedCM, FedDC, FedSAM and Scaffnew: agreement with rounds in float64, written from the papers, and fixed points."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_models import (
    BATCHES,
    RATE,
    assert_close,
    assert_differ,
    clients,
    cohorts,
    gradient,
    on_quadratics,
    run,
    settings,
    theta,
)

import fedsim
from fedsim.algorithms import FedAvg, FedCM, FedDC, FedDyn, FedExP, FedNova, FedSAM, Scaffnew

POPULATION = np.count_nonzero(federation.data().sizes)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("weighting", "epsilon", "clip"), [("examples", 0.001, np.inf), ("uniform", 0.5, np.inf), ("uniform", 1e-4, 0.1)]
)
def test_fedexp_follows_algorithm_1(weighting, epsilon, clip):
    """Small clients whose updates differ make the step longer than 1; a large epsilon keeps it at 1.

    If updates are clipped, the equation is that of the clipped ones.
    """
    aggregator = fedsim.aggregators.Mean() if clip == np.inf else fedsim.aggregators.Clipped(clip)
    start, end, _ = run(FedExP(epsilon=epsilon, weighting=weighting, aggregator=aggregator, **settings()), cohorts())
    x, rates = start, []
    for cohort in cohorts():
        deltas, weights = [], []
        for _, everything, batches in clients(cohort):
            y = x
            for batch in batches:
                y = y - RATE * gradient(y, *batch)
            deltas.append((x - y) * min(1, clip / np.linalg.norm(x - y)))
            weights.append(len(everything[1]) if weighting == "examples" else 1)
        mean = np.average(deltas, axis=0, weights=weights)
        squares = np.average([np.sum(delta**2) for delta in deltas], weights=weights)
        rates.append(max(1, squares / 2 / (np.sum(mean**2) + epsilon)))
        x = x - rates[-1] * mean
    assert_close(end, x)
    assert (max(rates) > 1.1) == (epsilon < 0.1)


def test_fedexp_takes_a_single_update_as_it_arrives():
    """Of one client, η_g is 1, whatever it sends: here an attacker's update, which is clipped."""
    population = federation.data(sizes=(9,))
    attack = {"attack": fedsim.attacks.SignFlip(100.0), "attackers": np.array([True])}
    algorithm = FedExP(epsilon=1e-6, aggregator=fedsim.aggregators.Clipped(0.01), **settings())
    start = algorithm.init(jax.random.key(1))
    state, info = algorithm.apply(start, dataclasses.replace(federation.cohort(population), **attack))
    assert np.linalg.norm(theta(state) - theta(start)) == pytest.approx(0.01, rel=1e-4)
    assert info.clients["bits_up"].tolist() == [32 * (3 * 4 + 4 + 1)]


def test_fedexp_takes_norms_of_updates_without_what_is_sent_beside_them():
    """An adaptive norm that clips nothing changes nothing, though clients send whether their update was short."""
    aggregators, ends = fedsim.aggregators, []
    for clip in (1e3, aggregators.AdaptiveClip(start=1e3)):
        mechanism = aggregators.GaussianMechanism(0.0, clip=clip, denominator=4)
        some = settings(client_optimizer=optax.sgd(1e-3))
        algorithm = FedExP(epsilon=1e-6, weighting="uniform", aggregator=mechanism, **some)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(federation.data()))
        ends.append(theta(state))
    np.testing.assert_allclose(*ends, rtol=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedcm_follows_algorithm_1(weighting):
    alpha = 0.3
    start, end, state = run(FedCM(alpha=alpha, weighting=weighting, **settings()), cohorts())
    x, momentum = start, np.zeros_like(start)
    for cohort in cohorts():
        moves, gradients, weights = [], [], []
        for _, everything, batches in clients(cohort):
            y = x
            for batch in batches:
                y = y - RATE * (alpha * gradient(y, *batch) + (1 - alpha) * momentum)
            moves.append(y - x)
            gradients.append((x - y) / (len(batches) * RATE))
            weights.append(len(everything[1]) if weighting == "examples" else 1)
        momentum = np.average(gradients, axis=0, weights=weights)
        x = x + np.average(moves, axis=0, weights=weights)
    assert_close(end, x)
    linear = state.momentum["linear"]
    assert_close(np.concatenate([linear["w"], linear["b"][None]]), momentum)


def test_fedcm_keeps_its_mean_gradient_in_a_round_at_learning_rate_zero():
    algorithm = FedCM(**settings(client_optimizer=lambda round: optax.sgd(jnp.where(round == 1, 0.0, RATE))))
    first, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort())
    second, _ = algorithm.apply(first, federation.cohort(round=1))
    federation.assert_trees_close(second.momentum, first.momentum)
    federation.assert_trees_equal(jax.device_get(second.params), jax.device_get(first.params))
    assert np.abs(np.asarray(first.momentum["linear"]["w"])).max() > 1e-2


def test_fedcm_with_alpha_one_is_fedavg():
    (_, one, _), (_, other, _) = run(FedCM(alpha=1.0, **settings()), cohorts()), run(FedAvg(**settings()), cohorts())
    assert_close(one, other)


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_feddc_follows_algorithm_1(weighting):
    alpha, population = 0.2, POPULATION if weighting == "uniform" else federation.data().sizes.sum()
    start, end, _ = run(FedDC(alpha=alpha, weighting=weighting, **settings()), cohorts())
    x, mean_drift, mean_last = start, np.zeros_like(start), np.zeros_like(start)
    drift, last = {}, {}  # the paper's h_i, and g_i / (eta K)
    for cohort in cohorts():
        moves, weights = [], []
        for i, everything, batches in clients(cohort):
            h, g, theta = drift.get(i, np.zeros_like(x)), last.get(i, np.zeros_like(x)), x
            for batch in batches:
                theta = theta - RATE * (gradient(theta, *batch) + alpha * (h + theta - x) + g - mean_last)
            drift[i], moved = h + theta - x, (theta - x) / (RATE * len(batches))
            moves.append((theta - x, moved - g))
            last[i] = moved
            weights.append(len(everything[1]) if weighting == "examples" else 1)
        share = sum(weights) / population
        mean_move, mean_change = (np.average(each, axis=0, weights=weights) for each in zip(*moves, strict=True))
        mean_drift, mean_last = mean_drift + share * mean_move, mean_last + share * mean_change
        x = x + mean_move + mean_drift
    assert_close(end, x)


@pytest.mark.parametrize("cls", [FedDyn, FedDC])
def test_a_round_without_clients_moves_nothing_if_its_noise_is_zero(cls):
    """Its aggregator acts nevertheless, and there are no clients whose movements the server's correction would undo."""
    mechanism = fedsim.aggregators.GaussianMechanism(0.0, clip=100.0, denominator=4)
    algorithm, population = cls(aggregator=mechanism, **settings()), federation.data()
    before, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(population))
    empty = fedsim.Cohort(population, np.zeros(0, np.int32), 1, jax.random.key(0), slots=population.num_clients)
    after, _ = algorithm.apply(before, empty)
    federation.assert_trees_equal(jax.device_get(after.params), jax.device_get(before.params))
    assert_differ(theta(algorithm.apply(before, federation.cohort(population, round=1))[0]), theta(before))


def test_fedsam_follows_algorithm_1():
    rho = 0.3
    start, end, _ = run(FedSAM(rho=rho, **settings()), cohorts())
    x = start
    for cohort in cohorts():
        moves, weights = [], []
        for _, everything, batches in clients(cohort):
            y = x
            for batch in batches:
                slope = gradient(y, *batch)
                y = y - RATE * gradient(y + rho * slope / np.sqrt(np.sum(slope**2)), *batch)
            moves.append(y - x)
            weights.append(len(everything[1]))
        x = x + np.average(moves, axis=0, weights=weights)
    assert_close(end, x)
    assert_differ(end, run(FedAvg(**settings()), cohorts())[1])


def test_fedsam_stays_where_all_gradients_are_zero():
    data = fedsim.FederatedData.from_arrays({name: np.zeros(2, np.float32) for name in ("curvature", "slope")}, sizes=(1, 1))
    algorithm = on_quadratics(FedSAM, 2)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))
    assert [float(x[0]) for x in jax.tree.leaves(state.params)] == [1.0]


@pytest.mark.first(1)
@pytest.mark.parametrize("p", [None, 0.15])
def test_scaffnew_follows_algorithm_2(p):
    """Rounds of K steps each, where the paper draws their number, and h_i of clients outside of the cohort stays."""
    start, end, state = run(Scaffnew(p=p, **settings()), cohorts())
    x, controls = start, {}
    for cohort in cohorts():
        own = {}
        for i, _, batches in clients(cohort):
            y = x
            for batch in batches:
                y = y - RATE * (gradient(y, *batch) - controls.get(i, 0))
            own[i] = y, (1 / len(batches) if p is None else p) / RATE
        x = np.mean([y for y, _ in own.values()], axis=0)
        controls |= {i: controls.get(i, 0) + factor * (x - y) for i, (y, factor) in own.items()}
    assert_close(end, x)
    rows = jax.tree.map(np.asarray, federation.plain(state).clients[0][0].control["linear"])
    for i, control in controls.items():
        assert_close(np.concatenate([rows["w"][i], rows["b"][i][None]]), control)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "options"), [(FedDC, {"alpha": 1.0}), (Scaffnew, {})])
def test_they_converge_to_the_optimum_for_any_number_of_local_steps(cls, options):
    """The optimum of the mean of two quadratics with curvatures 1 and 3 and optima -1 and 2 is 5 / 4."""
    columns = {"curvature": np.array([1, 3], np.float32), "slope": np.array([1, -6], np.float32)}
    both = fedsim.FederatedData.from_arrays(columns, sizes=(1, 1))
    algorithm = on_quadratics(cls, 10, **options)
    rounds = [federation.cohort(both, round=r) for r in range(100)]
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), rounds)
    assert float(jax.tree.leaves(state.params)[0][0]) == pytest.approx(1.25, abs=1e-3)


@pytest.mark.parametrize("cls", [FedCM, FedDC, Scaffnew])
def test_optimizers_that_are_not_linear_are_refused(cls):
    algorithm = cls(**settings(client_optimizer=optax.sign_sgd(0.1)))
    with pytest.raises(ValueError, match=f"{cls.__name__} needs a client_optimizer that is linear in the gradients"):
        algorithm.check(federation.data())


@pytest.mark.parametrize("cls", [FedNova, FedCM])
@pytest.mark.parametrize("other", [optax.set_to_zero(), optax.add_decayed_weights(0.01)], ids=["still", "decay"])
def test_optimizers_that_move_arrays_of_some_ranks_otherwise_are_refused(cls, other):
    """The step of a scalar, which is measured, says nothing of these."""
    matrices = optax.masked(other, lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    cls(**settings(client_optimizer=optax.sgd(0.1, momentum=0.9))).check(federation.data())
    with pytest.raises(ValueError, match=f"{cls.__name__} needs a client_optimizer .* alike for all parameters"):
        cls(**settings(client_optimizer=optax.chain(matrices, optax.sgd(0.1)))).check(federation.data())


def test_scaffnew_adds_the_bits_of_both_calls():
    algorithm = Scaffnew(**settings())
    cohort = federation.cohort()
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    took_part = BATCHES.num_steps(cohort.sizes) > 0
    parameters = 3 * federation.NUM_CLASSES + federation.NUM_CLASSES
    assert info.clients["bits_up"].tolist() == (32 * (parameters + 1) * took_part).tolist()  # and a number
    assert info.clients["bits_down"].tolist() == (32 * (2 * parameters + 2) * took_part).tolist()  # and the round, twice
    assert (np.asarray(info.clients["loss"]) > 0).tolist() == took_part.tolist()


def test_scaffnew_reports_what_its_clients_report_when_they_train():
    class Reporting(Scaffnew):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(info={**result.info, "examples": client.num_examples})

    cohort, algorithm = federation.cohort(), Reporting(**settings())
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    assert info.clients["examples"].tolist() == cohort.sizes.tolist()


def test_the_norms_of_scaffnew_s_updates_are_those_of_the_call_that_trains():
    norms = []
    for cls in (Scaffnew, FedAvg):
        algorithm = cls(**settings(update_norms=True, weighting="uniform"))
        _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
        norms.append(np.asarray(info.clients["update_norm"]))
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)  # The h_i are 0 in the first round.
    assert norms[0].max() > 0
