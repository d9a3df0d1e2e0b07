"""Metrics of classifiers in an evaluation against scikit-learn, for each client and overall."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import metrics as sk

import fedsim
from fedsim import metrics

CLASSES = federation.NUM_CLASSES
LABELS = range(CLASSES)
DOMAINS = 3
METRICS = {
    "accuracy": metrics.accuracy,
    "top2": metrics.TopKAccuracy(2),
    "confusion": metrics.ConfusionMatrix(),
    "auc": metrics.AUC(bins=33, score=lambda outputs: jnp.round(jax.nn.softmax(outputs) * 32) / 32),
    "accuracy_by_domain": metrics.PerDomain(metrics.accuracy, DOMAINS),
    "confusion_by_domain": metrics.PerDomain(metrics.ConfusionMatrix(), DOMAINS),
    "f1_by_domain": metrics.PerDomain(metrics.F1(), DOMAINS),
} | {
    f"{name}_{average}": cls(average=average)
    for name, cls in {"precision": metrics.Precision, "recall": metrics.Recall, "f1": metrics.F1}.items()
    for average in ("macro", "micro", None)
}
SKLEARN = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
EXECUTIONS = {
    "one": lambda: fedsim.Jit(memory="resident"),
    "devices, streamed": lambda: fedsim.Pmap(devices=2, memory="stream"),
    "Debug": fedsim.Debug,
    "streamed": lambda: fedsim.Jit(memory="stream"),
    "devices": lambda: fedsim.Pmap(devices=8, memory="resident"),
}


def data():
    population = federation.data(sizes=(37, 0, 3, 52, 1, 25, 9, 80), seed=3)
    domains = np.random.default_rng(4).integers(-1, DOMAINS + 1, population.num_examples).astype(np.int32)  # two are none
    return fedsim.FederatedData.from_arrays(
        {**population.columns, "domain_id": domains}, sizes=population.sizes, client_ids=population.client_ids
    )


def model():
    return dataclasses.replace(federation.model(), metrics=METRICS)


def params():
    key = jax.random.key(5)
    return {"linear": {"w": jax.random.normal(key, (3, CLASSES)), "b": jnp.zeros(CLASSES)}}


def expected(examples, of_params):
    """The value of each metric by scikit-learn."""
    logits = np.asarray(examples["x"], np.float32) @ np.asarray(of_params["linear"]["w"]) + np.asarray(of_params["linear"]["b"])
    y, predicted = examples["y"], logits.argmax(1)
    domains = [examples["domain_id"] == domain for domain in range(DOMAINS)]

    def f1(chosen):
        return sk.f1_score(y[chosen], predicted[chosen], average="macro", zero_division=0) if chosen.any() else np.nan

    found = {
        "accuracy": sk.accuracy_score(y, predicted),
        "top2": sk.top_k_accuracy_score(y, logits, k=2, labels=LABELS),
        "confusion": sk.confusion_matrix(y, predicted, labels=LABELS),
        "accuracy_by_domain": [np.mean(y[chosen] == predicted[chosen]) if chosen.any() else np.nan for chosen in domains],
        "confusion_by_domain": [
            sk.confusion_matrix(y[chosen], predicted[chosen], labels=LABELS) if chosen.any() else np.zeros([CLASSES] * 2)
            for chosen in domains
        ],
        "f1_by_domain": [f1(chosen) for chosen in domains],
    }
    for name, function in SKLEARN.items():
        for average in ("macro", "micro", None):
            labels = LABELS if average is None else None
            found[f"{name}_{average}"] = function(y, predicted, labels=labels, average=average, zero_division=0)
    scores = np.asarray(METRICS["auc"].score(logits))
    areas = [sk.roc_auc_score(y == c, scores[:, c]) for c in LABELS if 0 < (y == c).sum() < len(y)]
    return found | {"auc": np.mean(areas) if areas else np.nan}


@functools.cache
def everything():
    population = data()
    return expected(population.columns, params()), [
        expected(c.examples, params()) if len(c) else None for c in population.clients()
    ]


def assert_agrees(evaluation, overall, clients):
    assert list(evaluation.overall) == list(evaluation.clients) == list(METRICS)
    for name, value in overall.items():
        np.testing.assert_allclose(evaluation.overall[name], value, rtol=1e-6, err_msg=name)
        of_clients = evaluation.clients[name].result()
        for i, own in enumerate(clients):
            empty = 0 if "confusion" in name else np.nan  # counts are 0, and a mean of no examples is none
            expected = empty if own is None else own[name]
            np.testing.assert_allclose(of_clients[i], expected, rtol=1e-6, err_msg=f"{name}, client {i}")


@pytest.mark.slow
@pytest.mark.parametrize("how", EXECUTIONS)
@pytest.mark.parametrize("batch_size", [7, 256])
def test_evaluate(how, batch_size):
    evaluation = fedsim.evaluate(model(), params(), data(), execution=EXECUTIONS[how](), batch_size=batch_size)
    assert_agrees(evaluation, *everything())
    counts = evaluation.clients["confusion"].total
    assert counts.dtype == np.int64 and isinstance(evaluation.overall["accuracy"], float)


def test_several_chunks(monkeypatch):
    monkeypatch.setattr("fedsim.evaluation._evaluate._CHUNK_BYTES", 400)
    assert_agrees(
        fedsim.evaluate(model(), params(), data(), execution=fedsim.Jit(memory="stream"), batch_size=4), *everything()
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Unchanged(fedsim.algorithms.FedAvg):
    """Every client's own model is the server's, so the evaluation is known."""

    def personal_params(self, shared, client):
        return shared.params


@pytest.mark.slow
@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Pmap(devices=2)], ids=["one", "devices"])
def test_evaluate_personalized(execution, monkeypatch):
    monkeypatch.setattr("fedsim.evaluation._personalized._LARGEST_CHUNK", 3)
    algorithm = Unchanged(model=model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    state = algorithm.init(jax.random.key(0))
    state = dataclasses.replace(state, params=params()) if dataclasses.is_dataclass(state) else state._replace(params=params())
    evaluation = fedsim.evaluate_personalized(algorithm, state, data(), data(), execution=execution, batch_size=8)
    assert_agrees(evaluation, *everything())


def test_over_clients_leaves_out_clients_for_which_a_metric_is_undefined():
    evaluation = fedsim.evaluate(model(), params(), data())
    _, clients = everything()
    areas = [own["auc"] for own in clients if own is not None and not np.isnan(own["auc"])]
    assert len(areas) < len(clients)
    over = evaluation.over_clients("auc")
    np.testing.assert_allclose([over["mean"], over["std"], over["worst 10%"]], [np.mean(areas), np.std(areas), min(areas)])
    with pytest.raises(
        ValueError, match=r"got 'confusion', which has an array of shape \[4, 4\] per client. Use clients\['confusion'\]"
    ):
        evaluation.over_clients("confusion")


def test_no_examples_at_all():
    empty = fedsim.FederatedData.from_arrays({name: column[:0] for name, column in data().columns.items()}, sizes=[0, 0])
    overall = fedsim.evaluate(model(), params(), empty).overall
    assert np.isnan([overall[name] for name in ("accuracy", "f1_macro", "f1_micro", "auc")]).all()
    assert overall["confusion"].tolist() == [[0] * CLASSES] * CLASSES
    assert np.isnan(overall["f1_None"]).tolist() == [True] * CLASSES


def total(metric, y, outputs):
    """The statistic of all examples."""
    statistic = metric({"y": jnp.asarray(y)}, jnp.asarray(outputs))
    is_sparse = lambda leaf: isinstance(leaf, metrics.Sparse)  # noqa: E731
    return jax.tree.map(lambda leaf: np.asarray(leaf.dense() if is_sparse(leaf) else leaf).sum(0), statistic, is_leaf=is_sparse)


@pytest.mark.first(1)
@pytest.mark.parametrize("scores", ["grid", "any", "equal"])
def test_binary_auc_is_exact_on_the_grid_and_within_its_bound_elsewhere(scores):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 500)
    score = np.clip(draw.normal(0.4 + 0.15 * y, 0.2), 0, 1).astype(np.float32)
    score = {"grid": np.round(score * 20) / 20, "any": score, "equal": np.full(500, 0.3)}[scores].astype(np.float32)
    histogram = total(metrics.AUC(bins=21, score=lambda outputs: outputs), y, score)
    exact = sk.roc_auc_score(y, score)
    if scores == "any":
        assert 1e-6 < abs(histogram.result() - exact) <= histogram.error_bound() < 0.1
    else:
        np.testing.assert_allclose(histogram.result(), exact, rtol=1e-12)


def test_auc_of_logits():
    draw = np.random.default_rng(1)
    y, one = draw.integers(0, 2, 300), draw.normal(size=300).astype(np.float32)
    exact = sk.roc_auc_score(y, one)
    two = np.stack([np.zeros(300, np.float32), one], 1)
    for outputs in (one, two):
        histogram = total(metrics.AUC(bins=2001), y, outputs)
        assert abs(histogram.result() - exact) <= histogram.error_bound() < 2e-3
    one[7] = np.nan  # of a model that diverged: counts as the lowest score
    assert abs(total(metrics.AUC(bins=2001), y, one).result() - sk.roc_auc_score(y, np.where(np.isnan(one), -9, one))) < 2e-3


def test_auc_of_many_classes_is_the_mean_of_one_versus_rest():
    draw = np.random.default_rng(2)
    y, outputs = draw.integers(0, 5, 400), draw.normal(size=(400, 5)).astype(np.float32)
    histogram = total(metrics.AUC(bins=4001), y, outputs)
    exact = sk.roc_auc_score(y, jax.nn.softmax(outputs), multi_class="ovr", average="macro")
    assert abs(histogram.result() - exact) <= histogram.error_bound() + 1e-6 < 2e-3


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_top_k_with_equal_and_unusual_logits(k):
    draw = np.random.default_rng(3)
    outputs, y = draw.integers(0, 3, (200, 5)).astype(np.float32), draw.integers(0, 5, 200)
    largest = np.argsort(-outputs, axis=1, kind="stable")[:, :k]
    assert total(metrics.TopKAccuracy(k), y, outputs).total == (largest == y[:, None]).any(1).sum()
    assert total(metrics.TopKAccuracy(k), [1, 1], np.array([[0, np.nan], [0, -np.inf]], np.float32)).total == 0


def test_recall_at_k():
    draw = np.random.default_rng(4)
    y, outputs = draw.integers(0, 2, (50, 6)), draw.normal(size=(50, 6)).astype(np.float32)
    mean = total(metrics.RecallAtK(3), y, outputs)
    assert mean == (np.take_along_axis(y, np.argsort(-outputs, 1)[:, :3], 1).sum(), y.sum())


def logistic_case(name):
    """Logits and labels, drawn with the logistic probabilities (for narrow ranges, of steeper logits)."""
    draw = np.random.default_rng(7)
    scale, center, steep, n = {
        "rare": (1.05, -7.0, 1.0, 50_000),
        "tiny": (3.0, -40.0, 0.0, 20_000),
        "ordinary": (1.0, 0.0, 1.0, 20_000),
        "certain": (8.0, 0.0, 1.0, 20_000),
        "narrow": (0.01, 0.0, 300.0, 20_000),
    }[name]
    logits = (center + scale * draw.normal(size=n)).astype(np.float32)
    wide = logits.astype(np.float64)
    return logits, draw.random(n) < 1 / (1 + np.exp(-(steep * wide if steep else wide - center)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in ("rare", "ordinary", "narrow") for form in ("logits", "two outputs", "probabilities")),
        *((name, form) for name in ("tiny", "certain") for form in ("logits", "two outputs")),  # beyond float32 probabilities
    ],
)
def test_auc_follows_the_scores_wherever_they_are(name, form):
    """For rare positives, a grid in probabilities gave 0.68 instead of 0.77."""
    logits, y = logistic_case(name)
    expected = sk.roc_auc_score(y, logits)
    if form == "two outputs":
        metric, outputs = metrics.AUC(), np.stack([0.5 - logits / 2, 0.5 + logits / 2], 1)
    else:
        score = jax.nn.sigmoid if form == "probabilities" else None
        metric, outputs = metrics.AUC(score=score), logits
    histogram = total(metric, y.astype(np.int32), outputs)
    assert abs(histogram.result() - expected) < 4e-3 and abs(histogram.result() - expected) <= histogram.error_bound() + 1e-6
    assert histogram.error_bound() < 0.03


@pytest.mark.slow
def test_auc_of_rare_classes_and_of_ties():
    draw = np.random.default_rng(0)
    outputs = np.concatenate([draw.normal(size=(20_000, 2)) + 6, draw.normal(size=(20_000, 2))], axis=1).astype(np.float32)
    probabilities = np.exp(outputs - outputs.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    y = (draw.random((20_000, 1)) > probabilities.cumsum(1)[:, :3]).sum(1).astype(np.int32)
    expected = np.mean(
        [sk.roc_auc_score(y == c, np.log(probabilities[:, c]) - np.log1p(-probabilities[:, c])) for c in range(4)]
    )
    assert abs(total(metrics.AUC(), y, outputs).result() - expected) < 4e-3
    tied = np.round(draw.normal(size=5000) - 6, 0).astype(np.float32)
    labels = (draw.random(5000) < 1 / (1 + np.exp(-(tied + 6)))).astype(np.int32)
    np.testing.assert_allclose(total(metrics.AUC(), labels, tied).result(), sk.roc_auc_score(labels, tied), rtol=1e-6)


def test_labels_out_of_range_do_not_count():
    outputs = np.eye(3, dtype=np.float32)
    assert total(metrics.ConfusionMatrix(), [0, -1, 3], outputs).total.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert total(metrics.F1("micro"), [0, -1, 3], outputs).result() == 1.0
