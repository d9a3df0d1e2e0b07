"""Language and tag models: published parameter counts, forward passes against NumPy, losses and metrics by hand."""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import datasets, models

SMALL = {"vocabulary": 30, "length": 6}


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def initial(model, seed=0):
    generator = np.random.default_rng(seed)

    def draw(leaf):
        fan_in = leaf.shape[0] if len(leaf.shape) > 1 else 25
        return generator.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(fan_in))

    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))


def sequences(num_ids, n=4, length=6):
    generator = np.random.default_rng(1)
    tokens = generator.integers(3, num_ids, (n, length + 1)).astype(np.int16)
    tokens[:, 0] = 1
    tokens[1, 4], tokens[1, 5:] = 2, 0
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(params, name, x):
    return x @ np.float64(params[name]["w"]) + np.float64(params[name]["b"])


def lstm(params, name, x):
    """[n, time, in] in float64, step by step; gates in the order input, cell, forget, output."""
    hidden = params[name]["b"].size // 4
    h = c = np.zeros([len(x), hidden])
    outputs = []
    for t in range(x.shape[1]):
        i, g, f, o = np.split(linear(params, name, np.concatenate([x[:, t], h], 1)), 4, axis=1)
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, 1)


def test_parameter_counts_are_the_published_ones():
    assert count(models.stackoverflow_lstm()) == 4_050_748  # Reddi et al. 2021, TFF, FedJAX
    assert count(models.shakespeare_lstm()) == 820_522  # the same
    assert count(models.stackoverflow_logistic()) == 10_000 * 500 + 500
    assert count(models.stackoverflow_logistic(length=100)) == 10_000 * 500 + 500
    assert count(models.stackoverflow_transformer()) == 1_962_912  # pfl-research
    block = 4 * (96 * 96 + 96) + 96 * 1536 + 1536 + 1536 * 96 + 96 + 4 * 96
    assert count(models.stackoverflow_transformer(oov_buckets=3)) == 10_006 * 96 + 3 * block
    block = 4 * (128 * 128 + 128) + 128 * 512 + 512 + 512 * 128 + 128 + 4 * 128
    assert count(models.shakespeare_transformer()) == 90 * 128 + 4 * block == 804_608


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_stackoverflow_lstm_equals_numpy(tanh, layers):
    model = models.stackoverflow_lstm(**SMALL, embedding=8, hidden=14, layers=layers, tanh=tanh)
    params, examples = initial(model), sequences(34)
    x = np.float64(params["embed"]["embeddings"])[examples["x"]]
    for layer in range(layers):
        x = lstm(params, "lstm/linear" if layer == 0 else f"lstm_{layer}/linear", x)
        x = linear(params, "linear" if layer == 0 else f"linear_{layer}", np.tanh(x) if tanh else x)
    expected = linear(params, f"linear_{layers}", x)
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


def test_stackoverflow_lstm_of_the_published_size_equals_numpy():
    model = models.stackoverflow_lstm()
    params, examples = initial(model), sequences(10_004, n=2, length=20)
    x = np.float64(params["embed"]["embeddings"])[examples["x"]]
    expected = linear(params, "linear_1", linear(params, "linear", lstm(params, "lstm/linear", x)))
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


def test_shakespeare_lstm_equals_numpy():
    model = models.shakespeare_lstm(length=12)
    params, examples = initial(model), sequences(90, length=12)
    x = np.float64(params["embed"]["embeddings"])[examples["x"]]
    expected = linear(params, "linear", lstm(params, "lstm_1/linear", lstm(params, "lstm/linear", x)))
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


SMALL_BLOCKS = {"embedding": 8, "heads": 2, "feedforward": 20, "layers": 2}
TRANSFORMERS = [
    models.stackoverflow_transformer(**SMALL, **SMALL_BLOCKS),
    models.shakespeare_transformer(30, length=6, **SMALL_BLOCKS),
]


