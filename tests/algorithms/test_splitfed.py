"""SplitFed against FedAvg of the whole model, a backward pass in NumPy, and closed forms of message sizes."""

import functools

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.algorithms import FedAvg, SplitFed
from fedsim.compressors import TopK, UniformQuantizer

BATCHES = fedsim.Batches(size=4, epochs=2)


@functools.cache
def model(head=False):
    def on_server(activations):
        activations = jnp.tanh(hk.Linear(6)(activations))
        return activations if head else hk.Linear(federation.NUM_CLASSES)(activations)

    return fedsim.SplitModel.from_parts(
        device=hk.transform(lambda examples: jnp.tanh(hk.Linear(5)(examples["x"]))),
        server=hk.transform(on_server),
        head=hk.transform(lambda activations: hk.Linear(federation.NUM_CLASSES)(activations)) if head else None,
        features=federation.FEATURES,
        num_classes=federation.NUM_CLASSES,
    )


def settings(head=False, **changes):
    return {"model": model(head), "client_optimizer": optax.sgd(0.3), "batches": BATCHES, "execution": fedsim.Jit()} | changes


@pytest.mark.parametrize("head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_compression_it_is_fedavg_of_the_whole_model(head):
    split, whole = SplitFed(**settings(head)), FedAvg(**settings(head))
    state = start = split.init(jax.random.key(0))
    expected = whole.init(jax.random.key(0))
    for round in range(2):
        state, info = split.apply(state, federation.cohort(round=round))
        expected, expected_info = whole.apply(expected, federation.cohort(round=round))
        np.testing.assert_allclose(info.clients["loss"], expected_info.clients["loss"], rtol=1e-5, atol=1e-6)
    federation.assert_trees_close(state.params, expected.params)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start.params, state.params)
    assert sorted(state.params) == ["device", *(["head"] * head), "server"] and min(jax.tree.leaves(moved)) > 0.01


@pytest.mark.first(1)
@pytest.mark.parametrize("parts", [{"frozen": "device/*", "kept": "server/linear_1/*"}, {"frozen": ["server/*", "*/b"]}])
def test_parts_that_are_frozen_or_kept_are_those_of_fedavg(parts):
    split, whole = (cls(**settings(model=model().with_parts(**parts))) for cls in (SplitFed, FedAvg))
    state, expected = (algorithm.init(jax.random.key(0)) for algorithm in (split, whole))
    for round in range(2):
        state, info = split.apply(state, federation.cohort(round=round))
        expected, _ = whole.apply(expected, federation.cohort(round=round))
    federation.assert_trees_close(federation.plain(state), federation.plain(expected))
    of_device = tree_bits({"device": state.server.params["device"]})
    took_part = np.asarray(info.clients["num_steps"]) > 0
    sent = info.clients["device_bits_up"] - info.clients["step_bits_up"] * info.clients["num_steps"].astype(jnp.float32)
    np.testing.assert_allclose(sent, np.where(took_part, of_device, 0), atol=1)


def tree_bits(a):
    return sum(32 * leaf.size for leaf in jax.tree.leaves(a))


def largest(x, count):
    """Keeps some entries of each row of a matrix, those with the largest magnitude."""
    kept = np.zeros_like(x)
    for row, at in enumerate(np.argsort(-np.abs(x), kind="stable")[:, :count]):
        kept[row, at] = x[row, at]
    return kept


def test_a_compressed_step_is_a_backward_pass_at_what_arrived():
    """The server's gradient is that at the activations that arrived; the device's is its own Jacobian times what came back."""
    algorithm = SplitFed(**settings(cut_compressor=TopK(fraction=0.5)))
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(4, 3)).astype(np.float32), np.array([0, 3, 1, 1], np.int32)
    params = algorithm.init(jax.random.key(0)).params
    batch = fedsim.Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones(4, bool), jax.random.key(1), 0)
    loss, gradient, traffic = algorithm.gradient_through_cuts(None, params, batch)

    (one,), (two, three) = (
        [(np.float64(v["w"]), np.float64(v["b"])) for v in params[p].values()] for p in ("device", "server")
    )
    activations = np.tanh(x @ one[0] + one[1])
    arrived = largest(activations, 3)
    hidden = np.tanh(arrived @ two[0] + two[1])
    logits = hidden @ three[0] + three[1]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    slope = (shares - np.eye(4)[y]) / 4
    slope_hidden = (slope @ three[0].T) * (1 - hidden**2)
    back = largest(slope_hidden @ two[0].T, 3) * (1 - activations**2)
    assert float(loss) == pytest.approx(-np.log(shares[np.arange(4), y]).mean(), rel=1e-5)
    expected = {"device": {"linear": {"w": x.T @ back, "b": back.sum(0)}}}
    expected["server"] = {
        "linear": {"w": arrived.T @ slope_hidden, "b": slope_hidden.sum(0)},
        "linear_1": {"w": hidden.T @ slope, "b": slope.sum(0)},
    }
    federation.assert_trees_close(gradient, expected, rtol=1e-4)
    sent = 4 * (3 * 32 + 5)  # three of five floats per example, and a bit for each of the five that says which
    assert (float(traffic.up), float(traffic.down)) == (sent + 4 * 32, sent)


