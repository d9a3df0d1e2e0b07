"""FedProx with fixed and adaptive mu: agreement with rounds in float64, written from the paper, and stragglers."""

import federation
import jax
import numpy as np
import optax
import pytest
from linear_models import RATE, assert_close, assert_differ, clients, cohorts, gradient, run, settings, theta, with_ones

import fedsim
from fedsim.algorithms import AdaptiveFedProx, FedAvg, FedProx


def numpy_adaptive_prox(x, rounds, mu, step, patience):
    """Computes appendix C.3.3 of Li et al. 2020, with the loss of the round's clients at the broadcast parameters."""
    last, falls, course = np.nan, 0, []
    for cohort in rounds:
        ends, losses, weights = [], [], []
        for _, (inputs, y), batches in clients(cohort):
            p = np.exp(inputs @ x)
            losses.append(-np.log(p[np.arange(len(y)), y] / p.sum(1)).mean())
            w = x
            for batch in batches:
                w = w - RATE * (gradient(w, *batch) + mu * (w - x))
            ends.append(w)
            weights.append(len(y))
        loss, x = np.average(losses, weights=weights), np.average(ends, axis=0, weights=weights)
        falls = falls + 1 if loss < last else 0
        mu = mu + step if loss > last else mu
        if falls == patience:
            mu, falls = max(mu - step, 0), 0
        course.append(mu)
        last = loss
    return x, course


@pytest.mark.first(1)
@pytest.mark.parametrize(("count", "patience"), [(4, 5), (8, 2)])
def test_adaptive_fedprox_changes_mu_with_the_loss(count, patience):
    algorithm = AdaptiveFedProx(mu=0.15, patience=patience, **settings())
    rounds = list(cohorts(count=12, size=count))
    state, course = algorithm.init(jax.random.key(1)), []
    start = theta(state)
    for cohort in rounds:
        state, _ = algorithm.apply(state, cohort)
        course.append(float(state.mu))
    x, expected = numpy_adaptive_prox(start, rounds, 0.15, 0.1, patience)
    assert len(set(np.round(expected, 3))) >= 2  # mu changes: it increases with few clients and decreases to 0 with all
    np.testing.assert_allclose(course, expected, atol=1e-6)
    assert_close(theta(state), x)


def test_adaptive_fedprox_keeps_mu_in_a_round_without_clients_that_noise_hides():
    mechanism, population = fedsim.aggregators.GaussianMechanism(0.0, clip=9.0, denominator=8), federation.data()
    algorithm = AdaptiveFedProx(mu=0.15, aggregator=mechanism, weighting="uniform", **settings())
    before, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(population))
    empty = fedsim.Cohort(population, np.zeros(0, np.int32), 1, jax.random.key(0), slots=population.num_clients)
    after, _ = algorithm.apply(before, empty)
    assert (float(after.mu), float(after.loss), int(after.falls)) == (float(before.mu), float(before.loss), 0)
    assert float(before.loss) > 0.5


@pytest.mark.slow
def test_fedprox_and_adaptive_fedprox_with_mu_zero_are_fedavg():
    fedavg = run(FedAvg(**settings()), cohorts())[1]
    assert_close(run(FedProx(mu=0.0, **settings()), cohorts())[1], fedavg)
    first = [next(cohorts())]
    assert_close(run(AdaptiveFedProx(**settings()), first)[1], run(FedAvg(**settings()), first)[1])
    assert_differ(run(FedProx(mu=0.5, **settings()), cohorts())[1], fedavg)


def test_fedprox_reports_the_loss_without_the_proximal_term_and_minimizes_it_with_the_term():
    """Polyak steps need the value of the minimized loss: they are loss / |gradient|^2 along the gradient."""
    population, mu = federation.data(sizes=(10,)), 5.0
    batches = fedsim.Batches(size=10, epochs=2, shuffle=False)
    algorithm = FedProx(model=federation.model(), client_optimizer=optax.polyak_sgd(1.0), batches=batches, mu=mu)
    state = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(state, federation.cohort(population))
    x, y = with_ones(population.client(0)["x"]), population.client(0)["y"]
    start = theta = np.concatenate([state.params["linear"]["w"], state.params["linear"]["b"][None]]).astype(np.float64)
    losses = []
    for _ in range(2):
        logits = x @ theta
        losses.append(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))
        value, slope = losses[-1] + mu / 2 * np.sum((theta - start) ** 2), gradient(theta, x, y) + mu * (theta - start)
        theta = theta - min(1.0, value / np.sum(slope**2)) * slope
    np.testing.assert_allclose(after.params["linear"]["w"], theta[:-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(info.clients["loss"][0], np.mean(losses), rtol=1e-5)


def test_fedprox_uses_partial_work_of_stragglers_or_drops_them():
    """A straggler's update is that of fewer FedProx steps. A cohort without the straggler has no such update."""
    population = federation.data(sizes=(8, 8, 8))
    work = np.array([1.0, 0.25, 1.0], np.float32)
    late = fedsim.Cohort(population, np.arange(3), 0, fedsim.rng.root(0), work=work)
    start, end, _ = run(FedProx(mu=0.3, **settings()), [late])
    ends = []
    for (_, _, batches), part in zip(clients(late), work, strict=True):
        w = start
        for batch in batches[: int(len(batches) * part)]:
            w = w - RATE * (gradient(w, *batch) + 0.3 * (w - start))
        ends.append(w)
    assert_close(end, np.mean(ends, axis=0))
    dropped = fedsim.Cohort(population, np.array([0, 2]), 0, fedsim.rng.root(0), slots=3)
    assert_close(run(FedProx(mu=0.3, **settings()), [dropped])[1], (ends[0] + ends[2]) / 2)
