"""SCAFFOLD: agreement with rounds in float64, written from the paper, special cases, and the paper's theory."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_models import (
    RATE,
    SERVER_RATE,
    START,
    STEP,
    assert_close,
    assert_differ,
    clients,
    cohorts,
    curve,
    gradient,
    on_quadratics,
    rounds_to,
    run,
    settings,
    theta,
)

import fedsim
from fedsim.algorithms import SCAFFOLD, FedAvg, FedDyn


def numpy_scaffold(x, rounds, option, weight_of, population_weight):
    """Computes Algorithm 1 of Karimireddy et al. 2020."""
    c, kept = np.zeros_like(x), {}
    for cohort in rounds:
        moves, changes, weights = [], [], []
        for i, everything, batches in clients(cohort):
            c_i, y = kept.get(i, np.zeros_like(x)), x
            for batch in batches:
                y = y - RATE * (gradient(y, *batch) - c_i + c)
            kept[i] = gradient(x, *everything) if option == "I" else c_i - c + (x - y) / (len(batches) * RATE)
            moves.append(y - x)
            changes.append(kept[i] - c_i)
            weights.append(weight_of(everything))
        x = x + SERVER_RATE * np.average(moves, axis=0, weights=weights)
        c = c + sum(weights) / population_weight * np.average(changes, axis=0, weights=weights)
    return x, c


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_follows_algorithm_1(option, weighting):
    algorithm = SCAFFOLD(control_variate=option, weighting=weighting, **settings(server_optimizer=optax.sgd(SERVER_RATE)))
    start, end, state = run(algorithm, cohorts())
    sizes = federation.data().sizes
    weight_of, whole = (lambda _: 1, np.count_nonzero(sizes)) if weighting == "uniform" else (lambda e: len(e[1]), sizes.sum())
    x, c = numpy_scaffold(start, cohorts(), option, weight_of, whole)
    assert_close(end, x)
    assert_close(theta(type("", (), {"params": state.server.control})), c)
    # Another ratio of cohort to population gives another result.
    assert_differ(numpy_scaffold(start, cohorts(), option, weight_of, 2 * whole)[0], x)


@pytest.mark.first(2)
@pytest.mark.parametrize(("cls", "name"), [(SCAFFOLD, "control"), (FedDyn, "h")])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_server_s_control_variate_is_the_mean_of_the_clients(cls, name, weighting):
    population = federation.data()
    on_the_device = settings(execution=fedsim.Jit(memory="resident"))
    _, _, state = run(cls(weighting=weighting, **on_the_device), cohorts(population, 6))
    rows, seen = jax.device_get(state.clients)
    assert np.count_nonzero(seen) > 4
    weights = population.sizes if weighting == "examples" else (population.sizes > 0)
    kept = jax.tree.map(lambda row: np.where(np.reshape(seen, (-1,) + (1,) * (row.ndim - 1)), row, 0), rows[0])
    mean = jax.tree.map(lambda row: np.average(row, axis=0, weights=weights).astype(np.float32), kept)
    federation.assert_trees_close(mean, getattr(state.server, name), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_scaffold_is_fedavg_in_the_first_round_and_with_identical_clients():
    first = next(cohorts())
    _, scaffold, _ = run(SCAFFOLD(**settings()), [first])
    _, fedavg, _ = run(FedAvg(weighting="uniform", **settings()), [first])
    assert_close(scaffold, fedavg)
    one = federation.data(sizes=(6,)).columns
    equal = fedsim.FederatedData.from_arrays({k: np.concatenate([v, v, v]) for k, v in one.items()}, sizes=(6, 6, 6))
    alike = settings(batches=fedsim.Batches(size=6, epochs=5, shuffle=False))
    rounds = [federation.cohort(equal, round=r) for r in range(4)]
    for option in ("I", "II"):
        assert_close(run(SCAFFOLD(control_variate=option, **alike), rounds)[1], run(FedAvg(**alike), rounds)[1])
    unlike = [federation.cohort(round=r) for r in range(4)]
    assert_differ(run(SCAFFOLD(**settings()), unlike)[1], run(FedAvg(weighting="uniform", **settings()), unlike)[1])


@pytest.mark.slow
def test_scaffold_s_control_variate_with_momentum_is_a_mean_of_gradients():
    """The gradient is the same everywhere: every weighted mean of gradients equals it, a wrong normalization does not."""
    model = dataclasses.replace(
        federation.model(), loss=lambda examples, outputs: outputs[:, 0] * 3.0 + jnp.zeros_like(examples["x"][:, 0])
    )
    population = federation.data(sizes=(6, 3))
    for optimizer in (optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.sgd(optax.linear_schedule(0.1, 0.02, 3), 0.5, nesterov=True)):
        algorithm = SCAFFOLD(**settings(model=model, client_optimizer=optimizer))
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
        np.testing.assert_allclose(state.server.control["linear"]["b"], [3, 0, 0, 0], rtol=1e-5)


def test_scaffold_rejects_an_optimizer_that_is_not_linear():
    partly = optax.multi_transform({"w": optax.sgd(0.1), "b": optax.sgd(0.2)}, lambda params: {"linear": {"w": "w", "b": "b"}})
    for optimizer in (
        optax.sign_sgd(0.1),
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.1)),
        lambda round: optax.sign_sgd(0.1 * round.astype(float)),
        optax.polyak_sgd(),
        partly,
    ):
        algorithm = SCAFFOLD(**settings(client_optimizer=optimizer))
        with pytest.raises(ValueError, match="SCAFFOLD's option II needs a client_optimizer that is linear"):
            algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    algorithm = SCAFFOLD(control_variate="I", **settings(client_optimizer=optax.sign_sgd(0.01)))
    algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.slow
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_on_two_quadratics_does_not_depend_on_their_difference_and_gains_from_local_steps(option):
    sgd = rounds_to(START**2 / 2 * (1 - STEP) ** (2 * np.arange(90)))
    assert sgd == rounds_to(curve(on_quadratics(FedAvg, 1), 1, rounds=70)) == 63  # one step per client is the gradient of f
    took = {}
    for steps in (2, 10):
        algorithm = on_quadratics(SCAFFOLD, steps, control_variate=option)
        curves = [curve(algorithm, G, rounds=36) for G in (1, 10, 100)]
        for f in curves[1:]:
            np.testing.assert_allclose(np.sqrt(f), np.sqrt(curves[0]), rtol=0, atol=5e-5)  # float32 rounding at G = 100
        (took[steps],) = {rounds_to(f) for f in curves}
    # The paper reports 2 and 5 times fewer rounds.
    assert (took, sgd / took[2], sgd / took[10]) == ({2: 31, 10: 10}, pytest.approx(2, abs=0.1), pytest.approx(6.3, abs=0.1))


@pytest.mark.slow
def test_fedavg_on_two_quadratics_gets_slower_with_their_difference_and_with_local_steps():
    def numpy_fedavg(G, steps, rate, rounds):
        x, f = START, []
        for _ in range(rounds):
            f.append(x**2 / 2)
            y_1 = y_2 = x
            for _ in range(steps):
                y_1, y_2 = y_1 - rate * (2 * y_1 + G), y_2 + rate * G
            x = (y_1 + y_2) / 2
        return np.array(f)

    for steps in (2, 10):
        algorithm, ends = on_quadratics(FedAvg, steps), []
        for G in (1, 10, 100):
            f = curve(algorithm, G, rounds=60)
            np.testing.assert_allclose(f, numpy_fedavg(G, steps, STEP, 60), rtol=1e-4)
            ends.append(f[-1])
        assert min(ends) > 1e-3  # SGD and SCAFFOLD reach 1e-6
        assert np.allclose(np.divide(ends[1:], ends[:-1]), 100, rtol=0.02)  # the distance to the optimum is proportional to G
    # With the best rate for each G, a larger G needs more rounds to reduce f to a hundredth. At the same rate, more local steps
    # do not give a lower final f.
    rates = 0.5 ** np.arange(1, 14)
    best = [min(rounds_to(numpy_fedavg(G, 10, rate, 5000), 0.005) for rate in rates) for G in (1, 10, 100)]
    assert best[0] < best[1] / 3 and best[1] < best[2] / 3
    assert numpy_fedavg(1, 10, STEP, 90)[-1] > 10 * numpy_fedavg(1, 2, STEP, 90)[-1]
