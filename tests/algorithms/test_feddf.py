"""FedDF: agreement with NumPy, what the server learns from examples without labels, and what is refused."""

import functools

import federation
import jax
import numpy as np
import pytest
from network_models import RATE, make, network, numpy_gradient, plus, real_examples, run, weighted_mean

import fedsim
from fedsim import aggregators
from fedsim.algorithms import FedAvg, FedDF
from fedsim.configuration import build

X = np.random.default_rng(3).normal(size=(11, 3)).astype(np.float32)
SERVER_RATE = 0.02


def numpy_logits(params, x):
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    return hidden @ params["linear_1"]["w"] + params["linear_1"]["b"]


def softmax(logits):
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def numpy_distillation_gradient(params, x, teacher):
    """Returns the gradient of the mean over examples of KL(teacher || softmax of the network)."""
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    p = (softmax(numpy_logits(params, x)) - teacher) / len(x)
    back = (p @ params["linear_1"]["w"].T) * (1 - hidden**2)
    return {"linear": {"w": x.T @ back, "b": back.sum(0)}, "linear_1": {"w": hidden.T @ p, "b": p.sum(0)}}


def test_feddf_follows_algorithm_1():
    """The server has one batch, so that each epoch is a step on all examples in any order."""
    algorithm, population, epochs = make(FedDF, **distilling(epochs=3)), federation.data(), 3
    state = algorithm.init(jax.random.key(1))
    w = jax.tree.map(lambda p: np.asarray(p, np.float64), state.params)
    for round in range(2):
        cohort, trained = federation.cohort(population, round=round), []
        for _, dataset, key in cohort:
            if len(dataset):
                local = w
                for x, y in real_examples(dataset, key):
                    local = plus(local, -RATE, numpy_gradient(local, x, y))
                trained.append((len(dataset), local))
        w = weighted_mean(trained)
        teacher = softmax(weighted_mean([(size, numpy_logits(local, X.astype(np.float64))) for size, local in trained]))
        first = second = jax.tree.map(np.zeros_like, w)
        for t in range(epochs):  # Adam, whose rate falls as a half cosine
            gradient = numpy_distillation_gradient(w, X.astype(np.float64), teacher)
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)
            rate = SERVER_RATE * (1 + np.cos(np.pi * t / epochs)) / 2
            step = functools.partial(adam_step, rate=rate, count=t + 1)
            w = jax.tree.map(step, w, first, second)
        state, _ = algorithm.apply(state, cohort)
    federation.assert_trees_close(state.params, w, rtol=1e-4, atol=1e-5)


def adam_step(p, m, v, rate, count):
    return p - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)


def distilling(epochs=2, rate=SERVER_RATE, batch_size=11):
    return {
        "server_examples": {"x": X},
        "server_epochs": epochs,
        "server_batch_size": batch_size,
        "distillation_learning_rate": rate,
    }


def test_without_examples_feddf_is_fedavg():
    federation.assert_trees_close(run(make(FedDF))[0].params, run(make(FedAvg))[0].params)


@pytest.mark.parametrize("how", [fedsim.Pmap(devices=2), pytest.param(fedsim.Debug(), marks=pytest.mark.slow)])
def test_the_answer_is_the_same_on_two_devices_and_in_python(how):
    expected, info = run(make(FedDF, **distilling(batch_size=4)), rounds=2)
    state, other = run(make(FedDF, **distilling(batch_size=4), execution=how), rounds=2)
    federation.assert_trees_close(state, expected, rtol=1e-4, atol=1e-5)
    assert other.clients["bits_up"].tolist() == info.clients["bits_up"].tolist()


def test_the_server_comes_closer_to_the_ensemble():
    """Clients have different classes, so their average differs from their ensemble, which the server learns without labels."""
    train = fedsim.datasets.load("digits").train
    x, y = train.columns["x"], train.columns["y"]
    parts = [np.flatnonzero(np.isin(y, classes)) for classes in ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))]
    clients, model, unlabelled = (
        fedsim.FederatedData.from_partition({"x": x, "y": y}, parts),
        fedsim.models.digits_dense(),
        x[::3],
    )
    fedavg = make(FedAvg, model=model)

    def logits(algorithm, ids):
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(clients, ids))
        return np.asarray(model.apply_for_eval(state.params, {"x": unlabelled}))

    # FedAvg with a single client returns the model of this client.
    alone = [logits(fedavg, [client_id]) for client_id in clients.client_ids]
    ensemble = softmax(weighted_mean(list(zip(clients.sizes, alone, strict=True))))
    feddf = make(FedDF, model=model, server_examples={"x": unlabelled}, server_epochs=5, server_batch_size=64)
    divergence = [
        np.mean(np.sum(ensemble * (np.log(ensemble) - np.log(softmax(logits(algorithm, clients.client_ids)))), axis=1))
        for algorithm in (fedavg, feddf)
    ]
    assert divergence[1] < 0.5 * divergence[0], divergence


def test_frozen_parts_stay():
    algorithm = make(FedDF, model=network().with_parts(frozen="linear/*"), **distilling())
    start, (state, _) = algorithm.init(jax.random.key(1)), run(algorithm)
    before, after = jax.device_get((start.params, state.params))
    federation.assert_trees_equal(after["linear"], before["linear"])
    assert np.abs(after["linear_1"]["w"] - before["linear_1"]["w"]).max() > 1e-4


def test_noise_that_logits_would_not_have_is_refused():
    noise = aggregators.GaussianMechanism(clip=1.0, noise_multiplier=1.0, denominator=5)
    with pytest.raises(
        ValueError, match="^Expected an aggregator without noise with FedDF, got GaussianMechanism: clients also"
    ):
        run(make(FedDF, **distilling(), aggregator=noise, weighting="uniform"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"server_examples": {"x": X[:, :2]}}, r"Feature 'x' has shape \[2\] per example"),
        ({"server_examples": {"z": X}}, "reads feature 'x'"),
        ({"server_examples": {"x": X[:0]}}, "Expected server_examples with at least one example, got none"),
        ({"server_examples": {}}, "Expected server_examples with at least one example, got none"),
        ({"server_epochs": 0}, "Expected server_epochs >= 1, got server_epochs=0"),
    ],
)
def test_wrong_examples_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make(FedDF, **fields)


def test_a_secure_aggregator_that_would_not_hide_the_logits_is_refused():
    secure = aggregators.Clipped(1.0, inner=aggregators.SecureMean(max_weight=1.0))
    with pytest.raises(ValueError, match="^Expected an aggregator other than SecureMean with FedDF, .* logits .* unmasked"):
        make(FedDF, **distilling(), aggregator=secure, weighting="uniform")


OWN = """
import dataclasses
import fedsim

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Own(fedsim.algorithms.FedDF):
    server_examples: dict = dataclasses.field(
        default_factory=lambda: {"x": fedsim.datasets.load("digits").test.columns["x"][:8]})
"""


def test_a_command_line_needs_a_class_that_has_server_examples(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = fedsim.experiment.Settings()
    made = build(fedsim.experiment.RunConfig(algorithm=f"{tmp_path / 'own.py'}:Own"), settings)
    assert made.algorithm.server_examples["x"].shape == (8, 8, 8, 1)
    with pytest.raises(ValueError, match="^FedDF needs server_examples, which no option gives, .* give FILE.py:CLASS, a class"):
        build(fedsim.experiment.RunConfig(algorithm="feddf"), settings)
