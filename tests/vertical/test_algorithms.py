"""Vertical algorithms against the gradient of the joint model, loops in NumPy, and closed forms of message sizes."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import vertical
from fedsim.compressors import Identity, TopK, UniformQuantizer


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
        yield


BLOCKS = {"bank": [0, 1, 2], "shop": [3, 4], "clinic": [5, 6, 7, 8]}


def people(n=24, labels_at="bank", classes=3, **options):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(n, 9)), draw.integers(classes, size=n)
    return vertical.align(vertical.divide_columns(x, y, BLOCKS, labels_at=labels_at, **options), secret="s")


def linear(data, classes=3):
    """Softmax regression: a linear bottom of every party, and their sum."""
    return vertical.VerticalModel.of(data, bottoms=vertical.dense(classes), top=vertical.sum_embeddings(), num_classes=classes)


def network(data, classes=3):
    return vertical.VerticalModel.of(
        data, bottoms=vertical.dense(4, hidden=(5,)), top=vertical.concatenate(classes, hidden=(6,)), num_classes=classes
    )


def batch_of(data, size=8, round=0, seed=0):
    return vertical.BatchSampler(data, size=size, seed=seed).batch(round)


@functools.partial(jax.jit, static_argnums=0)
def joint_gradient(model, params, batch):
    """The gradient of the joint model, by `jax.grad` of all parameters at once."""
    examples = {**batch.features, "y": batch.labels}
    return jax.grad(lambda params: jnp.mean(model.joint.losses(examples, model.joint.apply_for_eval(params, examples))))(params)


def close(ours, theirs, **options):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **({"rtol": 1e-5, "atol": 1e-6} | options)), ours, theirs)


@pytest.mark.parametrize(
    ("cls", "labels_at"),
    [  # the registry has labels only
        (vertical.SplitLearning, "bank"),
        pytest.param(vertical.SplitLearning, "registry", marks=pytest.mark.slow),
        pytest.param(vertical.FedBCD, "bank", marks=pytest.mark.slow),
        pytest.param(vertical.CVFL, "registry", marks=pytest.mark.slow),
        pytest.param(vertical.CVFL, "shop", marks=pytest.mark.slow),
    ],
)
def test_one_step_per_exchange_is_a_step_along_the_gradient_of_the_joint_model(cls, labels_at):
    data = people(labels_at=labels_at)
    model, rate = network(data), 0.3
    options = {} if cls is vertical.SplitLearning else {"local_steps": 1}
    algorithm = cls(model=model, optimizer=optax.sgd(rate), compressor=Identity(), **options)
    state = algorithm.init(jax.random.key(0))
    for round in range(2):
        batch = batch_of(data, round=round)
        expected = jax.tree.map(lambda p, g: p - rate * g, state.params, joint_gradient(model, state.params, batch))
        state, info = algorithm.apply(state, batch)
        close(state.params, expected)
    assert np.isfinite(info["loss"]) and int(state.round) == 2


def softmax_gradient(logits, labels):
    p = np.exp(logits - logits.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True) - np.eye(3)[labels]) / len(labels)


def numpy_weights(params):
    """Returns the weights of a linear model by party, each with its bias as the last row."""
    layers = {party: own["bottom"]["mlp/~/linear_0"] for party, own in params.items()}
    return {party: np.concatenate([layer["w"], layer["b"][None]]).astype(np.float64) for party, layer in layers.items()}


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_fedbcd_is_the_loop_of_its_paper(steps):
    """Passive parties keep the gradient of the loss by the sum; the party with the labels keeps the others' embeddings."""
    data, rate = people(), 0.5
    algorithm = vertical.FedBCD(model=linear(data), optimizer=optax.sgd(rate), local_steps=steps)
    state = algorithm.init(jax.random.key(0))
    weights = numpy_weights(state.params)
    for round in range(3):
        batch = batch_of(data, round=round)
        x = {party: np.concatenate([values, np.ones([8, 1])], axis=1) for party, values in batch.features.items()}
        sent = {party: x[party] @ weights[party] for party in x}
        stale = softmax_gradient(sum(sent.values()), batch.labels)
        for _ in range(steps):
            own = sent["shop"] + sent["clinic"] + x["bank"] @ weights["bank"]
            slopes = {"bank": softmax_gradient(own, batch.labels), "shop": stale, "clinic": stale}
            weights = {party: weights[party] - rate * x[party].T @ slopes[party] for party in x}
        state, _ = algorithm.apply(state, batch)
        close(numpy_weights(state.params), weights, rtol=1e-4, atol=1e-5)


