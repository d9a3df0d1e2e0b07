"""FedEM: agreement with NumPy, what clients' mixtures are for, one component, frozen parts, and what is refused."""

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from network_models import RATE, client_memories, cohorts, make, network, plus, real_examples, run, weighted_mean

import fedsim
from fedsim.algorithms import FedAvg, FedEM


def numpy_log_probabilities(params, x):
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    logits = hidden @ params["linear_1"]["w"] + params["linear_1"]["b"]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def numpy_responsibilities(models, weights, x, y):
    """Returns the E-step, ``[examples, components]``."""
    losses = np.stack([-numpy_log_probabilities(w, x)[np.arange(len(y)), y] for w in models], axis=1)
    likely = weights * np.exp(-losses)
    return likely / likely.sum(1, keepdims=True)


def numpy_weighted_gradient(params, x, y, q):
    """Returns the gradient of ``mean_i q_i loss_i`` of the network, with weights q of the examples."""
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    p = np.exp(numpy_log_probabilities(params, x))
    p[np.arange(len(y)), y] -= 1
    p *= q[:, None] / len(y)
    back = (p @ params["linear_1"]["w"].T) * (1 - hidden**2)
    return {"linear": {"w": x.T @ back, "b": back.sum(0)}, "linear_1": {"w": hidden.T @ p, "b": p.sum(0)}}


def components_of(params):
    count = len(params["log_weights"])
    return [jax.tree.map(lambda p, m=m: np.asarray(p[m], np.float64), params["components"]) for m in range(count)]


