"""The exponential moving average of the global model is evaluated, and does not change training."""

import dataclasses

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim

EXECUTIONS = {"jit": fedsim.Jit(), "pmap": fedsim.Pmap(devices=2), "debug": fedsim.Debug()}


def make(**changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4)} | changes
    return fedsim.algorithms.FedAvgM(**settings)


def rounds(algorithm, number=4):
    state, states = algorithm.init(jax.random.key(0)), []
    for round in range(number):
        state, _ = algorithm.apply(state, federation.cohort(round=round))
        states.append(state)
    return states


@pytest.mark.slow
@pytest.mark.parametrize(("how", "decay"), [*((how, 0.8) for how in EXECUTIONS), ("jit", 0.0)])
def test_the_average_is_over_rounds_and_does_not_change_training(how, decay):
    plain = rounds(make(execution=EXECUTIONS[how]))
    states = rounds(make(execution=EXECUTIONS[how], averaging=decay))
    for r, (state, expected) in enumerate(zip(states, plain, strict=True)):
        federation.assert_trees_close(state.server, expected)
        weights = decay ** np.arange(r, -1.0, -1.0)
        average = jax.tree.map(
            lambda *x, w=weights: np.average(np.stack(x), axis=0, weights=w), *[s.params for s in plain[: r + 1]]
        )
        federation.assert_trees_close(state.params, average)


def test_the_average_is_what_is_evaluated():
    algorithm = make(averaging=0.9, execution=fedsim.Jit())
    population = federation.data()
    sampler = fedsim.UniformSampler(population, clients=5, seed=0)
    result = fedsim.experiment.run(algorithm, sampler, rounds=5, test_data=population, progress=False)
    average, last = (
        fedsim.evaluate(algorithm.model, params, population).overall["loss"]
        for params in (result.state.params, result.state.server.params)
    )
    assert result.evaluation.overall["loss"] == pytest.approx(average)
    assert abs(average - last) > 1e-4


def test_a_round_without_updates_does_not_change_the_average():
    algorithm = make(averaging=0.5, execution=fedsim.Jit())
    (*_, before) = rounds(algorithm, 2)
    empty = fedsim.Cohort.of(federation.data(), ["client1"], round=2)
    after, _ = algorithm.apply(before, empty)
    federation.assert_trees_equal(before, after)


@pytest.mark.parametrize("averaging", [1.0, -0.1, float("nan")])
def test_a_decay_out_of_range_is_rejected(averaging):
    with pytest.raises(ValueError, match="Expected 0 <= averaging < 1, or None, got averaging="):
        make(averaging=averaging)


def test_averaging_needs_parameters():
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Sum(fedsim.Algorithm):
        def init(self, key):
            return jax.numpy.zeros(())

        def client_update(self, shared, client):
            return fedsim.ClientUpdate(shared, jax.numpy.float32(1))

    algorithm = Sum(batches=fedsim.Batches(size=2), averaging=0.5)
    with pytest.raises(ValueError, match="averaging=0.5 averages state.params, but the state of Sum has no params"):
        algorithm.with_memory(algorithm.init(jax.random.key(0)), federation.data())


def test_averaging_refuses_parameters_in_half_precision():
    model = federation.model()
    halved = dataclasses.replace(model, init=lambda key: jax.tree.map(lambda x: x.astype("bfloat16"), model.init(key)))
    algorithm = make(model=halved, averaging=0.9)
    start = algorithm.init(jax.random.key(0))
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match="averaging=0.9 needs parameters of at least float32, got bfloat16 in the state"),
    ):
        algorithm.apply(start, federation.cohort())
