"""Derivatives through rounds agree with finite differences."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim

EXECUTION = fedsim.Jit(differentiable=True)
POPULATION = federation.data()


def loss_after(algorithm, state, rounds=2, together=True):
    cohorts = [federation.cohort(POPULATION, round=round) for round in range(rounds)]
    if together:
        state, _ = algorithm.apply_rounds(state, cohorts)
    else:
        for cohort in cohorts:
            state, _ = algorithm.apply(state, cohort)
    data = POPULATION
    outputs = algorithm.model.apply_for_eval(state.params, {name: jnp.asarray(x) for name, x in data.columns.items()})
    return jnp.mean(algorithm.model.loss({"y": jnp.asarray(data.columns["y"])}, outputs))


def finite_difference(f, at, step):
    return (float(f(at + step)) - float(f(at - step))) / (2 * step)


def make(cls=fedsim.algorithms.FedAvg, **options):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "execution": EXECUTION}
    return cls(**(settings | {"batches": fedsim.Batches(size=4, epochs=2)} | options))


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_derivative_by_a_learning_rate_of_a_user_s_function(together):
    start = make().init(jax.random.key(0))

    def loss(rate):
        return loss_after(make(client_optimizer=optax.sgd(rate)), start, together=together)

    value, slope = jax.value_and_grad(loss)(0.3)
    assert float(slope) == pytest.approx(finite_difference(loss, 0.3, 1e-2), rel=2e-2)
    assert abs(float(slope)) > 1e-3
    plain = make(client_optimizer=optax.sgd(0.3), execution=fedsim.Jit())
    assert float(value) == pytest.approx(float(loss_after(plain, start, together=together)), rel=1e-5)
    compiled_value, compiled_slope = jax.jit(jax.value_and_grad(loss))(0.3)
    assert (float(compiled_value), float(compiled_slope)) == pytest.approx((float(value), float(slope)), rel=1e-4)


@pytest.mark.slow
def test_derivative_by_a_number_of_the_algorithm():
    start = make().init(jax.random.key(0))

    def loss(mu):
        return loss_after(dataclasses.replace(prox, mu=mu), start)

    prox = make(fedsim.algorithms.FedProx, client_optimizer=optax.sgd(0.3), mu=0.5)
    slope = jax.grad(loss)(0.5)
    assert float(slope) == pytest.approx(finite_difference(loss, 0.5, 1e-1), rel=2e-2)
    assert abs(float(slope)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("cls", [fedsim.algorithms.FedAvg, fedsim.algorithms.SCAFFOLD, fedsim.algorithms.Mime])
def test_derivative_by_the_initial_parameters(cls):
    """The derivative is along a random direction, also through clients' memories and through rounds of two calls."""
    algorithm = make(cls)
    start = algorithm.init(jax.random.key(0))
    draw = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), start.params)

    def loss(params):
        return loss_after(algorithm, start._replace(params=params), rounds=3)

    def along(t):
        return loss(jax.tree.map(lambda x, d: x + t * d, start.params, direction))

    slope = fedsim.tree.dot(jax.grad(loss)(start.params), direction)
    assert float(slope) == pytest.approx(finite_difference(along, 0.0, 1e-2), rel=2e-2)


@pytest.mark.slow
def test_the_result_equals_that_of_other_executions_for_cohorts_of_any_size():
    states = []
    for execution in (EXECUTION, fedsim.Auto(differentiable=True, lanes=3), fedsim.Jit()):
        algorithm = make(fedsim.algorithms.SCAFFOLD, execution=execution)
        state = algorithm.init(jax.random.key(0))
        for round, ids in enumerate((["client0", "client3", "client5"], ["client2"], ["client7", "client1"])):
            state, _ = algorithm.apply(state, fedsim.Cohort.of(federation.data(), ids, round=round))
        states.append(federation.plain(state))
    federation.assert_trees_close(states[0], states[2])
    federation.assert_trees_close(states[1], states[2])


def test_several_devices_are_rejected():
    with pytest.raises(ValueError, match="does not support differentiable=True"):
        fedsim.Pmap(differentiable=True)


def test_one_lane_becomes_two_and_each_client_runs_once():
    """Three clients have five slots. A group of a single client would crash XLA in a scan over rounds."""
    cohorts = [fedsim.Cohort.of(POPULATION, ["client0", "client2", "client3"], round=round) for round in range(2)]
    states = []
    for execution in (fedsim.Jit(), fedsim.Jit(lanes=1, differentiable=True)):
        algorithm = make(execution=execution, aggregator=fedsim.aggregators.Sum())
        states.append(algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)[0])
    federation.assert_trees_close(*states)