def test_fedem_follows_algorithm_1():
    algorithm, population = make(FedEM, num_components=2), federation.data()
    models, mixtures = components_of(algorithm.init(jax.random.key(1)).params), {}
    for cohort in cohorts(population):
        trained = []
        for client_id, dataset, key in cohort:
            if not len(dataset):
                continue
            weights, local = mixtures.get(client_id, np.full(2, 0.5)), list(models)
            for x, y in real_examples(dataset, key):
                q = numpy_responsibilities(models, weights, x, y)
                local = [plus(w, -RATE, numpy_weighted_gradient(w, x, y, q[:, m])) for m, w in enumerate(local)]
            x, y = dataset["x"].astype(np.float64), dataset["y"]
            mixtures[client_id] = numpy_responsibilities(models, weights, x, y).mean(0)
            trained.append((len(dataset), local))
        models = [weighted_mean([(size, local[m]) for size, local in trained]) for m in range(2)]
    state, _ = run(algorithm)
    federation.assert_trees_close(components_of(state.params), models)
    kept = client_memories(state)
    own = {client_id: jax.nn.softmax(parts.kept["log_weights"]) for client_id, (_, parts) in kept.items()}
    assert own.keys() == mixtures.keys()
    federation.assert_trees_close(own, mixtures)
    assert np.ptp([weights[0] for weights in mixtures.values()]) > 0.01
    # Personal models: one more E- and M-step, and then the mixture of the predicted probabilities.
    losses = []
    for client_id, dataset, _ in federation.cohort(population):
        x, y = np.asarray(dataset["x"], np.float64), dataset["y"]
        if len(y):
            weights = numpy_responsibilities(models, mixtures.get(client_id, np.full(2, 0.5)), x, y).mean(0)
            mixed = sum(w * np.exp(numpy_log_probabilities(model, x)) for w, model in zip(weights, models, strict=True))
            losses += (-np.log(mixed[np.arange(len(y)), y])).tolist()
    evaluation = fedsim.evaluate_personalized(algorithm, state, population, population)
    assert evaluation.overall["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_one_component_is_fedavg():
    alone, fedavg = make(FedEM, num_components=1), make(FedAvg)
    state = alone.init(jax.random.key(1))
    expected = fedavg.init(jax.random.key(1))._replace(params=jax.tree.map(lambda p: p[0], state.params["components"]))
    for cohort in cohorts(federation.data()):
        (state, info), (expected, expected_info) = alone.apply(state, cohort), fedavg.apply(expected, cohort)
    federation.assert_trees_close(jax.tree.map(lambda p: p[0], state.params["components"]), expected.params)
    federation.assert_trees_close(info.clients["loss"], expected_info.clients["loss"])


@pytest.mark.slow
def test_clients_of_two_distributions_find_their_components():
    """For half of the clients the label is the sign of x0, for the others the opposite: no single model fits both."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 3)).astype(np.float32)
    clients = np.arange(400) // 40
    y = np.where((x[:, 0] > 0) == (clients % 2 == 0), 1, 0).astype(np.int32)
    data = fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=[40] * 10)
    options = {"batches": fedsim.Batches(size=10), "client_optimizer": optax.sgd(1.0)}
    accuracy = {}
    for cls in (FedEM, FedAvg):
        algorithm = make(cls, **options, **({"num_components": 2} if cls is FedEM else {}))
        state = algorithm.init(jax.random.key(0))
        for round in range(40):
            state, _ = algorithm.apply(state, federation.cohort(data, round=round))
        accuracy[cls] = fedsim.evaluate(algorithm.model, state.params, data).overall["accuracy"]
        if cls is FedEM:
            personal = fedsim.evaluate_personalized(algorithm, state, data, data)
    assert personal.overall["accuracy"] > 0.95
    assert max(accuracy.values()) < 0.7


def test_frozen_parts_of_components_stay():
    algorithm = make(FedEM, model=network().with_parts(frozen="linear/*"))
    start, (state, _) = algorithm.init(jax.random.key(1)), run(algorithm)
    before, after = (jax.device_get(each.params["components"]) for each in (start, state))
    federation.assert_trees_equal(after["linear"], before["linear"])
    assert np.abs(after["linear_1"]["w"] - before["linear_1"]["w"]).max() > 1e-4
    assert state.server.params["components"]["linear"]["w"] is None


def zeros_model():
    logits = hk.transform(lambda examples: hk.Linear(federation.NUM_CLASSES, w_init=jnp.zeros)(examples["x"]))
    return fedsim.Model.from_haiku(logits, features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def test_components_that_would_stay_equal_are_refused():
    with pytest.raises(ValueError, match="one that starts 3 components with equal parameters, which stay equal: give a"):
        run(make(FedEM, model=zeros_model()))
    run(make(FedEM, model=zeros_model(), num_components=1), rounds=1)


def test_an_overridden_loss_is_refused():
    class Halved(FedEM):
        def client_loss(self, shared, params, batch):
            return super().client_loss(shared, params, batch) / 2

    with pytest.raises(ValueError, match="Expected Halved to leave client_loss as it is, got a class that overrides it"):
        Halved(model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=16))


def test_a_model_without_classes_is_refused():
    numbers = fedsim.Model.from_functions(
        lambda key: {"w": jnp.zeros(3)},
        lambda params, x: x @ params["w"],
        features=federation.FEATURES,
        loss=fedsim.metrics.squared_error,
    )
    with pytest.raises(ValueError, match="Expected a classifier as the component of a mixture, got a model with num_classes=N"):
        make(FedEM, model=numbers)


def classifier(loss):
    return fedsim.Model.from_functions(
        lambda key: {"w": jax.random.normal(key, [3, federation.NUM_CLASSES])},
        lambda params, x: x @ params["w"],
        features=federation.FEATURES,
        num_classes=federation.NUM_CLASSES,
        loss=loss,
    )


def of_each_class(examples, outputs):
    """The binary cross-entropy of each class, as for labels that do not exclude each other."""
    labels = jax.nn.one_hot(examples["y"], outputs.shape[1], dtype=outputs.dtype)
    return optax.sigmoid_binary_cross_entropy(outputs, labels).sum(axis=1)


def smoothed(examples, outputs):
    labels = optax.smooth_labels(jax.nn.one_hot(examples["y"], outputs.shape[1], dtype=outputs.dtype), 0.1)
    return optax.softmax_cross_entropy(outputs, labels)


def test_a_loss_that_is_no_function_of_probabilities_is_refused():
    """A mixture of one such component would have another loss than the component alone."""
    with pytest.raises(ValueError, match=r"Expected a component whose loss is a function of softmax\(outputs\), such as the"):
        make(FedEM, model=classifier(of_each_class))


def test_a_mixture_of_models_with_running_statistics_is_refused():
    """They would never be updated."""
    model = fedsim.models.resnet8(norm="batch")
    with pytest.raises(ValueError, match="Expected a component without running statistics, .* got a model with running stat"):
        fedsim.MixtureModel.of(model, 2)
    with pytest.raises(ValueError, match="FedEM takes no model with running statistics: .*; use a model without"):
        make(FedEM, model=model)


@pytest.mark.parametrize("loss", [fedsim.metrics.cross_entropy, smoothed])
def test_a_mixture_of_one_component_has_its_loss(loss):
    model, data = classifier(loss), federation.data()
    alone = model.init(jax.random.key(0))
    of_one = {"components": jax.tree.map(lambda p: p[None], alone), "log_weights": jnp.zeros(1)}
    losses = [
        fedsim.evaluate(each, params, data).overall["loss"]
        for each, params in ((model, alone), (fedsim.MixtureModel.of(model, 1), of_one))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
