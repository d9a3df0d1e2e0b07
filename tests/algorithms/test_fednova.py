"""FedNova: agreement with rounds in float64, written from the paper, and its fixed point."""

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_models import RATE, SERVER_RATE, assert_close, assert_differ, clients, cohorts, gradient, run, settings

import fedsim
from fedsim.algorithms import FedAvg, FedNova, FedProx


def numpy_nova(x, rounds, rho, mu):
    """Computes Algorithm 1 of Wang et al. 2020, with the closed forms of a_i for momentum rho or a proximal term."""
    for cohort in rounds:
        directions, lengths, weights = [], [], []
        for _, everything, batches in clients(cohort):
            y, velocity, K = x, 0.0, len(batches)
            for batch in batches:
                velocity = rho * velocity + gradient(y, *batch) + mu * (y - x)
                y = y - RATE * velocity
            k = np.arange(K)
            a = (1 - rho ** (K - k)) / (1 - rho) if rho else (1 - RATE * mu) ** (K - 1 - k)
            directions.append((x - y) / a.sum())
            lengths.append(a.sum())
            weights.append(len(everything[1]))
        x = x - SERVER_RATE * np.average(lengths, weights=weights) * np.average(directions, axis=0, weights=weights)
    return x


@pytest.mark.first(1)
@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.8)])
def test_fednova_follows_algorithm_1(rho, mu):
    optimizers = {"client_optimizer": optax.sgd(RATE, rho or None), "server_optimizer": optax.sgd(SERVER_RATE)}
    start, end, _ = run(FedNova(mu=mu, **settings(**optimizers)), cohorts())
    assert_close(end, numpy_nova(start, cohorts(), rho, mu))
    assert_differ(end, run(FedProx(mu=mu, **settings(**optimizers)), cohorts())[1])


@pytest.mark.slow
def test_fednova_with_equal_steps_is_fedavg():
    equal = settings(batches=fedsim.Batches(size=3, steps=4), client_optimizer=optax.sgd(RATE, 0.9))
    assert_close(run(FedNova(**equal), cohorts())[1], run(FedAvg(**equal), cohorts())[1])
    assert_close(run(FedNova(mu=0.4, **equal), cohorts())[1], run(FedProx(mu=0.4, **equal), cohorts())[1])


def test_fednova_converges_to_the_optimum_and_fedavg_does_not():
    """One client takes one step on a quadratic around -1, the other nine steps on one around 1. The optimum is 0."""
    x = np.array([-1.0] + [1.0] * 9, np.float32)
    population = fedsim.FederatedData.from_arrays({"x": x}, sizes=(1, 9))
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [1], init=jnp.zeros)),
        features={"x": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, w: jnp.square(examples["x"] - w) / 2,
        metrics={},
    )
    ends = {}
    for cls in (FedNova, FedAvg):
        algorithm = cls(model=model, batches=fedsim.Batches(size=1), client_optimizer=optax.sgd(0.01), weighting="uniform")
        cohort_of = [federation.cohort(population, round=r) for r in range(300)]
        state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohort_of)
        ends[cls] = float(jax.tree.leaves(state.params)[0][0])
    assert abs(ends[FedNova]) < 0.03
    assert ends[FedAvg] > 0.75
