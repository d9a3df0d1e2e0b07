"""Metrics of text against NumPy, one token after another, and by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import metrics, models

PAD, EOS, OOV = 0, 2, (11, 12)
IDS, LENGTH = 13, 6
SPECIAL = (PAD, 1, EOS, *OOV)
METRICS = {
    "loss": metrics.TokenCrossEntropy(),
    "loss_by_position": metrics.TokenCrossEntropy(per_position=True),
    "sequence_loss": metrics.SequenceCrossEntropy(),
    "accuracy": metrics.TokenAccuracy(masked_labels=(PAD, EOS)),
    "accuracy_in_vocab": metrics.TokenAccuracy(masked_labels=(PAD, EOS), masked_logits=SPECIAL),
    "accuracy_by_position": metrics.TokenAccuracy(per_position=True),
    "top3": metrics.TokenTopKAccuracy(k=3),
    "top3_in_vocab": metrics.TokenTopKAccuracy(k=3, masked_logits=SPECIAL),
    "top3_by_position": metrics.TokenTopKAccuracy(k=3, per_position=True),
    "oov_rate": metrics.OOVRate(oov_labels=OOV),
    "oov_by_position": metrics.OOVRate(oov_labels=OOV, per_position=True),
    "truncation_rate": metrics.TruncationRate(eos_label=EOS),
    "length": metrics.SequenceLength(),
    "tokens": metrics.TokenCount(masked_labels=(PAD, EOS)),
    "sequences": metrics.SequenceCount(),
    "loss_by_domain": metrics.PerDomain(metrics.TokenCrossEntropy(), 2, feature="domain"),
}


@functools.cache
def data():
    draw = np.random.default_rng(0)
    sizes = [5, 0, 1, 14, 8]
    y = draw.integers(3, IDS, (sum(sizes), LENGTH))
    for row, tokens in enumerate(draw.integers(0, LENGTH + 1, len(y))):  # of 0 to 5 tokens and eos; those of 6 are truncated
        y[row, tokens:] = PAD
        if 0 < tokens < LENGTH:
            y[row, tokens] = EOS
    x = draw.integers(0, IDS, y.shape)
    columns = {"x": x.astype(np.int32), "y": y.astype(np.int32), "domain": draw.integers(0, 2, len(y)).astype(np.int32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=sizes)


def model():
    token = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    return fedsim.Model(
        init=lambda key: jax.random.normal(key, (IDS, IDS)),
        apply_for_train=lambda params, examples, key: params[examples["x"]],
        apply_for_eval=lambda params, examples: params[examples["x"]],
        loss=lambda examples, outputs: outputs[:, 0, 0],
        metrics=METRICS,
        features={"x": token, "y": token},
        num_classes=IDS,
    )


def by_numpy(examples, table):
    """Every metric, one sequence and one token after another."""
    x, y, domains = (np.asarray(examples[name]) for name in ("x", "y", "domain"))
    sums = {name: [] for name in METRICS}  # pairs of value and weight, or of position (or domain), value and weight

    def top(logits, k):
        return np.argsort(-logits, kind="stable")[:k]

    for row in range(len(y)):
        whole, tokens = 0.0, 0
        for t, label in enumerate(y[row]):
            if label == PAD:
                continue
            logits = table[x[row, t]]
            loss = np.log(np.exp(logits).sum()) - logits[label]
            in_vocab = np.where(np.isin(np.arange(IDS), SPECIAL), -np.inf, logits)
            whole, tokens = whole + loss, tokens + 1
            sums["loss"].append((loss, 1))
            sums["loss_by_position"].append((t, loss, 1))
            sums["loss_by_domain"].append((domains[row], loss, 1))
            sums["accuracy_by_position"].append((t, logits.argmax() == label, 1))
            sums["top3"].append((label in top(logits, 3), 1))
            sums["top3_by_position"].append((t, label in top(logits, 3), 1))
            sums["top3_in_vocab"].append((label in top(in_vocab, 3), 1))
            sums["oov_rate"].append((label in OOV, 1))
            sums["oov_by_position"].append((t, label in OOV, 1))
            if label != EOS:
                sums["accuracy"].append((logits.argmax() == label, 1))
                sums["accuracy_in_vocab"].append((in_vocab.argmax() == label, 1))
                sums["tokens"].append((1, None))
        if tokens:
            sums["sequence_loss"].append((whole, 1))
            sums["truncation_rate"].append((EOS not in y[row], 1))
            sums["length"].append((tokens, 1))
            sums["sequences"].append((1, None))
    found = {}
    for name, entries in sums.items():
        if name in ("tokens", "sequences"):
            found[name] = len(entries)
        elif "_by_" in name:
            groups = [[e[1:] for e in entries if e[0] == group] for group in range(2 if name.endswith("domain") else LENGTH)]
            found[name] = [np.mean([value for value, _ in group]) if group else np.nan for group in groups]
        else:
            found[name] = np.mean([value for value, _ in entries]) if entries else np.nan
    return found


@pytest.mark.first(1)
@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_equals_numpy(devices, batch_size):
    params = model().init(jax.random.key(0))
    evaluation = fedsim.evaluate(model(), params, data(), execution=fedsim.Pmap(devices=devices), batch_size=batch_size)
    expected = by_numpy(data().columns, np.asarray(params, np.float64))
    assert 0 < expected["oov_rate"] < 1 and 0 < expected["truncation_rate"] < 1 and expected["accuracy_in_vocab"] > 0
    for name, value in expected.items():
        np.testing.assert_allclose(evaluation.overall[name], value, rtol=1e-5, err_msg=name)
    for i, client in enumerate(data().clients()):
        for name, value in by_numpy(client.examples, np.asarray(params, np.float64)).items():
            np.testing.assert_allclose(evaluation.clients[name].result()[i], value, rtol=1e-5, err_msg=f"{name}, client {i}")


def test_by_hand():
    examples = {"y": jnp.array([[5, 11, 2, 0], [5, 6, 7, 8], [0, 0, 0, 0]])}
    outputs = jax.nn.one_hot(jnp.array([[5, 11, 2, 0], [5, 7, 7, 11], [0, 0, 0, 0]]), 12)

    def sums(metric):
        return [np.asarray(leaf).sum(0).tolist() for leaf in metric(examples, outputs)]

    assert sums(metrics.TokenAccuracy()) == [5, 7]
    assert sums(metrics.TokenAccuracy(masked_labels=(0, 2))) == [4, 6]
    assert sums(metrics.TokenAccuracy(masked_labels=(0, 2), masked_logits=(0, 1, 2, 11))) == [3, 6]
    assert sums(metrics.TokenAccuracy(per_position=True)) == [[2, 1, 2, 0], [2, 2, 2, 1]]
    assert sums(metrics.OOVRate(oov_labels=(11,))) == [1, 7]
    assert sums(metrics.TruncationRate(eos_label=2)) == [1, 2]
    assert sums(metrics.SequenceLength()) == [7, 2]
    assert sums(metrics.TokenCount(masked_labels=(0, 2))) == [6]
    assert sums(metrics.SequenceCount()) == [2]


def test_language_models_report_rates():
    small = models.stackoverflow_lstm(vocabulary=9, length=LENGTH, embedding=4, hidden=4)
    assert list(small.metrics) == ["loss", "accuracy", "accuracy_in_vocab", "oov_rate", "truncation_rate"]
    sequences = data().columns["y"]
    population = fedsim.FederatedData.from_arrays({"x": sequences, "y": sequences}, sizes=[len(sequences)])
    found = fedsim.evaluate(small, small.init(jax.random.key(0)), population).overall
    tokens = sequences[sequences != PAD]
    assert found["oov_rate"] == (tokens == 12).mean()
    there = sequences[(sequences != PAD).any(1)]
    assert found["truncation_rate"] == (there != EOS).all(1).mean()
    characters = models.shakespeare_lstm(9, length=LENGTH).metrics
    assert list(characters) == ["loss", "accuracy", "accuracy_in_vocab", "oov_rate", "accuracy_with_eos"]
    joined = np.array([[7, 12, EOS, 1, 8, PAD]])  # two speeches, and an unknown character
    right = characters["accuracy_with_eos"]({"y": joined}, np.eye(IDS, dtype=np.float32)[joined])
    assert (right.total.item(), right.weight.item()) == (4, 4)
    assert characters["accuracy"]({"y": joined}, np.eye(IDS, dtype=np.float32)[joined]).weight.item() == 2
    assert dataclasses.replace(small, metrics=METRICS).metrics == METRICS


def test_the_perplexity_on_the_host_is_computed_in_float64():
    """In float32 the exponential is infinite from 88.8 on."""
    total, weight = np.array([300.0, 3000.0, 0.0]), np.array([3.0, 3.0, 0.0])
    statistic = metrics.Perplexity()({"y": np.zeros([1, 2], np.int32)}, np.zeros([1, 2, 3], np.float32))
    result = type(statistic)(total, weight).result()
    np.testing.assert_allclose(result, [np.exp(100.0), np.inf, np.nan], rtol=1e-12)