@pytest.mark.parametrize(
    "compressor", [TopK(fraction=0.5), pytest.param(UniformQuantizer(levels=4), marks=pytest.mark.slow)], ids=["top", "levels"]
)
def test_padding_changes_neither_the_result_nor_the_bits(compressor):
    data, found = federation.data([3, 1]), []
    for size in (3, 20):
        changes = {"cut_compressor": compressor, "batches": fedsim.Batches(size=size, epochs=1)}
        algorithm = SplitFed(**settings(**changes))
        state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))
        found.append((state.params, info.clients["step_bits_up"], info.clients["step_bits_down"]))
    federation.assert_trees_close(*found)


@pytest.mark.parametrize("head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_messages_have_the_sizes_of_closed_forms(head):
    sizes = np.array([7, 0, 3, 12])
    algorithm = SplitFed(**settings(head))
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(federation.data(sizes)))
    steps = -(-2 * sizes // 4)
    examples = 2 * sizes  # two epochs; padding is not sent
    # The head's model sends 5 activations up, 6 down, 6 gradients up and 5 down; the other 5 and the label up, and 5 down.
    up, down = (11, 11) if head else (6, 5)
    parts = (3 * 5 + 5 + head * (6 * 4 + 4)) * (sizes > 0)  # the parts of the model on the device
    np.testing.assert_allclose(info.clients["device_bits_up"], 32 * (parts + examples * up))
    np.testing.assert_allclose(info.clients["device_bits_down"], 32 * (parts + examples * down))
    np.testing.assert_allclose(info.clients["step_bits_up"], 32 * examples * up / np.maximum(steps, 1))
    np.testing.assert_allclose(info.clients["step_bits_down"], 32 * examples * down / np.maximum(steps, 1))


@pytest.mark.slow
def test_four_bits_take_an_eighth_and_train_as_well():
    data = fedsim.datasets.load("digits", clients=20)
    accuracies, sent = [], []
    for changes in ({}, {"cut_compressor": UniformQuantizer(levels=16)}):
        algorithm = SplitFed(
            model=fedsim.models.digits_split(head=True),
            client_optimizer=optax.sgd(0.2),
            batches=fedsim.Batches(size=10),
            **changes,
        )
        state = algorithm.init(jax.random.key(0))
        for cohort in fedsim.UniformSampler(data.train, clients=10, seed=0).rounds(30):
            state, info = algorithm.apply(state, cohort)
        accuracies.append(fedsim.evaluate(algorithm.model, state.params, data.test).overall["accuracy"])
        sent.append(float(info.clients["step_bits_up"].max()))
    assert accuracies[0] > 0.8 and accuracies[1] > accuracies[0] - 0.03
    assert sent[1] / sent[0] == pytest.approx((4 + 64 / 128) / 32, rel=0.05)  # also the range of the levels of an example


def test_a_model_without_parts_is_on_the_device():
    algorithm = SplitFed(**settings(model=federation.model()))
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    whole = FedAvg(**settings(model=federation.model()))
    federation.assert_trees_equal(state.params, whole.apply(whole.init(jax.random.key(0)), federation.cohort())[0].params)
    assert not info.clients["step_bits_up"].any() and info.clients["device_bits_up"].max() == 32 * (3 * 4 + 4)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="Expected cut_compressor to be an instance of Compressor"):
        SplitFed(**settings(cut_compressor="topk"))
    with pytest.raises(ValueError, match=r"Expected a fedsim.SplitModel with a cut_compressor, got model=Model"):
        SplitFed(**settings(model=federation.model(), cut_compressor=TopK(fraction=0.5)))
    with pytest.raises(ValueError, match="Expected device to be the result of hk.transform, got a str"):
        fedsim.SplitModel.from_parts(device="dense", server="dense", features={})
    with pytest.raises(ValueError, match="Expected device >= 1, got device=0"):
        fedsim.models.digits_split(device=0)


def test_an_overridden_loss_is_refused_for_a_model_in_parts():
    class Ridge(SplitFed):
        def client_loss(self, shared, params, batch):
            return super().client_loss(shared, params, batch) + fedsim.tree.squared_norm(params)

    settings = {"client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=16)}
    with pytest.raises(ValueError, match="Expected Ridge to leave client_loss as it is with a fedsim.SplitModel"):
        Ridge(model=fedsim.models.digits_split(), **settings)
    Ridge(model=fedsim.models.digits_logistic(), **settings)
