"""MOON, FedProto and FedDistill: agreement with rounds in float64, written from the papers, and models of other forms."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from network_models import (
    BATCHES,
    RATE,
    client_memories,
    cohorts,
    make,
    network,
    numpy_gradient,
    numpy_rounds,
    plus,
    real_examples,
    run,
)
from network_models import start as start_of

import fedsim
from fedsim.algorithms import MOON, FedAvg, FedDistill, FedProto
from fedsim.algorithms._representation import features_of


def hidden(params, x):
    return np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])


def through_hidden(params, x, slope):
    """Returns the gradient of a mean over examples whose gradients with respect to their hidden layers are ``slope``."""
    back = slope * (1 - hidden(params, x) ** 2) / len(x)
    zeros = jax.tree.map(np.zeros_like, params["linear_1"])
    return {"linear": {"w": x.T @ back, "b": back.sum(0)}, "linear_1": zeros}


def contrast_gradient(z, of_server, of_last, temperature):
    """Returns the gradient in each row of z of -log(a / (a + b)), the exponentials of two cosines over the temperature."""

    def cosine(other):
        u, v = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (z, other))
        s = np.sum(u * v, axis=1, keepdims=True)
        return s, (v - s * u) / np.linalg.norm(z, axis=1, keepdims=True)

    (near, slope_near), (far, slope_far) = cosine(of_server), cosine(of_last)
    a, b = np.exp(near / temperature), np.exp(far / temperature)
    return b / (a + b) * (slope_far - slope_near) / temperature


def test_moon_follows_algorithm_1():
    mu, temperature = 2.0, 0.4
    algorithm, last = make(MOON, mu=mu, temperature=temperature), {}

    def train(client_id, dataset, key, w):
        params, before = w, last.get(client_id, w)
        for x, y in real_examples(dataset, key):
            slope = contrast_gradient(hidden(params, x), hidden(w, x), hidden(before, x), temperature)
            params = plus(params, -RATE, plus(numpy_gradient(params, x, y), mu, through_hidden(params, x, slope)))
        last[client_id] = params
        return params

    w = numpy_rounds(start_of(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    federation.assert_trees_close(client_memories(state), last)
    without, _ = run(make(FedAvg))
    assert np.abs(np.asarray(without.params["linear"]["w"]) - w["linear"]["w"]).max() > 1e-3


def logits(params, x):
    return hidden(params, x) @ params["linear_1"]["w"] + params["linear_1"]["b"]


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def pull_of_prototypes(params, x, means):
    z = hidden(params, x)
    return through_hidden(params, x, 2 * (z - means) / z.shape[1])


def pull_of_logits(params, x, means):
    """The gradient of the cross-entropy with the softmax of other logits."""
    slope = softmax(logits(params, x)) - softmax(means)
    below = through_hidden(params, x, slope @ params["linear_1"]["w"].T)
    return below | {"linear_1": {"w": hidden(params, x).T @ slope / len(x), "b": slope.mean(0)}}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cls", "features", "pull_of"), [(FedProto, hidden, pull_of_prototypes), (FedDistill, logits, pull_of_logits)]
)
def test_fedproto_and_feddistill_follow_algorithm_1(cls, features, pull_of):
    lam = 1.5
    algorithm = make(cls, lam=lam)
    state = algorithm.init(jax.random.key(1))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.client_memory(state))
    means, own = {}, {}
    for cohort in cohorts(federation.data()):
        found = {}
        for client_id, dataset, key in cohort:
            if not len(dataset):
                continue
            params = own.get(client_id, first)
            for x, y in real_examples(dataset, key):
                slope = numpy_gradient(params, x, y)
                known = np.isin(y, list(means))  # examples of other classes have no pull
                if known.any():
                    of_class = np.stack([means[label] for label in y[known].tolist()])
                    slope = plus(slope, lam * known.mean(), pull_of(params, x[known], of_class))
                params = plus(params, -RATE, slope)
            own[client_id] = params
            for row, label in zip(features(params, dataset["x"]), dataset["y"].tolist(), strict=True):
                found.setdefault(label, []).append(row)
        means |= {label: np.mean(rows, axis=0) for label, rows in found.items()}
    state, _ = run(algorithm)
    federation.assert_trees_close(client_memories(state), own)
    np.testing.assert_array_equal(np.flatnonzero(state.server.known), sorted(means))
    for label, expected in means.items():
        np.testing.assert_allclose(state.params[label], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize(("cls", "features"), [(FedProto, 5), (FedDistill, 4)])
def test_prototypes_are_what_is_sent_of_them_divided_by_counts_that_are_not_changed(cls, features):
    """The only client is an attacker, whose sums of features are clipped."""
    population = federation.data(sizes=(9,))
    cohort = dataclasses.replace(federation.cohort(population), attack=fedsim.attacks.SignFlip(), attackers=np.array([True]))
    algorithm = make(cls, aggregator=fedsim.aggregators.Clipped(0.01))
    state, info = algorithm.apply(algorithm.init(jax.random.key(1)), cohort)
    counts = np.bincount(population.columns["y"], minlength=4)
    assert np.linalg.norm(counts[:, None] * np.asarray(state.params)) == pytest.approx(0.01, rel=1e-4)
    np.testing.assert_array_equal(state.server.known, counts > 0)
    assert info.clients["bits_up"].tolist() == [32 * (4 * features + 4)]


def with_features(named):
    """Returns a model that returns its features, too, by a module or by a function of its own."""

    def outputs(examples):
        features = jnp.tanh(hk.Linear(5)(examples["x"]))
        w = hk.get_parameter("w", [5, federation.NUM_CLASSES], init=hk.initializers.RandomNormal())
        logits = hk.Linear(federation.NUM_CLASSES)(features) if named else features @ w
        return {"features": features, "logits": logits}

    return fedsim.Model.from_haiku(
        hk.transform(outputs),
        features=federation.FEATURES,
        num_classes=federation.NUM_CLASSES,
        loss=lambda examples, outputs: fedsim.metrics.cross_entropy(examples, outputs["logits"]),
        metrics={},
    )


def test_the_representation_is_the_input_of_the_last_module_or_a_function_of_the_outputs():
    states = [
        run(make(MOON, model=with_features(True), representation=each), rounds=2)[0]
        for each in (None, lambda outputs: outputs["features"])
    ]
    federation.assert_trees_close(states[0].params, states[1].params)


@pytest.mark.parametrize("cls", [MOON, FedProto])
def test_without_a_last_module_the_representation_must_be_given(cls):
    model = fedsim.Model.from_functions(
        lambda key: {"w": jnp.zeros([3, 4])}, lambda params, x: x @ params["w"], features=federation.FEATURES, num_classes=4
    )
    algorithm = cls(model=model, batches=BATCHES, client_optimizer=make(FedAvg).client_optimizer, execution=fedsim.Jit())
    with pytest.raises(ValueError, match=r"last part 'w' is no Haiku module.*got representation=None: give a function"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_prototypes_need_the_number_of_classes():
    model = fedsim.Model.from_functions(
        lambda key: {"w": jnp.zeros(3)}, lambda params, x: x @ params["w"], features=federation.FEATURES,
        loss=fedsim.metrics.squared_error,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Expected num_classes >= 1, got num_classes=None: prototypes are of classes"):
        make(FedProto, model=model)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_features_of_a_network_in_half_precision_are_float32_and_have_the_gradient_of_those_in_float32(precision):
    """Inside of the network, the gradient has the scale of the loss, 1024 in float16."""
    model = network()
    params, x = model.init(jax.random.key(0)), np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)

    def of(params, model):
        return features_of(model)(params, {"x": jnp.asarray(x)}, jax.random.key(0))

    def slope(model):
        return jax.grad(lambda params: jnp.sum(jnp.square(of(params, model))))(params)

    half = model.with_precision(precision)
    assert of(params, half).dtype == jnp.float32
    federation.assert_trees_close(slope(half), slope(model), rtol=0.05, atol=0.05)