@pytest.mark.parametrize("model", TRANSFORMERS, ids=["words", "characters"])
def test_transformer_equals_numpy(model):
    params, examples = initial(model), sequences(34)
    embeddings = np.float64(params["embed"]["embeddings"])
    n, length, width, heads = 4, 6, 8, 2
    x = embeddings[examples["x"]] * np.sqrt(width)
    for position in range(length):
        for i in range(width):
            angle = position / 10_000 ** (2 * (i // 2) / width)
            x[:, position, i] += np.sin(angle) if i % 2 == 0 else np.cos(angle)
    numbers = iter(range(100))

    def layer(x):
        number = next(numbers)
        return linear(params, f"linear_{number}" if number else "linear", x)

    norms = iter(["layer_norm", "layer_norm_1", "layer_norm_2", "layer_norm_3"])

    def norm(x):
        p = params[next(norms)]
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]

    for _ in range(2):
        query, key, value = layer(x), layer(x), layer(x)
        attended = np.zeros_like(x)
        for example in range(n):
            for head in range(heads):
                part = slice(head * 4, head * 4 + 4)
                for at in range(length):
                    scores = key[example, : at + 1, part] @ query[example, at, part] / 2
                    weights = np.exp(scores - scores.max())
                    attended[example, at, part] = weights / weights.sum() @ value[example, : at + 1, part]
        x = norm(x + layer(attended))
        x = norm(x + layer(np.maximum(layer(x), 0)))
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), x @ embeddings.T, atol=1e-5, rtol=1e-5)


def test_remat_changes_no_gradient():
    """Also with dropout, whose draws are the same."""
    plain, again = (models.shakespeare_transformer(30, length=6, **SMALL_BLOCKS, remat=remat) for remat in (False, True))
    params, examples = initial(plain), {name: jnp.asarray(tokens) for name, tokens in sequences(34).items()}
    batch = fedsim.Batch(examples, jnp.ones(4, bool), jax.random.key(0), 0)
    gradients = [jax.jit(jax.grad(model.train_loss))(params, batch) for model in (plain, again)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *gradients)
    assert re.search("remat|checkpoint", str(jax.make_jaxpr(again.train_loss)(params, batch)))