def largest(x, count):
    """Keeps the ``count`` entries of a matrix with the largest magnitude, as `TopK` does with a tensor."""
    kept = np.zeros(x.size)
    at = np.argsort(-np.abs(x.ravel()), kind="stable")[:count]
    kept[at] = x.ravel()[at]
    return kept.reshape(x.shape)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_cvfl_is_the_loop_of_its_paper(steps):
    """Every party keeps the compressed embeddings of the others, and uses its own current one, which is not compressed."""
    data, rate = people(), 0.5
    algorithm = vertical.CVFL(model=linear(data), optimizer=optax.sgd(rate), local_steps=steps, compressor=TopK(fraction=0.25))
    state = algorithm.init(jax.random.key(0))
    weights = numpy_weights(state.params)
    for round in range(3):
        batch = batch_of(data, round=round)
        x = {party: np.concatenate([values, np.ones([8, 1])], axis=1) for party, values in batch.features.items()}
        sent = {party: largest(x[party] @ weights[party], 6) for party in x}  # a quarter of 8 times 3
        for _ in range(steps):
            slopes = {}
            for party in x:
                others = sum(sent[other] for other in x if other != party)
                slopes[party] = x[party].T @ softmax_gradient(others + x[party] @ weights[party], batch.labels)
            weights = {party: weights[party] - rate * slopes[party] for party in x}
        state, _ = algorithm.apply(state, batch)
        close(numpy_weights(state.params), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_messages_have_the_sizes_of_closed_forms():
    data, n, width = people(), 8, 4
    model = network(data)
    up = {}
    for name, algorithm in {
        "split": vertical.SplitLearning(model=model, optimizer=optax.sgd(0.1)),
        "fedbcd": vertical.FedBCD(model=model, optimizer=optax.sgd(0.1), local_steps=5),
        "4 bits": vertical.SplitLearning(model=model, optimizer=optax.sgd(0.1), compressor=UniformQuantizer(levels=16)),
        "cvfl": vertical.CVFL(model=model, optimizer=optax.sgd(0.1), compressor=Identity()),
    }.items():
        _, info = algorithm.apply(algorithm.init(jax.random.key(0)), batch_of(data, size=n))
        assert info["bits_up"].keys() == info["bits_down"].keys() == {"shop", "clinic"}
        up[name] = int(info["bits_up"]["shop"]), int(info["bits_down"]["shop"])
    whole, top = 32 * n * width, 32 * (3 * width * 6 + 6 + 6 * 3 + 3)
    assert up["split"] == (whole, whole)
    # One exchange per five steps: as many bits per exchange are a fifth of the messages per step.
    assert up["fedbcd"] == up["split"]
    assert up["4 bits"] == (4 * n * width + 64, 4 * n * width + 64)  # two floats are the range of the levels
    assert up["cvfl"] == (whole, 2 * whole + top)  # the embeddings of the two others, and the top model


def test_bits_of_large_messages_do_not_wrap():
    """Two embeddings of 2**31 bits each are more than ``uint32`` has."""
    data, key, n = people(), jax.random.key(0), 2**16
    model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2**10), top=vertical.concatenate(3), num_classes=3)
    algorithm = vertical.CVFL(model=model, optimizer=optax.sgd(0.1), compressor=Identity())
    features = {party: jax.ShapeDtypeStruct((n, width), np.float32) for party, width in model.widths.items()}
    batch = vertical.VerticalBatch(features, jax.ShapeDtypeStruct((n,), np.int32), key)
    _, info = jax.eval_shape(algorithm.apply, jax.eval_shape(algorithm.init, key), batch)
    assert {x.dtype for x in info["bits_up"].values()} == {np.dtype("uint32")}
    assert {x.dtype for x in info["bits_down"].values()} == {np.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [vertical.FedBCD, vertical.SplitLearning, vertical.CVFL])
