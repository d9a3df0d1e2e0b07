"""Per-FedAvg and Reptile: agreement with NumPy, and special cases that equal FedAvg."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from network_models import RATE, cohorts, make, numpy_gradient, numpy_rounds, plus, real_examples, run, start, weighted_mean

import fedsim
from fedsim import algorithms


@pytest.mark.first(1)
@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_per_fedavg_follows_algorithm_1(variant):
    alpha, delta, parts = 0.2, 0.05, 2 if variant == "first_order" else 3
    batches = fedsim.Batches(size=7, epochs=2)
    algorithm = make(algorithms.PerFedAvg, alpha=alpha, delta=delta, variant=variant, batches=batches)

    def slope(w, x, y, part):
        own = slice(part, None, parts)
        return numpy_gradient(w, x[own], y[own]) if len(y[own]) else plus(w, -1, w)

    def train(client_id, dataset, key, w):
        for batch in real_examples(dataset, key, batches):
            step = g = slope(plus(w, -alpha, slope(w, *batch, 0)), *batch, 1)
            if variant == "hessian_free":
                ahead, behind = (slope(plus(w, d, g), *batch, 2) for d in (delta, -delta))
                step = plus(g, -alpha / (2 * delta), plus(ahead, -1, behind))
            w = plus(w, -RATE, step)
        return w

    w = numpy_rounds(start(algorithm), train)
    federation.assert_trees_close(run(algorithm)[0].params, w, atol=5e-6)


@pytest.mark.slow
def test_hessian_free_approximates_the_exact_meta_gradient():
    """The meta-objective is w -> f(w - alpha grad f(w)). All thirds of the batch contain the same examples."""
    algorithm = make(algorithms.PerFedAvg, alpha=0.3, variant="hessian_free", batches=fedsim.Batches(size=12, shuffle=False))
    once = federation.data(sizes=(4,))
    population = fedsim.FederatedData.from_arrays({k: np.repeat(c, 3, axis=0) for k, c in once.columns.items()}, sizes=(12,))
    ((_, dataset, key),) = federation.cohort(population)
    (batch,) = dataset.batches(algorithm.batches, key)
    state = algorithm.init(jax.random.key(0))
    model = algorithm.model

    def meta(params):
        slope = jax.grad(model.train_loss)(params, batch)
        return model.train_loss(jax.tree.map(lambda p, g: p - 0.3 * g, params, slope), batch)

    after, _ = algorithm.apply(state, federation.cohort(population))
    expected = jax.tree.map(lambda p, g: p - RATE * g, state.params, jax.grad(meta)(state.params))
    federation.assert_trees_close(after.params, expected, rtol=1e-3, atol=1e-4)
    first = dataclasses.replace(algorithm, variant="first_order")
    farther, _ = first.apply(state, federation.cohort(population))
    gap = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (farther.params, expected)), strict=True))
    assert gap > 1e-3


@pytest.mark.first(1)
@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_per_fedavg_with_alpha_zero_is_fedavg_on_a_part_of_every_batch(variant):
    """All parts of a batch contain the same examples, so the gradient of a part is that of the batch."""
    parts = 2 if variant == "first_order" else 3
    once = federation.data()
    columns = {name: np.repeat(column, parts, axis=0) for name, column in once.columns.items()}
    population = fedsim.FederatedData.from_arrays(columns, sizes=parts * once.sizes)
    batches = fedsim.Batches(size=4 * parts, shuffle=False)
    states = []
    for algorithm in (
        make(algorithms.PerFedAvg, alpha=0.0, variant=variant, batches=batches),
        make(algorithms.FedAvg, batches=batches),
    ):
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))[0])
    federation.assert_trees_close(*states)


@pytest.mark.slow
def test_per_fedavg_is_evaluated_after_one_personal_step():
    algorithm, data = make(algorithms.PerFedAvg, alpha=0.2), federation.data()
    state, _ = run(algorithm)
    found = fedsim.evaluate_personalized(algorithm, state, data, data, seed=3)
    step = make(algorithms.FedAvg, batches=fedsim.Batches(size=4, max_steps=1), client_optimizer=optax.sgd(0.2))
    federation.assert_trees_close(
        found, fedsim.evaluate_personalized(make(algorithms.FedAvg), state, data, data, fine_tune=step, seed=3)
    )
    assert found.overall != fedsim.evaluate(algorithm.model, state.params, data).overall


def test_the_personal_step_of_per_fedavg_moves_what_clients_keep():
    data, model = federation.data(sizes=(3, 5)), federation.model().with_parts(kept="linear/b")
    algorithm, fedavg = make(algorithms.PerFedAvg, alpha=0.2, model=model), make(algorithms.FedAvg, model=model)
    state = algorithm.init(jax.random.key(0))
    found = fedsim.evaluate_personalized(algorithm, state, data, data)
    step = make(algorithms.FedAvg, model=model, batches=fedsim.Batches(size=4, max_steps=1), client_optimizer=optax.sgd(0.2))
    expected = fedsim.evaluate_personalized(fedavg, state, data, data, fine_tune=step)
    np.testing.assert_allclose(found.overall["loss"], expected.overall["loss"], rtol=1e-6)


def test_per_fedavg_needs_batches_that_can_be_split():
    algorithm = make(algorithms.PerFedAvg, variant="hessian_free", batches=fedsim.Batches(size=2))
    with pytest.raises(
        ValueError, match="Expected batches of at least 3 examples, because variant='hessian_free' splits .* got batches of 2"
    ):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_reptile_is_fedavg_with_uniform_weights_and_a_server_rate():
    reptile = make(algorithms.Reptile, server_learning_rate=0.4)
    fedavg = make(algorithms.FedAvg, server_optimizer=optax.sgd(0.4), weighting="uniform")
    federation.assert_trees_close(run(reptile)[0].params, run(fedavg)[0].params)


def test_reptile_follows_algorithm_2_with_a_decreasing_rate():
    algorithm = make(algorithms.Reptile, server_learning_rate=0.8, decay_rounds=4)
    w = start(algorithm)
    for r, cohort in enumerate(cohorts(federation.data())):
        moves = []
        for _, dataset, key in cohort:
            x_i = w
            for x, y in real_examples(dataset, key):
                x_i = plus(x_i, -RATE, numpy_gradient(x_i, x, y))
            moves += [(1, plus(x_i, -1, w))] if len(dataset) else []
        w = plus(w, 0.8 * (1 - r / 4), weighted_mean(moves))
    federation.assert_trees_close(run(algorithm)[0].params, w)
