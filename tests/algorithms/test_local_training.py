"""`LocalTraining` against NumPy: steps on 1/2 (w - x)², terms, and what is reported."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import tree
from fedsim.algorithms import LocalTraining

X = [np.array([1.0, 3.0]), np.array([-2.0, 5.0])]
RATE, MU, CENTER = 0.25, 0.5, 4.0


def loss(params, batch):
    return fedsim.metrics.masked_mean(0.5 * jnp.square(batch.examples["x"] - params["w"]), batch.mask)


TRAINING = LocalTraining(loss, fedsim.Batches(size=2), optax.sgd(RATE))
CENTERED = {"w": jnp.float32(CENTER)}


def distance(params):
    return MU / 2 * tree.squared_norm(tree.subtract(params, CENTERED))


def after_steps(training, start=0.0):
    local = training.start({"w": jnp.float32(start)})
    for number, x in enumerate(X):
        batch = fedsim.Batch({"x": jnp.asarray(x, jnp.float32)}, jnp.ones(2, bool), jax.random.key(0), number)
        local = training.step(local, batch)
    return float(local.params["w"]), float(local.loss.result())


def numpy_steps(mu=0.0, linear=0.0, w=0.0):
    losses = []
    for x in X:
        losses.append(np.mean(0.5 * (x - w) ** 2))
        w -= RATE * (w - x.mean() + mu * (w - CENTER) + linear)
    return w, np.mean(losses)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (TRAINING, numpy_steps()),
        (TRAINING.with_term(distance), numpy_steps(mu=MU)),
        (TRAINING.with_proximal_term(MU, CENTERED), numpy_steps(mu=MU)),
        (TRAINING.with_term(distance).with_term(distance), numpy_steps(mu=2 * MU)),
        (TRAINING.with_term(None, lambda params: {"w": jnp.float32(0.3)}), numpy_steps(linear=0.3)),
        (dataclasses.replace(TRAINING.with_term(distance), gradient=TRAINING.loss_and_gradient), numpy_steps(mu=MU)),
    ],
)
def test_steps_minimize_the_loss_and_its_terms_and_report_the_loss(training, expected):
    np.testing.assert_allclose(after_steps(training), expected, rtol=1e-6)


def test_a_term_without_value_and_gradient_is_refused():
    with pytest.raises(ValueError, match="Expected a value or a gradient of the term, got value=None"):
        TRAINING.with_term(None)


def test_another_loss_replaces_the_gradient_too():
    doubled = dataclasses.replace(TRAINING, loss=lambda params, batch: 2 * loss(params, batch), optimizer=optax.sgd(RATE / 2))
    w, reported = numpy_steps()
    np.testing.assert_allclose(after_steps(doubled), (w, 2 * reported), rtol=1e-6)


def test_an_optimizer_that_needs_the_value_gets_that_of_the_loss_and_its_terms():
    """The Polyak step of f is f / f'² along f'. Here f is the loss plus the term, at w = 0."""
    x = X[0]
    value, slope = np.mean(0.5 * x**2) + MU / 2 * CENTER**2, -x.mean() - MU * CENTER
    training = dataclasses.replace(TRAINING.with_term(distance), optimizer=optax.polyak_sgd(max_learning_rate=10.0))
    batch = fedsim.Batch({"x": jnp.asarray(x, jnp.float32)}, jnp.ones(2, bool), jax.random.key(0), 0)
    local = training.step(training.start({"w": jnp.float32(0)}), batch)
    np.testing.assert_allclose(float(local.params["w"]), -value / slope**2 * slope, rtol=1e-5)


def test_means_over_a_client_leave_terms_out():
    data = federation.data(sizes=(5,))
    model = federation.model()
    training = LocalTraining(model.train_loss, fedsim.Batches(size=2)).with_term(tree.squared_norm)

    def work(params, client):
        return training.mean_loss(client, params), *training.full_gradient(client, params)

    params = model.init(jax.random.key(0))
    mean, same, gradient = fedsim.map_clients(work, params, fedsim.Cohort.of(data, ["client0"]))
    whole = fedsim.Batch({k: jnp.asarray(v) for k, v in data.columns.items()}, jnp.ones(5, bool), jax.random.key(0), 0)
    expected, slope = jax.value_and_grad(model.train_loss)(params, whole)
    np.testing.assert_allclose([mean[0], same[0]], [expected] * 2, rtol=1e-5)
    federation.assert_trees_close(jax.tree.map(lambda x: x[0], gradient), slope)