def test_a_missing_party_sends_nothing_and_does_not_step_and_the_others_do_as_if_its_embedding_were_zero(cls):
    data = people()
    model = network(data)
    algorithm = cls(model=model, optimizer=optax.adam(0.1), missing=0.5, compressor=Identity())
    state, seen = algorithm.init(jax.random.key(0)), set()
    for round in range(12):
        batch = batch_of(data, round=round)
        after, info = algorithm.apply(state, batch)
        present = {party: bool(here) for party, here in info["present"].items()}
        seen.add(tuple(present.values()))
        for party, here in present.items():
            assert (int(info["bits_up"][party]) > 0) == here == (int(info["bits_down"][party]) > 0)
            moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.params[party], after.params[party])
            assert any(jax.tree.leaves(moved)) == here
            assert int(after.opt_state[party][0].count) - int(state.opt_state[party][0].count) == here * algorithm.local_steps
        there = {party: x for party, x in batch.features.items() if present.get(party, True)}
        outputs = model.outputs(state.params, there)
        losses = fedsim.metrics.cross_entropy({"y": jnp.asarray(batch.labels)}, outputs)
        assert float(info["loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)
        state = after
    assert len(seen) == 4  # each of the two is there or not, independently of the other


@pytest.mark.slow
def test_a_round_is_reproducible_and_depends_on_seed_and_round_only():
    data = people()
    algorithm = vertical.CVFL(model=network(data), optimizer=optax.sgd(0.1), missing=0.3)
    first, again = (algorithm.init(jax.random.key(3)) for _ in range(2))
    batches = vertical.BatchSampler(data, size=8, seed=1)
    for round in range(3):
        first, _ = algorithm.apply(first, batches.batch(round))
    for batch in vertical.BatchSampler(data, size=8, seed=1).rounds(3):
        again, _ = algorithm.apply(again, batch)
    close(first, again, rtol=0, atol=0)
    with jax.disable_jit():
        plain = algorithm.init(jax.random.key(3))
        for batch in batches.rounds(3):
            plain, _ = algorithm.apply(plain, batch)
    close(first, plain)
    assert not np.array_equal(batches.batch(0).labels, vertical.BatchSampler(data, size=8, seed=2).batch(0).labels)


def test_an_epoch_has_every_person_once():
    data = people()
    rows = {tuple(row) for row in data.features["shop"].tolist()}
    for epoch in range(2):
        batches = [batch_of(data, size=6, round=4 * epoch + number).features["shop"] for number in range(4)]
        assert sorted(map(tuple, np.concatenate(batches).tolist())) == sorted(rows)


def test_each_party_may_have_its_own_optimizer():
    data = people()
    optimizers = {"bank": optax.adam(0.1), "shop": optax.sgd(0.0), "clinic": optax.sgd(0.1)}
    algorithm = vertical.SplitLearning(model=network(data), optimizer=optimizers)
    state = algorithm.init(jax.random.key(0))
    after, _ = algorithm.apply(state, batch_of(data))
    close(after.params["shop"], state.params["shop"], rtol=0, atol=0)
    assert not np.array_equal(*(each.params["clinic"]["bottom"]["mlp/~/linear_0"]["w"] for each in (state, after)))


@pytest.mark.slow
def test_bottom_and_top_models_may_be_any_transform_and_the_labels_any_numbers():
    """A convolution on halves of images, and regression."""
    draw = np.random.default_rng(0)
    images, y = draw.normal(size=(10, 8, 8)), draw.normal(size=10)
    left = np.arange(64).reshape(8, 8)[:, :4].ravel()
    parties = vertical.divide_columns(
        images.reshape(10, 64), y, {"left": left, "right": np.setdiff1d(np.arange(64), left)}, labels_at="right"
    )
    data = vertical.align(parties, secret="s")
    convolution = hk.transform(lambda x: hk.Conv2D(2, 3)(x.reshape(-1, 8, 4, 1)))
    top = hk.transform(lambda embeddings: hk.Linear(1)(sum(each.mean((1, 2)) for each in embeddings.values()))[:, 0])
    model = vertical.VerticalModel.of(data, bottoms=convolution, top=top, loss=fedsim.metrics.squared_error)
    algorithm = vertical.SplitLearning(model=model, optimizer=optax.sgd(0.1))
    state = algorithm.init(jax.random.key(0))
    before = fedsim.evaluate(model.joint, state.params, data.pooled()).overall["loss"]
    for batch in vertical.BatchSampler(data, size=10).rounds(30):
        state, _ = algorithm.apply(state, batch)
    assert fedsim.evaluate(model.joint, state.params, data.pooled()).overall["loss"] < before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": optax.sgd}, "Expected optimizer to be an optax transformation"),
        ({"optimizer": {"bank": optax.sgd(0.1)}}, r"optimizer\['clinic'\]"),
        ({"optimizer": dict.fromkeys([*BLOCKS, "Bank"], optax.sgd(0.1))}, "got those of Bank, too: leave them out"),
        ({"local_steps": 0}, "Expected local_steps >= 1, got local_steps=0"),
        ({"missing": 1.0}, "Expected 0 <= missing < 1, got missing=1.0"),
        ({"compressor": "topk"}, "Expected compressor to be an instance of Compressor"),
        ({"model": None}, "Expected model to be an instance of VerticalModel"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    given = {"model": linear(people()), "optimizer": optax.sgd(0.1)} | options
    with pytest.raises(ValueError, match=message):
        vertical.FedBCD(**given)


def test_a_batch_of_other_parties_is_refused():
    data = people()
    algorithm = vertical.SplitLearning(model=linear(data), optimizer=optax.sgd(0.1))
    batch = batch_of(data.only("shop", "bank"))
    with pytest.raises(ValueError, match="Expected a batch with the features of bank, clinic, shop, got those of bank, shop"):
        algorithm.apply(algorithm.init(jax.random.key(0)), batch)


@pytest.mark.slow
def test_a_run_that_continues_at_its_round_equals_one_without_a_break():
    data = people()
    algorithm = vertical.FedBCD(model=network(data), optimizer=optax.adam(0.1), missing=0.3)
    sampler = vertical.BatchSampler(data, size=8, seed=1)
    whole = start = algorithm.init(jax.random.key(0))
    for batch in sampler.rounds(4):
        whole, _ = algorithm.apply(whole, batch)
    for count in (2, 4):
        for batch in sampler.rounds(count, start=int(start.round)):
            start, _ = algorithm.apply(start, batch)
    close(start, whole, rtol=0, atol=0)


def one_output(embeddings):
    return sum(embeddings.values())[:, 0]


@pytest.mark.parametrize("wrong", [7, -1])
def test_labels_of_no_class_are_refused_wherever_they_come_from(wrong):
    model = linear(people(classes=2), classes=2)
    algorithm = vertical.SplitLearning(model=model, optimizer=optax.sgd(0.1))
    state = algorithm.init(jax.random.key(0))
    other = people(classes=2)
    other = dataclasses.replace(other, labels=np.where(np.arange(len(other)) == 3, wrong, other.labels))
    with pytest.raises(ValueError, match=rf"Expected labels at party 'bank' in \[0, 2\), got {wrong} at position \d+"):
        algorithm.apply(state, batch_of(other, size=len(other)))
    for joint in (model.joint, dataclasses.replace(model, num_classes=None).joint):
        with pytest.raises(ValueError, match=f"has label y={wrong}, and the model has classes 0 to 1"):
            fedsim.evaluate(joint, state.params, other.pooled())


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([-1, 1, -1, 1], {"num_classes": 2}, r"Expected labels at party 'bank' in \[0, 2\), got -1 for id '[02]'"),
        ([-1, 1, -1, 1], {}, r"Expected labels at party 'bank' in \[0, 2\), got -1 for id '[02]': number them from 0"),
        ([1, 2, 1, 2], {"num_classes": 5}, r"in \[0, 2\), got 2 for id '[13]': number them from 0, and give as many outputs"),
        ([0.0, 1.0, 0.5, 0.0], {}, "Expected labels at party 'bank' to be whole numbers, got float32: convert labels"),
        ([0, 1, 1, 0], {"top": None}, "Expected top to be the result of hk.transform, got a NoneType"),
        ([0, 1, 1, 0], {"bottoms": hk.Linear}, "Expected bottoms to be the result of hk.transform, got a"),
        (
            [0, 1, 1, 0],
            {"bottoms": {"bank": vertical.dense(1), "shop": vertical.dense(2)}},
            r"Expected embeddings of equal shapes to sum, got \[1, 1\] of 'bank', \[1, 2\] of 'shop'",
        ),
    ],
)
def test_a_model_that_does_not_fit_its_data_is_refused(labels, options, message):
    parties = vertical.divide_columns(np.eye(4), labels, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank")
    data = vertical.align(parties, secret="s")
    with pytest.raises(ValueError, match=message):
        vertical.VerticalModel.of(data, **({"bottoms": vertical.dense(2), "top": vertical.sum_embeddings()} | options))


@pytest.mark.parametrize("targets", [[0, 3, 1, 2], [0.5, 3.0, 1.0, 2.0]], ids=["whole", "floats"])
def test_regression_has_targets_of_any_number_and_any_loss(targets):
    def absolute_error(examples, outputs):
        return jnp.abs(outputs - examples["y"].astype(jnp.float32)).astype(jnp.float16)

    parties = vertical.divide_columns(np.eye(4), targets, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank")
    data = vertical.align(parties, secret="s")
    for loss, power in ((fedsim.metrics.squared_error, 2), (absolute_error, 1)):
        model = vertical.VerticalModel.of(data, bottoms=vertical.dense(1), top=hk.transform(one_output), loss=loss)
        params = model.init(jax.random.key(0))
        with jax.numpy_dtype_promotion("strict"):
            found = fedsim.evaluate(model.joint, params, data.pooled()).overall["loss"]
        weights = numpy_weights(params)
        ones = np.ones([4, 1])
        outputs = sum(np.concatenate([data.features[party], ones], axis=1) @ weights[party][:, 0] for party in weights)
        assert found == pytest.approx(np.mean(np.abs(outputs - data.labels) ** power), rel=1e-2)
        embeddings = {party: model.embed(party, params[party], features) for party, features in data.features.items()}
        assert model.losses(params["bank"], embeddings, data.labels).dtype == jnp.float32
