"""Fair algorithms: rounds in NumPy with float64, written from the papers, and what they reduce to."""

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms

RATE = 0.3
BATCHES = fedsim.Batches(size=4, epochs=2)


def loss_and_gradient(params, x, y, weights=None):
    """Mean (or weighted mean) softmax cross-entropy of the linear model [x, 1] @ params, and its gradient."""
    x = np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], axis=1)
    logits = x @ params
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(p[np.arange(len(y)), y])
    p[np.arange(len(y)), y] -= 1
    weights = np.ones(len(y)) if weights is None else weights
    return losses @ weights / len(y), x.T @ (p * weights[:, None]) / len(y), losses


def stacked(state):
    layer = state.params["linear"]
    return np.concatenate([layer["w"], layer["b"][None]]).astype(np.float64)


def trained(params, dataset, key, weight_of=lambda y: np.ones(len(y))):
    for batch in dataset.batches(BATCHES, key):
        x, y = batch.examples["x"][batch.mask], batch.examples["y"][batch.mask]
        params = params - RATE * loss_and_gradient(params, x, y, weight_of(y))[1]
    return params


def settings(**more):
    return {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE)} | more


def rounds(algorithm, count=3):
    population = federation.data()
    return algorithm.init(jax.random.key(1)), [federation.cohort(population, round=r) for r in range(count)]


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_q_fedavg_follows_algorithm_2(q):
    algorithm = algorithms.QFedAvg(q=q, **settings())
    state, cohorts = rounds(algorithm)
    for cohort in cohorts:
        w = stacked(state)
        state, info = algorithm.apply(state, cohort)
        delta, h, lipschitz = 0.0, 0.0, 1 / RATE
        for _, dataset, key in cohort:
            if len(dataset):
                loss = loss_and_gradient(w, dataset["x"], dataset["y"])[0]
                move = lipschitz * (w - trained(w, dataset, key))
                delta = delta + len(dataset) * loss**q * move
                h += len(dataset) * (q * loss ** (q - 1) * np.sum(move**2) + lipschitz * loss**q)
        np.testing.assert_allclose(stacked(state), w - delta / h, rtol=1e-5, atol=1e-6)
    expected = [loss_and_gradient(w, d["x"], d["y"])[0] if len(d) else 0.0 for _, d, _ in cohort]
    np.testing.assert_allclose(info.clients["loss_before"], expected, rtol=1e-5)


@pytest.mark.parametrize("q", [0.0, 1.0, 3.0])
def test_q_fedsgd_follows_algorithm_1(q):
    algorithm = algorithms.QFedSGD(model=federation.model(), batches=fedsim.Batches(size=4), q=q, lipschitz=2.0)
    state, cohorts = rounds(algorithm)
    for cohort in cohorts:
        w = stacked(state)
        state, _ = algorithm.apply(state, cohort)
        delta, h = 0.0, 0.0
        for _, dataset, _ in cohort:
            if len(dataset):
                loss, gradient, _ = loss_and_gradient(w, dataset["x"], dataset["y"])
                delta = delta + len(dataset) * loss**q * gradient
                h += len(dataset) * (q * loss ** (q - 1) * np.sum(gradient**2) + 2.0 * loss**q)
        np.testing.assert_allclose(stacked(state), w - delta / h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_without_fairness_they_are_fedavg_and_fedsgd(weighting):
    fedavg = algorithms.FedAvg(weighting=weighting, **settings())
    state, (cohort,) = rounds(fedavg, 1)
    fair = algorithms.QFedAvg(q=0.0, weighting=weighting, **settings())
    federation.assert_trees_close(fair.apply(state, cohort)[0], fedavg.apply(state, cohort)[0])
    some = {"model": federation.model(), "batches": fedsim.Batches(size=4), "weighting": weighting}
    fedsgd = algorithms.FedSGD(server_optimizer=optax.sgd(0.25), **some)
    fair = algorithms.QFedSGD(q=0.0, lipschitz=4.0, **some)
    expected = fedsgd.apply(fedsgd.init(jax.random.key(1)), cohort)[0].params
    federation.assert_trees_close(fair.apply(fair.init(jax.random.key(1)), cohort)[0].params, expected)


def test_the_lipschitz_estimate_follows_a_schedule():
    scheduled = settings(client_optimizer=lambda round: optax.sgd(RATE * 0.5 ** round.astype(float)))
    algorithm = algorithms.QFedAvg(q=2.0, **scheduled)
    state, cohorts = rounds(algorithm, 2)
    expected = state
    for r, cohort in enumerate(cohorts):
        state, _ = algorithm.apply(state, cohort)
        constant = settings(client_optimizer=optax.sgd(RATE * 0.5**r))
        expected, _ = algorithms.QFedAvg(q=2.0, lipschitz=2.0**r / RATE, **constant).apply(expected, cohort)
    federation.assert_trees_close(state, expected)


def test_the_larger_q_the_more_alike_are_the_clients_losses():
    """Two clients of opposite labels, one three times the other's size: q decides between the mean and the worst."""
    x = np.ones((8, 3), np.float32)
    y = np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int32)
    population = fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=[6, 2])
    gaps = []
    for q in (0.0, 2.0, 10.0):
        algorithm = algorithms.QFedAvg(q=q, **settings(batches=fedsim.Batches(size=8)))
        state = algorithm.init(jax.random.key(0))
        state, infos = algorithm.apply_rounds(state, [federation.cohort(population, round=r) for r in range(200)])
        small, large = np.sort(infos.clients["loss_before"][-1])
        gaps.append(large - small)
    assert gaps[0] > 0.9 and gaps[0] > 2 * gaps[1] > 4 * gaps[2]


def test_a_client_without_loss_counts():
    """F^(q-1) would be infinite there."""
    losses = {"loss": lambda examples, outputs: 0.0 * outputs[:, 0]}
    model = federation.model()
    model = type(model)(**{**vars(model), **losses})
    algorithm = algorithms.QFedAvg(q=0.5, **settings(model=model))
    state, (cohort,) = rounds(algorithm, 1)
    after, info = algorithm.apply(state, cohort)
    assert int(info.num_dropped) == 0 and int(info.num_aggregated) == 7
    federation.assert_trees_close(after.params, state.params)
