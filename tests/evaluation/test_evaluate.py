"""Evaluation of a population, compared with a NumPy loop over its clients."""

import copy
import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.evaluation import Evaluation, _evaluate
from fedsim.execution import _placement
from fedsim.planning import collectives_in


def numpy_evaluation(params, data):
    w, b = (np.asarray(params["linear"][name], np.float64) for name in "wb")
    per_client = []
    for client in data.clients():
        logits = client["x"] @ w + b
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        loss = -log_p[np.arange(len(client)), client["y"]]
        per_client.append((len(client), loss.sum(), (logits.argmax(1) == client["y"]).sum()))
    return np.array(per_client, np.float64)


@pytest.mark.first(4)
@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [7, 1, 256])
def test_agrees_with_numpy(memory, devices, batch_size):
    model, data = federation.model(), federation.data()
    params = model.init(jax.random.key(0))
    execution = fedsim.Pmap(devices=devices, memory=memory)
    evaluation = fedsim.evaluate(model, params, data, execution=execution, batch_size=batch_size)
    sizes, losses, right = numpy_evaluation(params, data).T
    np.testing.assert_allclose(evaluation.overall["loss"], losses.sum() / sizes.sum(), rtol=1e-5)
    np.testing.assert_allclose(evaluation.overall["accuracy"], right.sum() / sizes.sum(), rtol=1e-6)
    np.testing.assert_array_equal(evaluation.clients["accuracy"].weight, sizes)
    np.testing.assert_array_equal(evaluation.clients["accuracy"].total, right)
    np.testing.assert_allclose(evaluation.clients["loss"].total, losses, rtol=1e-5, atol=1e-6)
    # The empty client has weight 0 and result NaN, and is left out of the statistics over clients.
    means = right[sizes > 0] / sizes[sizes > 0]
    over = evaluation.over_clients("accuracy")
    np.testing.assert_allclose(
        [over["mean"], over["std"], over["worst 10%"]], [means.mean(), means.std(), means.min()], rtol=1e-6
    )


@pytest.mark.parametrize("num_classes", [None, federation.NUM_CLASSES])
@pytest.mark.parametrize("wrong", [-1, federation.NUM_CLASSES])
def test_labels_of_no_class_are_refused_in_training_and_evaluation(num_classes, wrong):
    """Without ``num_classes``, the number of logits says which labels the cross-entropy may have."""
    model, data = dataclasses.replace(federation.model(), num_classes=num_classes), federation.data()
    columns = {**data.columns, "y": np.where(np.arange(data.num_examples) == 3, wrong, data.columns["y"]).astype(np.int32)}
    data = fedsim.FederatedData(columns, data.offsets, data.client_ids)
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    state = algorithm.init(jax.random.key(0))
    message = f"has label y={wrong}, and the model has classes 0 to {federation.NUM_CLASSES - 1}"
    with pytest.raises(ValueError, match=message):
        algorithm.apply(state, federation.cohort(data))
    with pytest.raises(ValueError, match=message):
        fedsim.evaluate(model, state.params, data)


def test_streams_in_several_chunks(monkeypatch):
    monkeypatch.setattr("fedsim.evaluation._evaluate._CHUNK_BYTES", 64)
    model, data = federation.model(), federation.data()
    params = model.init(jax.random.key(0))
    resident = fedsim.evaluate(model, params, data, execution=fedsim.Jit(memory="resident"), batch_size=2)
    streamed = fedsim.evaluate(model, params, data, execution=fedsim.Pmap(devices=2, memory="stream"), batch_size=2)
    federation.assert_trees_close(resident, streamed)


