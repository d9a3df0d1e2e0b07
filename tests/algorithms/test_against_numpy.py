"""Compares rounds of each algorithm with NumPy in float64, which uses nothing of fedsim but the indices of the batches."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim

CLIENT_RATE, SERVER_RATE = 0.3, 0.5
BATCHES = fedsim.Batches(size=4, epochs=2)


def softmax_gradient(w, b, x, y):
    """Returns the mean gradient of the softmax cross-entropy of the linear model x w + b."""
    logits = x @ w + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y), p.mean(0)


def real_examples(dataset, key, batches=BATCHES):
    for batch in dataset.batches(batches, key):
        yield batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]


def numpy_movement(cohort, w, b, mu=0.0, weighting="examples"):
    """Returns the weighted mean over clients of start minus trained parameters (McMahan et al. 2017, Algorithm 1)."""
    movement_w, movement_b, total = np.zeros_like(w), np.zeros_like(b), 0.0
    for _, dataset, key in cohort:
        if not len(dataset):
            continue
        v, c = w.copy(), b.copy()
        for x, y in real_examples(dataset, key):
            grad_w, grad_b = softmax_gradient(v, c, x, y)
            v, c = v - CLIENT_RATE * (grad_w + mu * (v - w)), c - CLIENT_RATE * (grad_b + mu * (c - b))
        weight = len(dataset) if weighting == "examples" else 1
        movement_w, movement_b, total = movement_w + weight * (w - v), movement_b + weight * (b - c), total + weight
    return movement_w / total, movement_b / total


def start_and_cohorts(algorithm):
    state = algorithm.init(jax.random.key(1))
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), state.params["linear"])
    population = federation.data()
    return state, params["w"], params["b"], [federation.cohort(population, round=r) for r in range(3)]


def assert_same(state, w, b):
    np.testing.assert_allclose(np.asarray(state.params["linear"]["w"]), w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(state.params["linear"]["b"]), b, rtol=1e-5, atol=1e-6)


def settings(**options):
    return {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(CLIENT_RATE)} | options


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedavg_and_fedprox(weighting, mu):
    algorithm = fedsim.algorithms.FedProx(mu=mu, weighting=weighting, **settings(server_optimizer=optax.sgd(SERVER_RATE)))
    state, w, b, cohorts = start_and_cohorts(algorithm)
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
        move_w, move_b = numpy_movement(cohort, w, b, mu, weighting)
        w, b = w - SERVER_RATE * move_w, b - SERVER_RATE * move_b
    assert_same(state, w, b)


def test_fedsgd():
    algorithm = fedsim.algorithms.FedSGD(
        model=federation.model(), batches=fedsim.Batches(size=4, shuffle=False), server_optimizer=optax.sgd(SERVER_RATE)
    )
    state, w, b, cohorts = start_and_cohorts(algorithm)
    data = cohorts[0].data
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
        # If clients are weighted by size, the mean of their gradients is the gradient on all examples.
        grad_w, grad_b = softmax_gradient(w, b, data.columns["x"].astype(np.float64), data.columns["y"])
        w, b = w - SERVER_RATE * grad_w, b - SERVER_RATE * grad_b
    assert_same(state, w, b)


def test_half_precision_gradients_are_summed_in_float32():
    """A thousand batches have the gradient 1. In bfloat16, 256 + 1 is 256."""
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: examples["x"] * hk.get_parameter("w", [], jnp.bfloat16, init=jnp.zeros)),
        features={"x": jax.ShapeDtypeStruct((), jnp.bfloat16)},
        loss=lambda examples, outputs: outputs.astype(jnp.float32),
        metrics={},
    )
    data = fedsim.FederatedData.from_arrays({"x": np.ones(1000, jnp.bfloat16)}, sizes=[1000])
    algorithm = fedsim.algorithms.FedSGD(model=model, batches=fedsim.Batches(size=1), server_optimizer=optax.sgd(1.0))
    with jax.numpy_dtype_promotion("standard"):  # optax adds a float32 update to the parameters
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))
    (w,) = jax.tree.leaves(state.params)
    assert w.dtype == jnp.bfloat16 and float(w) == -1.0


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "FedDC", "Scaffnew"])
def test_sums_over_rounds_need_parameters_of_float32(name):
    model = federation.model()
    halved = dataclasses.replace(model, init=lambda key: jax.tree.map(lambda x: x.astype(jnp.float16), model.init(key)))
    algorithm = getattr(fedsim.algorithms, name)(**settings() | {"model": halved})
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match=f"{name} needs parameters of at least float32, got float16: it keeps sums over rounds"),
    ):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_moments_of_parameters_in_half_precision_are_float32():
    """In bfloat16, v = 1 of FedAdagrad would not change by squares of 0.05, of which 100 add up to 0.25."""
    algorithm = fedsim.algorithms.FedAdagrad(**settings(), tau=1.0, server_learning_rate=1.0)
    optimizer, params = algorithm.server_optimizer, {"w": jnp.zeros(3, jnp.bfloat16)}
    state = optimizer.init(params)
    for _ in range(100):
        step, state = optimizer.update({"w": jnp.full(3, 0.05, jnp.bfloat16)}, state, params)
    np.testing.assert_allclose(state.v["w"], 1 + 100 * float(jnp.bfloat16(0.05)) ** 2, rtol=1e-5)
    assert state.v["w"].dtype == jnp.float32 and step["w"].dtype == jnp.bfloat16


def test_fedavgm():
    algorithm = fedsim.algorithms.FedAvgM(server_learning_rate=SERVER_RATE, momentum=0.8, **settings())
    state, w, b, cohorts = start_and_cohorts(algorithm)
    velocity_w = velocity_b = 0.0
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
        move_w, move_b = numpy_movement(cohort, w, b)
        velocity_w, velocity_b = 0.8 * velocity_w + move_w, 0.8 * velocity_b + move_b
        w, b = w - SERVER_RATE * velocity_w, b - SERVER_RATE * velocity_b
    assert_same(state, w, b)


SECOND_MOMENTS = {
    "fedadagrad": lambda v, d: v + d**2,
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
    "fedyogi": lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_adaptive_servers_follow_algorithm_2(name):
    algorithm = fedsim.algorithms.get(name)(server_learning_rate=0.02, tau=0.01, **settings())
    state, w, b, cohorts = start_and_cohorts(algorithm)
    b1 = 0.0 if name == "fedadagrad" else 0.9
    moments = [np.zeros_like(w), np.zeros_like(b), np.full_like(w, 1e-4), np.full_like(b, 1e-4)]
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
        deltas = [-move for move in numpy_movement(cohort, w, b)]
        for i, delta in enumerate(deltas):
            moments[i] = b1 * moments[i] + (1 - b1) * delta
            moments[2 + i] = SECOND_MOMENTS[name](moments[2 + i], delta)
        w = w + 0.02 * moments[0] / (np.sqrt(moments[2]) + 0.01)
        b = b + 0.02 * moments[1] / (np.sqrt(moments[3]) + 0.01)
    assert_same(state, w, b)


@pytest.mark.slow
def test_client_learning_rate_schedule_over_rounds():
    """The schedule 0.3 * 0.5**round gives the result of three algorithms with these three rates, one per round."""
    scheduled = fedsim.algorithms.FedAvg(**settings(client_optimizer=lambda round: optax.sgd(0.3 * 0.5 ** round.astype(float))))
    state, _, _, cohorts = start_and_cohorts(scheduled)
    expected = state
    for r, cohort in enumerate(cohorts):
        state, _ = scheduled.apply(state, cohort)
        expected, _ = fedsim.algorithms.FedAvg(**settings(client_optimizer=optax.sgd(0.3 * 0.5**r))).apply(expected, cohort)
    federation.assert_trees_close(state, expected)


def test_uniform_weighting_differs_from_weighting_by_examples():
    """Without this, the tests of the two weightings above could pass with the wrong weighting."""
    states = []
    for weighting in ("examples", "uniform"):
        algorithm = fedsim.algorithms.FedAvg(weighting=weighting, **settings())
        state, _, _, cohorts = start_and_cohorts(algorithm)
        states.append(algorithm.apply(state, cohorts[0])[0].params["linear"]["w"])
    assert float(jnp.max(jnp.abs(states[0] - states[1]))) > 1e-3


def test_algorithms_reduce_to_fedavg_and_fedsgd():
    fedavg = fedsim.algorithms.FedAvg(**settings())
    state, _, _, cohorts = start_and_cohorts(fedavg)
    expected, _ = fedavg.apply(state, cohorts[0])
    prox, _ = fedsim.algorithms.FedProx(mu=0.0, **settings()).apply(state, cohorts[0])
    federation.assert_trees_close(prox, expected)
    momentum = fedsim.algorithms.FedAvgM(momentum=0.0, **settings())
    still, _ = momentum.apply(momentum.init(jax.random.key(1)), cohorts[0])
    federation.assert_trees_close(still.params, expected.params)
    # With one full batch and one step of rate r, FedAvg's update is r times FedSGD's gradient.
    full = fedsim.Batches(size=16, shuffle=False)
    one_step = dataclasses.replace(fedavg, batches=full)
    sgd = fedsim.algorithms.FedSGD(model=fedavg.model, batches=full, server_optimizer=optax.sgd(CLIENT_RATE))
    federation.assert_trees_close(one_step.apply(state, cohorts[0])[0].params, sgd.apply(state, cohorts[0])[0].params)
