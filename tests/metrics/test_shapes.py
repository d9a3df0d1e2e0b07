"""What a metric may return, and the error for what it may not; statistics of one's own; exact counts; results in JAX."""

import dataclasses
from typing import Any, NamedTuple

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import metrics


def evaluate(**replaced):
    model = dataclasses.replace(federation.model(), metrics=replaced)
    return fedsim.evaluate(model, model.init(jax.random.key(0)), federation.data())


def values(examples, outputs):
    return outputs[:, 0]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda e, o: o[:, :1], r"Metric 'wrong' returned an array of shape \[n, 1\].* \[n\].*values\[:, 0\]"),
        (lambda e, o: o[:, 0].mean(), r"'wrong' returned an array of shape \[\], .*Return the value of every example"),
        (lambda e, o: o, r"'wrong' returned an array of shape \[n, 4\], .*Sum or average over the other axes"),
        (lambda e, o: o.T, r"array of shape \[4, n\], .*in the order of the examples"),
        (lambda e, o: o[:4, 0], r"array of shape \[4\], .*in the order of the examples"),
        (lambda e, o: 1.0, r"'wrong' returned an array of shape \[\]"),
        (lambda e, o: metrics.per_example(o[:, :1]), r"Metric 'wrong' returned Mean.total of shape \[n, 1\].*values\[:, 0\]"),
        (lambda e, o: metrics.Mean(o[:, 0], 1.0), r"'wrong' returned Mean.weight of shape \[\]"),
        (lambda e, o: metrics.Mean(o[:, 0], o), r"total \[n\] and weight \[n, 4\].*per_example"),
        (lambda e, o: metrics.Sum(o.sum()), r"'wrong' returned Sum.total of shape \[\]"),
        (lambda e, o: (o[:, 0], o[:, 0]), r"'wrong' returned a tuple\. .*fedsim.metrics.Mean\(total, weight\)"),
        (lambda e, o: None, r"'wrong' returned a NoneType"),
        (lambda e, o: metrics.Sum(metrics.Sparse(o.astype(int)[0], o[0], (9,))), r"index \[4\] .*fedsim.metrics.Sparse.of"),
        (metrics.PerDomain(metrics.accuracy, 2), r"PerDomain reads the domain from feature 'domain_id', .*\['x', 'y'\]"),
        (lambda e, o: metrics.F1()(e, o[:, 0]), r"Expected logits \[n, classes\] and labels \[n\], got outputs of shape"),
    ],
)
def test_what_a_metric_must_not_return(metric, message):
    with pytest.raises(ValueError, match=message):
        evaluate(right=metrics.accuracy, wrong=metric)


def test_personalized_evaluation_checks_the_same():
    model = dataclasses.replace(federation.model(), metrics={"wrong": lambda e, o: o[:, :1]})
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    state = algorithm.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"Metric 'wrong' returned an array of shape \[n, 1\]"):
        fedsim.evaluate_personalized(algorithm, state, federation.data(), federation.data(), fine_tune=algorithm)


def test_the_loss_is_checked_as_a_metric():
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.Linear(1)(examples["x"])),
        features=federation.FEATURES,
        loss=lambda examples, outputs: (outputs - examples["y"][:, None].astype(jnp.float32)) ** 2,
    )
    with pytest.raises(ValueError, match=r"Metric 'loss' returned Mean.total of shape \[n, 1\]"):
        fedsim.evaluate(model, model.init(jax.random.key(0)), federation.data())


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda: metrics.TopKAccuracy(0), "Expected k >= 1, got k=0"),
        (lambda: metrics.RecallAtK(1.5), "Expected k >= 1, got k=1.5"),
        (lambda: metrics.TokenTopKAccuracy(k=-1), "Expected k >= 1"),
        (lambda: metrics.AUC(bins=1), "Expected bins >= 2, got bins=1"),
        (lambda: metrics.PerDomain(metrics.accuracy, 0), "Expected num_domains >= 1"),
        (lambda: metrics.Recall("weighted"), 'Expected average to be "macro", "micro" or None'),
    ],
)
def test_bad_options(metric, message):
    with pytest.raises(ValueError, match=message):
        metric()


class Largest(NamedTuple):
    """How many examples have each class as their largest output, and the share of the most frequent one."""

    counts: Any

    @property
    def weight(self):
        return self.counts.sum(-1)

    def result(self):
        return self.counts.max(-1) / np.maximum(self.counts.sum(-1), 1)