def test_transformer_has_dropout_in_training_only():
    model = models.stackoverflow_transformer(**SMALL, embedding=8, heads=2, feedforward=20, layers=1, dropout=0.5)
    params, examples = initial(model), sequences(34)
    one, again, other = (model.apply_for_train(params, examples, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


@pytest.mark.parametrize("name", ["stackoverflow_lstm", "stackoverflow_transformer"])
def test_outputs_do_not_depend_on_later_words(name):
    sizes = {"hidden": 12} if name == "stackoverflow_lstm" else {"heads": 2}
    model = models.get(name, **SMALL, embedding=8, **sizes)
    params, examples = initial(model), sequences(34)
    changed = {**examples, "x": np.where(np.arange(6) >= 3, 5, examples["x"]).astype(np.int16)}
    one, other = (np.asarray(model.apply_for_eval(params, e)) for e in (examples, changed))
    np.testing.assert_allclose(one[:, :3], other[:, :3], atol=1e-6)
    assert not np.allclose(one[:, 3:], other[:, 3:])


LABELS = np.array([[5, 33, 2, 0, 0, 0], [7, 8, 9, 3, 4, 5]], np.int16)  # 33 is oov of 30 words


def logits_for(answers):
    return jnp.asarray(np.eye(34, dtype=np.float32)[np.asarray(answers)] * 3)


def test_loss_of_a_sentence_is_the_sum_over_its_tokens_except_pad():
    model, divided = models.stackoverflow_lstm(**SMALL), models.stackoverflow_lstm(**SMALL, expected_length=13.3)
    outputs = jax.random.normal(jax.random.key(0), (2, 6, 34))
    nll = -np.log(np.take_along_axis(np.asarray(jax.nn.softmax(outputs)), LABELS[..., None].astype(int), 2)[..., 0])
    sums = np.array([nll[0, :3].sum(), nll[1].sum()])
    examples = {"x": LABELS, "y": LABELS}
    np.testing.assert_allclose(model.loss(examples, outputs), sums, rtol=1e-5)
    np.testing.assert_allclose(divided.loss(examples, outputs), sums / 13.3, rtol=1e-5)
    mean = models.shakespeare_lstm(30, length=6).loss(examples, outputs)
    np.testing.assert_allclose(mean, sums / 6, rtol=1e-5)
    total, weight = model.metrics["loss"](examples, outputs)
    np.testing.assert_allclose(total, sums, rtol=1e-5)
    assert weight.tolist() == [3, 6]


def test_accuracies_leave_out_special_tokens():
    """Published: pad, bos, eos, oov labels are left out. FedJAX's: oov counts as a miss, special ids are never predicted."""
    model = models.stackoverflow_lstm(**SMALL)
    outputs = logits_for([[5, 33, 2, 0, 0, 0], [7, 8, 3, 3, 2, 33]])
    published = model.metrics["accuracy"]({"y": LABELS}, outputs)
    assert published.total.tolist() == [1, 3] and published.weight.tolist() == [1, 6]
    fedjax = model.metrics["accuracy_in_vocab"]({"y": LABELS}, outputs)
    assert fedjax.total.tolist() == [1, 3] and fedjax.weight.tolist() == [2, 6]
    runner_up = outputs + jnp.asarray(np.eye(34, dtype=np.float32)[LABELS])  # the label comes second, after a special id
    assert model.metrics["accuracy"]({"y": LABELS}, runner_up).total.tolist() == [1, 3]
    assert model.metrics["accuracy_in_vocab"]({"y": LABELS}, runner_up).total.tolist() == [1, 5]


def test_every_bucket_of_unknown_words_is_left_out():
    model = models.stackoverflow_lstm(vocabulary=28, length=6, oov_buckets=3)
    labels = np.array([[30, 31, 32, 33, 2, 0]], np.int16)
    assert model.metrics["accuracy"]({"y": labels}, logits_for(labels)).weight.tolist() == [1]


def test_tags_from_shares_from_ids_and_by_numpy_are_the_same():
    words, tags = [f"w{i}" for i in range(20)], [f"t{i}" for i in range(7)]
    posts, marks = [b"w0 w3 w3 unknown", b"", b"w19", b"unknown"], [b"t0|t3", b"", b"t6|t1", b"other"]
    titles = [b"w1", b"", b"w19 w0", b""]
    shares, y = fedsim.text.TagTokenizer(words, tags)(posts, titles=titles, tags=marks)
    ids, _ = fedsim.text.TagTokenizer(words, tags, length=8)(posts, titles=titles, tags=marks)
    dense, sparse = models.stackoverflow_logistic(20, 7), models.stackoverflow_logistic(20, 7, length=8)
    params = initial(dense)
    expected = linear(params, "linear", shares)
    for model, x in ((dense, shares), (sparse, ids)):
        outputs = jax.jit(model.apply_for_eval)(params, {"x": x})
        np.testing.assert_allclose(outputs, expected, atol=1e-5)
        p = sigmoid(expected)
        np.testing.assert_allclose(model.loss({"y": y}, outputs), -(np.log(p) * y + np.log(1 - p) * (1 - y)).sum(1), rtol=1e-4)
        recall = model.metrics["recall_at_5"]({"y": y}, outputs)
        best = np.argsort(-expected, axis=1)[:, :5]
        assert recall.total.tolist() == [y[row, best[row]].sum() for row in range(4)]
        assert recall.weight.tolist() == [2, 0, 2, 0]


def test_loss_of_zero_logits_is_log_two_per_tag():
    model = models.stackoverflow_logistic(20, 7)
    losses = model.loss({"y": np.zeros([2, 7], np.uint8)}, jnp.zeros([2, 7]))
    np.testing.assert_allclose(losses, [7 * np.log(2)] * 2, rtol=1e-6)


def test_the_default_loss_of_a_full_batch_of_tags_is_the_published_one():
    """Keras' BinaryCrossentropy with the reduction SUM: the mean over the 500 tags, summed over a batch of 100."""
    model = models.get(datasets.describe("stackoverflow_tag").default_model)
    draw = np.random.default_rng(0)
    y, outputs = draw.integers(0, 2, (100, 500)).astype(np.uint8), draw.normal(size=(100, 500)).astype(np.float32)
    p = sigmoid(outputs.astype(np.float64))
    published = -np.log(np.where(y == 1, p, 1 - p)).mean(axis=1).sum()
    np.testing.assert_allclose(np.mean(model.loss({"y": y}, outputs)), published, rtol=1e-5)
    np.testing.assert_allclose(model.metrics["loss"]({"y": y}, outputs), 5 * model.loss({"y": y}, outputs), rtol=1e-6)


def test_a_federated_round_learns_to_predict_the_next_word():
    """Sentences count upwards: after some rounds, the next word is known."""
    model = models.stackoverflow_lstm(vocabulary=12, length=6, embedding=8, hidden=16, expected_length=6)
    start = np.random.default_rng(0).integers(0, 12, 64)
    words = (3 + (start[:, None] + np.arange(7)) % 12).astype(np.int16)
    data = fedsim.FederatedData.from_arrays({"x": words[:, :-1], "y": words[:, 1:]}, sizes=[20, 30, 14])
    algorithm = fedsim.algorithms.FedAvg(
        model=model,
        client_optimizer=optax.sgd(0.5, momentum=0.9),
        batches=fedsim.Batches(size=8, epochs=2),
        execution=fedsim.Jit(),
    )
    state = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply_rounds(state, [fedsim.Cohort.of(data, ["0", "1", "2"], round=i) for i in range(12)])
    assert fedsim.evaluate(model, state.params, data).overall["accuracy"] > 0.95


def test_error_for_ids_beyond_the_vocabulary_names_the_client():
    model = models.stackoverflow_lstm(vocabulary=12, length=3, hidden=4)
    y = np.array([[3, 4, 5], [3, 4, 16]], np.int16)
    data = fedsim.FederatedData.from_arrays({"x": y, "y": y}, sizes=[1, 1])
    with pytest.raises(ValueError, match="Client '1' has label y=16"):
        model.check(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.stackoverflow_lstm(0), "vocabulary=0"),
        (lambda: models.stackoverflow_lstm(layers=0), "layers=0"),
        (lambda: models.stackoverflow_lstm(expected_length=0), "expected_length=0"),
        (lambda: models.stackoverflow_transformer(heads=7), "heads=7"),
        (lambda: models.stackoverflow_logistic(tags=-1), "tags=-1"),
        (lambda: models.stackoverflow_logistic(divisor=0), "divisor=0"),
        (lambda: models.shakespeare_lstm(hidden=2.5), "hidden=2.5"),
    ],
)
def test_errors_for_sizes_that_are_not_positive(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parameters_have_the_names_of_fedjaxs_models():
    """Those of fedjax.models.stackoverflow and .shakespeare of FedJAX 0.0.17, so that weights can be copied."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(models.stackoverflow_lstm().init, jax.random.key(0)))
    assert shapes == {
        "embed": {"embeddings": (10_004, 96)},
        "lstm/linear": {"w": (766, 2680), "b": (2680,)},
        "linear": {"w": (670, 96), "b": (96,)},
        "linear_1": {"w": (96, 10_004), "b": (10_004,)},
    }
    assert set(jax.eval_shape(models.shakespeare_lstm().init, jax.random.key(0))) == {
        "embed", "lstm/linear", "lstm_1/linear", "linear"
    }  # fmt: skip
    assert isinstance(models.LSTM, type) and issubclass(models.LSTM, hk.Module)
