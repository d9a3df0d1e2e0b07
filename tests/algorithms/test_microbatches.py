"""Gradients that are summed over the microbatches of a batch: equal to those of the whole batch, in less memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.algorithms import LocalTraining

SIZES = [21, 3, 40, 8]  # Batches of 16 and microbatches of 5 divide none of them.


def softmax_regression():
    return fedsim.Model.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)},
        lambda params, x: x @ params["w"] + params["b"][None],
        features={"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
        num_classes=3,
    )


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(SIZES), 4)).astype(np.float32)
    return fedsim.FederatedData.from_arrays({"x": x, "y": draw.integers(3, size=len(x)).astype(np.int32)}, sizes=SIZES)


def algorithm_of(name, microbatch, execution=None, model=None, **options):
    algorithms = {**fedsim.algorithms.ALGORITHMS, **fedsim.decentralized.ALGORITHMS}
    options = {"client_optimizer": optax.sgd(0.5), **options}
    batches = fedsim.Batches(size=16, epochs=2, microbatch=microbatch)
    model = model or softmax_regression()
    return algorithms[name](model=model, batches=batches, execution=execution or fedsim.Jit(), **options)


def trained(algorithm, data):
    state = algorithm.init(jax.random.key(0))
    state, info = algorithm.apply_rounds(state, [fedsim.Cohort.of(data, data.client_ids, round=i) for i in range(2)])
    return state.params, info


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"execution": fedsim.Jit(lanes=1)}),
        ("scaffold", {"execution": fedsim.Jit(lanes=3)}),
        ("perfedavg", {}),  # divides batches itself
        ("scaffold", {"control_variate": "I"}),  # has full gradients
        ("qfedavg", {}),  # has the losses of whole clients
        ("mime", {}),
    ],
)
def test_microbatches_do_not_change_the_result(data, name, options):
    (whole, info), (summed, other) = (trained(algorithm_of(name, size, **options), data) for size in (None, 5))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), whole, summed)
    np.testing.assert_allclose(info.clients["loss"], other.clients["loss"], rtol=0, atol=1e-6)
    assert (np.abs(whole["w"] - algorithm_of(name, None).init(jax.random.key(0)).params["w"]) > 0.01).any()


def test_a_step_of_a_partial_batch_is_that_of_numpy():
    draw = np.random.default_rng(1)
    x, w, mask = draw.normal(size=(11, 2)).astype(np.float32), draw.normal(size=2).astype(np.float32), np.arange(11) < 7

    def loss(w, batch):
        return fedsim.metrics.masked_mean(jnp.square(batch.examples["x"] @ w), batch.mask)

    training = LocalTraining(loss, fedsim.Batches(size=11, microbatch=3))
    batch = fedsim.Batch({"x": jnp.asarray(x)}, jnp.asarray(mask), jax.random.key(0), 0)
    value, gradient = training.loss_and_gradient(jnp.asarray(w), batch)
    real = x[:7]
    np.testing.assert_allclose(value, np.mean((real @ w) ** 2), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 / 7 * real.T @ (real @ w), rtol=1e-6)
    value, gradient = training.loss_and_gradient(jnp.asarray(w), batch._replace(mask=jnp.zeros(11, bool)))
    assert value == 0 and not gradient.any()


def test_each_microbatch_has_its_own_random_draws():
    def noise(params, batch):
        return params * jnp.mean(jax.random.normal(batch.key, (4,)))

    training = LocalTraining(noise, fedsim.Batches(size=8, microbatch=4))
    key = jax.random.key(5)
    batch = fedsim.Batch({"x": jnp.zeros(8)}, jnp.ones(8, bool), key, 0)
    draws = [float(jnp.mean(jax.random.normal(jax.random.fold_in(key, i), (4,)))) for i in range(2)]
    np.testing.assert_allclose(training.loss_and_gradient(jnp.float32(1), batch)[1], np.mean(draws), rtol=1e-6)


def test_microbatches_take_less_memory():
    """Activations of a hidden layer with 4,096 units are most of what a gradient of 512 examples needs."""
    model = fedsim.models.dense([8, 8, 1], 10, hidden=(4096, 64))
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = fedsim.Batch(
        {"x": jnp.zeros([512, 8, 8, 1]), "y": jnp.zeros(512, jnp.int32)}, jnp.ones(512, bool), jax.random.key(0), 0
    )
    needed = []
    for microbatch in (None, 32):
        training = LocalTraining(model.train_loss, fedsim.Batches(size=512, microbatch=microbatch))
        compiled = jax.jit(training.loss_and_gradient).lower(params, batch).compile()
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
    assert needed[0] > 2 * 512 * 4096 * 4 and needed[1] < needed[0] / 4, needed


def test_the_plan_counts_all_microbatches():
    data = fedsim.datasets.load("digits", clients=4).train
    whole, summed = (
        fedsim.plan(
            algorithm_of("fedavg", size, execution=fedsim.Debug(), model=fedsim.models.digits_dense()),
            fedsim.Cohort.of(data, data.client_ids[:2]),
            measure=False,
        )
        for size in (None, 4)
    )
    assert whole.steps_per_round == summed.steps_per_round
    assert whole.flops_per_round == pytest.approx(summed.flops_per_round, rel=0.15)


@pytest.mark.parametrize("name", ["FixMatch", "PFedMe", "SplitFed"])
def test_algorithms_with_gradients_of_their_own_refuse_microbatches(name):
    with pytest.raises(ValueError, match=f"{name}, got microbatch=5: leave it out"):
        algorithm_of(name.lower(), 5)


def test_what_needs_whole_batches_is_refused(data):
    with pytest.raises(ValueError, match="Expected microbatch <= size, got microbatch=5 and size=4"):
        fedsim.Batches(size=4, microbatch=5)
    with pytest.raises(ValueError, match="running statistics, which are those of whole batches, got microbatch=5"):
        algorithm_of("fedavg", 5, model=fedsim.models.resnet8(norm="batch"))
    with pytest.raises(ValueError, match="Histogram, got microbatch=2"):
        fedsim.algorithms.Histogram(bins=2, batches=fedsim.Batches(size=4, microbatch=2))
    with pytest.raises(ValueError, match="needs the loss and microbatch=5"):
        trained(algorithm_of("fedavg", 5, client_optimizer=optax.polyak_sgd()), data)


def test_microbatches_of_a_run(tmp_path):
    config = fedsim.experiment.RunConfig(model="digits_logistic", batch_size=20, microbatch=8)
    assert fedsim.experiment.build(config, fedsim.experiment.Settings()).algorithm.batches.microbatch == 8
    with pytest.raises(ValueError, match="microbatch <= size"):
        fedsim.experiment.RunConfig(batch_size=20, microbatch=21)