def test_ways_to_return_a_metric():
    evaluation = evaluate(
        array=values,
        mean=lambda e, o: metrics.per_example(o[:, 0]),
        vector=lambda e, o: metrics.Mean(o, jnp.ones_like(o)),
        total=lambda e, o: metrics.Sum(o),
        integers=lambda e, o: e["y"],
        booleans=lambda e, o: e["y"] > 1,
        half=lambda e, o: o[:, 0].astype(jnp.bfloat16),
        own=lambda e, o: Largest(jax.nn.one_hot(o.argmax(1), 4, dtype=jnp.int32)),
        table=lambda e, o: metrics.Mean(
            jnp.einsum("nc,p->npc", o, jnp.arange(3.0)), jnp.einsum("n,pc->npc", e["y"], jnp.ones((3, 4), jnp.int32))
        ),
    )
    model, data = federation.model(), federation.data()
    outputs = np.asarray(model.apply_for_eval(model.init(jax.random.key(0)), {"x": data.columns["x"]}))
    overall = evaluation.overall
    np.testing.assert_allclose(overall["array"], outputs[:, 0].mean(), rtol=1e-5)
    assert overall["array"] == overall["mean"] and overall["half"] == pytest.approx(overall["array"], rel=0.02)
    np.testing.assert_allclose(overall["vector"], outputs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(overall["total"], outputs.sum(0), rtol=1e-5)
    weights = data.columns["y"].sum()
    np.testing.assert_allclose(overall["table"], np.outer(np.arange(3), outputs.sum(0)) / weights, rtol=1e-5)
    assert evaluation.clients["table"].weight[3].tolist() == [[data.columns["y"][10:22].sum()] * 4] * 3
    assert overall["integers"] == data.columns["y"].mean() and overall["booleans"] == (data.columns["y"] > 1).mean()
    most = np.bincount(outputs.argmax(1), minlength=4)
    assert overall["own"] == most.max() / most.sum()
    assert evaluation.clients["own"].counts.shape == (8, 4) and evaluation.clients["own"].result()[1] == 0
    assert 0 < evaluation.over_clients("own")["mean"] <= 1


def test_counts_beyond_the_integers_of_float32_are_exact():
    """A client's count of 2**24 + 1 is not a float32; each example stands for many, as a sequence of tokens does."""
    many = 2**24 // 30 + 1
    evaluation = evaluate(count=lambda e, o: metrics.Sum(jnp.full(len(o), many)), share=lambda e, o: metrics.Mean(
        jnp.where(e["y"] == 0, 1, 0) * many, jnp.full(len(o), many)
    ))  # fmt: skip
    data = federation.data()
    assert evaluation.overall["count"] == data.num_examples * many > 2**24
    assert evaluation.clients["count"].total.tolist() == (data.sizes * many).tolist()
    assert evaluation.overall["share"] == (data.columns["y"] == 0).mean()


def test_padding_of_any_value_does_not_count():
    """One example in a batch of 8 rows, of which seven repeat the last row; and an infinite value of an example masked."""
    data = federation.data(sizes=(5,))
    model = dataclasses.replace(federation.model(), metrics={"confusion": metrics.ConfusionMatrix(), "sum": values})
    params = model.init(jax.random.key(0))
    for batch_size in (1, 2, 3, 4, 5):
        evaluation = fedsim.evaluate(model, params, data, batch_size=batch_size, execution=fedsim.Pmap(devices=2))
        assert evaluation.overall["confusion"].sum() == 5
    huge = np.where(np.arange(5)[:, None] == 4, 3e38, data.columns["x"]).astype(np.float32)
    first = fedsim.FederatedData.from_arrays({**data.columns, "x": huge}, sizes=[4, 1])
    evaluation = fedsim.evaluate(model, {"linear": {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}}, first, batch_size=4)
    assert np.isfinite(evaluation.clients["sum"].result()[0]) and not np.isfinite(evaluation.clients["sum"].result()[1])


def test_results_are_the_same_in_jax_and_numpy():
    data = federation.data()
    statistics = evaluate(
        mean=metrics.accuracy, f1=metrics.F1(), micro=metrics.Precision("micro"), each=metrics.Recall(None), auc=metrics.AUC(),
        confusion=metrics.ConfusionMatrix(),
    ).clients  # fmt: skip
    for name, statistic in statistics.items():
        compiled = jax.jit(lambda statistic: (statistic.result(), statistic.weight))(jax.tree.map(jnp.asarray, statistic))
        for one, other in zip(compiled, (statistic.result(), statistic.weight), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)
            assert len(one) == data.num_clients


def test_sparse_equals_dense():
    index, weights = jnp.array([[0, 3, 3], [5, -1, 6]]), jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    sparse = metrics.Sparse.of(index, (2, 3), weights)
    assert sparse.dense().tolist() == [[[1, 0, 0], [5, 0, 0]], [[0, 0, 0], [0, 0, 4]]]
    assert metrics.Sparse.of(jnp.array([1, 9]), (2,), jnp.array([2, 2])).dense().tolist() == [[0, 2], [0, 0]]


def test_outputs_that_are_not_a_number_are_no_prediction():
    examples, outputs = {"y": jnp.array([0, 1])}, jnp.array([[jnp.nan, 0.0], [0.0, 1.0]])
    assert metrics.accuracy(examples, outputs).total.tolist() == [0, 1]
    assert metrics.ConfusionMatrix()(examples, outputs).total.dense().sum(0).tolist() == [[0, 0], [0, 1]]
    f1 = jax.tree.map(lambda x: x.sum(0), metrics.F1("micro")(examples, outputs).correct.dense())
    assert f1.tolist() == [0, 1]
    tokens = metrics.TokenAccuracy()({"y": jnp.array([[1, 1]])}, jnp.array([[[jnp.nan, 5.0], [0.0, 5.0]]]))
    assert tokens.total.tolist() == [1]
    assert metrics.TopKAccuracy(2)(examples, outputs).total.tolist() == [0, 1]
    assert metrics.RecallAtK(1)({"y": jnp.array([[1, 1], [0, 1]])}, outputs).total.tolist() == [0, 1]


@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.AUC(), metrics.AUC(score=jax.nn.sigmoid), metrics.F1()])
def test_one_logit_per_example_is_no_class(metric):
    """The largest of one logit is always that of class 0."""
    examples, outputs = {"y": jnp.array([0, 1])}, jnp.array([[-1.0], [1.0]])
    with pytest.raises(ValueError, match=r"shape \[2, 1\]"):
        metric(examples, outputs)