@pytest.mark.parametrize("rows", [1, 7, 8, 30, 40, 43])
def test_streamed_chunks_are_divided_equally_over_devices(monkeypatch, rows):
    monkeypatch.setattr("fedsim.evaluation._evaluate._CHUNK_BYTES", 40 * 4)
    data = fedsim.FederatedData.from_arrays({"x": np.arange(1, rows + 1, dtype=np.int32)}, sizes=[rows // 2, rows - rows // 2])
    seen, per_device = [], min(10, -(-rows // 4))
    for columns, owner, count in _evaluate._streamed_chunks(data, fedsim.Pmap(devices=4).mesh(), batch_size=2):
        by_device = np.asarray(columns["x"]).reshape(4, per_device)
        own = (by_device > 0).sum(1)
        assert own.sum() == count
        assert own.max() == -(-count // 4)
        read, owners = by_device[by_device > 0], np.asarray(owner).reshape(4, per_device)[by_device > 0]
        np.testing.assert_array_equal(owners, read > rows // 2)
        seen.extend(read)
    assert seen == list(range(1, rows + 1))


def test_a_population_of_empty_clients():
    model, data = federation.model(), federation.data(sizes=(0, 0))
    evaluation = fedsim.evaluate(model, model.init(jax.random.key(0)), data)
    assert np.isnan(list(evaluation.overall.values())).all() and list(evaluation.overall) == ["loss", "accuracy"]
    assert np.isnan(list(evaluation.over_clients("accuracy").values())).all()
    assert np.isnan(evaluation.clients["loss"].result()).all()


def test_error_for_a_bad_batch_size():
    model, data = federation.model(), federation.data()
    with pytest.raises(ValueError, match="Expected batch_size >= 1, got batch_size=0"):
        fedsim.evaluate(model, model.init(jax.random.key(0)), data, batch_size=0)


def test_an_evaluation_has_no_collective_so_it_can_run_at_the_same_time_as_rounds():
    """Two programs with collectives at the same time can deadlock XLA's CPU threads, so only rounds may have one."""
    model, data = federation.model(), federation.data()
    fedsim.evaluate(model, model.init(jax.random.key(0)), data, execution=fedsim.Pmap(devices=2))
    (compiled,) = vars(model)["_execution"]["evaluation"].values()
    mesh = fedsim.Pmap(devices=2).mesh()
    columns, owner = _placement.resident_columns(data, mesh), _evaluate._resident_owner(data, mesh)
    text = compiled.lower(columns, owner, model.init(jax.random.key(0)), np.int32(1)).compile().as_text()
    assert not collectives_in(text)


def test_debug_evaluates_and_the_worst_loss_is_the_highest():
    model, data = federation.model(), federation.data()
    evaluation = fedsim.evaluate(model, model.init(jax.random.key(0)), data, execution=fedsim.Debug())
    means = np.asarray(evaluation.clients["loss"].result())[data.sizes > 0]
    np.testing.assert_allclose(evaluation.over_clients("loss", lower_is_better=True)["worst 10%"], means.max(), rtol=1e-6)
    np.testing.assert_allclose(evaluation.over_clients("loss")["worst 10%"], means.max(), rtol=1e-6)
    np.testing.assert_allclose(evaluation.over_clients("loss", lower_is_better=False)["worst 10%"], means.min(), rtol=1e-6)


def outputs_as_values(values, sizes, **metrics):
    """Evaluates metrics of a model whose output is the feature."""
    model = fedsim.Model(
        init=lambda key: jnp.zeros(()), apply_for_train=lambda params, e, key: e["x"], apply_for_eval=lambda params, e: e["x"],
        loss=lambda e, out: out, metrics=metrics, features={"x": jax.ShapeDtypeStruct((), jnp.float32)},
    )  # fmt: skip
    data = fedsim.FederatedData.from_arrays({"x": np.asarray(values, np.float32)}, sizes=sizes)
    return lambda **options: fedsim.evaluate(model, jnp.zeros(()), data, **options)


@pytest.mark.first(2)
@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("batch_size", [20, 256, 100_000])
def test_the_error_of_a_mean_does_not_grow_with_the_number_of_examples(batch_size, memory):
    """Added one after another in float32, 300,000 times 0.1 are 30,220, and 1 no longer changes 2**24."""
    sizes = [300_000, 0, 3, *[20] * 100, 0, 17]
    draw = np.random.default_rng(0)
    values = np.concatenate([np.full(sizes[0], 0.1), draw.normal(size=sum(sizes[1:]))]).astype(np.float32)
    metrics = {
        "value": lambda e, out: out,
        "vector": lambda e, out: fedsim.metrics.Mean(jnp.stack([out, 2 * out], 1), jnp.ones((len(out), 2))),
        "sign": lambda e, out: fedsim.metrics.Mean(
            fedsim.metrics.Sparse.of((out > 0).astype(jnp.int32), (2,), out),
            fedsim.metrics.Sparse.of((out > 0).astype(jnp.int32), (2,), jnp.ones(len(out))),
        ),
    }
    execution = fedsim.Pmap(devices=2, memory=memory)
    evaluation = outputs_as_values(values, sizes, **metrics)(batch_size=batch_size, execution=execution)
    owner, wide = np.repeat(np.arange(len(sizes)), sizes), values.astype(np.float64)
    sums = np.bincount(owner, wide, len(sizes))
    np.testing.assert_allclose(evaluation.overall["value"], wide.mean(), rtol=3e-7)
    np.testing.assert_allclose(evaluation.clients["value"].total, sums, rtol=3e-7, atol=3e-6)
    np.testing.assert_allclose(evaluation.clients["vector"].total, np.stack([sums, 2 * sums], 1), rtol=3e-7, atol=6e-6)
    positive = np.bincount(owner, np.where(values > 0, wide, 0), len(sizes))
    np.testing.assert_allclose(evaluation.clients["sign"].total, np.stack([sums - positive, positive], 1), rtol=3e-6, atol=3e-6)


def test_a_float_weight_counts_beyond_2_to_the_24():
    total = 2.0**24
    metrics = {"weighted": lambda e, out: fedsim.metrics.Mean(out, out)}
    evaluation = outputs_as_values([total, *np.ones(1000)], [1001], **metrics)(batch_size=1)
    assert evaluation.clients["weighted"].weight.tolist() == [total + 1000]


def test_an_infinite_loss_stays_infinite():
    evaluation = outputs_as_values([1.0, 2.0, 3.0], [3], value=lambda e, out: jnp.where(out == 2, jnp.inf, out))
    assert evaluation(batch_size=1, execution=fedsim.Jit()).overall["value"] == np.inf


def test_a_metric_says_which_values_are_better_and_without_it_no_clients_are_the_worst():
    metrics = {
        "up": lambda e, out: fedsim.metrics.per_example(out, better="higher"),
        "down": lambda e, out: fedsim.metrics.per_example(out, better="lower"),
        "loss": lambda e, out: out,
        "also_the_loss": lambda e, out: fedsim.metrics.per_example(out),
        "perplexity": lambda e, out: 2 * out,
    }
    evaluation = outputs_as_values(np.arange(20), [1] * 20, **metrics)()
    worst = {name: evaluation.over_clients(name)["worst 10%"] for name in metrics}
    assert worst.pop("perplexity") != worst["loss"] and np.isnan(evaluation.over_clients("perplexity")["worst 10%"])
    assert worst == {"up": 0.5, "down": 18.5, "loss": 18.5, "also_the_loss": 18.5}
    assert evaluation.over_clients("perplexity")["mean"] == 19
    assert evaluation.over_clients("up", lower_is_better=True)["worst 10%"] == 18.5


def test_the_metrics_of_a_model_do_not_change_and_copies_are_without_programs():
    given = {"zero": lambda e, o: jnp.zeros(len(o))}
    model, data = dataclasses.replace(federation.model(), metrics=given), federation.data()
    params = model.init(jax.random.key(0))
    assert fedsim.evaluate(model, params, data).overall == {"zero": 0}
    given["one"] = lambda e, o: jnp.ones(len(o))
    with pytest.raises(TypeError, match="does not support item assignment"):
        model.metrics["zero"] = given["one"]
    assert fedsim.evaluate(model, params, data).overall == {"zero": 0}
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert "_execution" in vars(model) and "_execution" not in vars(copied)
        assert copied.metrics == model.metrics and type(copied.metrics) is type(model.metrics)
    more = dataclasses.replace(model, metrics={**model.metrics, "one": given["one"]})
    assert fedsim.evaluate(more, params, data).overall == {"zero": 0, "one": 1}


@pytest.mark.parametrize(("lower", "worst"), [(False, 0.0), (True, 0.9)])
def test_values_that_are_not_finite_are_the_worst(lower, worst):
    """A sort puts NaN last, which is the best place for an accuracy."""
    values = np.linspace(0.0, 0.9, 10)

    def of(x):
        evaluation = Evaluation({}, {"m": fedsim.metrics.Mean(x, np.ones(len(x)))})
        return evaluation.over_clients("m", lower_is_better=lower)

    assert of(values)["worst 10%"] == worst
    assert np.isnan(of(np.append(values, np.nan))["worst 10%"])
    assert np.isnan(of(np.append(values, [np.nan] * 10))["worst 10%"])
