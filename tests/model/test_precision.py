"""Models in half precision: what is computed in it, and what stays in float32."""

import federation
import haiku as hk
import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import fedsim
from fedsim import Model, models

FEATURES = federation.FEATURES


def batch_for(model, n=2):
    draw, examples = np.random.default_rng(0), model.dummy_examples(n)
    for name, column in examples.items():
        values = draw.integers(1, 4, column.shape) if column.dtype.kind in "iu" else draw.normal(size=column.shape)
        examples[name] = jnp.asarray(values.astype(column.dtype))
    return fedsim.Batch(examples, jnp.ones(n, bool), jax.random.key(0), 0)


def products(jaxpr):
    """Yields the dtypes of the factors of all matrix products of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield {str(variable.aval.dtype) for variable in equation.invars}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def test_a_linear_layer_equals_numpy_in_bfloat16():
    model = federation.model()
    params, batch = model.init(jax.random.key(0)), batch_for(model, 6)
    half = [np.asarray(a, np.float32).astype(ml_dtypes.bfloat16) for a in (batch.examples["x"], *params["linear"].values())]
    x, b, w = half[0], *(half[1:] if list(params["linear"]) == ["b", "w"] else half[:0:-1])
    expected = (x.astype(np.float32) @ w.astype(np.float32)).astype(ml_dtypes.bfloat16) + b
    found = model.with_precision("bfloat16").apply_for_eval(params, batch.examples)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=2**-7, atol=2**-9)
    np.testing.assert_array_equal(found, np.asarray(found).astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "model",
    [
        models.digits_dense(),
        models.resnet8(),
        pytest.param(models.mobilenet_v2(width=0.25), marks=pytest.mark.slow),
        models.vit_tiny(size=8),
        models.shakespeare_transformer(30, length=6, embedding=8, heads=2, feedforward=20, layers=1, remat=True),
        models.shakespeare_lstm(30, length=6, hidden=8),
    ],
    ids=["dense", "resnet", "mobilenet", "vit", "transformer", "lstm"],
)
def test_all_matrix_products_are_in_half_precision_and_gradients_in_single(model):
    half = model.with_precision("bfloat16")
    params, batch = jax.eval_shape(half.init, jax.random.key(0)), batch_for(model)
    traced = jax.make_jaxpr(jax.value_and_grad(half.train_loss))(params, batch)
    found = [*products(traced.jaxpr)]
    assert len(found) > 3 and all(dtypes == {"bfloat16"} for dtypes in found)
    assert {str(aval.dtype) for aval in traced.out_avals} == {"float32"}
    assert not any("bfloat16" in dtypes for dtypes in products(jax.make_jaxpr(model.train_loss)(params, batch).jaxpr))


def test_normalization_is_in_float32():
    """In bfloat16, the mean of 1,000 ones and one 256 would be 1 or 2 instead of 1.26."""
    model = Model.from_haiku(
        hk.transform(lambda x: hk.Linear(1, w_init=jnp.ones)(hk.LayerNorm(-1, True, True)(x))[:, 0]),
        features={"x": jax.ShapeDtypeStruct((1000,), jnp.float32)}, inputs="x", loss=fedsim.metrics.squared_error,
    )  # fmt: skip
    x = jnp.ones([1, 1000]).at[0, 0].set(256.0)
    params = {"layer_norm": {"scale": jnp.zeros(1000).at[0].set(1.0), "offset": jnp.zeros(1000)}}
    params["linear"] = {"w": jnp.ones([1000, 1]), "b": jnp.zeros(1)}
    expected = (256 - 1.255) / np.sqrt(np.var(np.asarray(x)) + 1e-5)
    assert model.with_precision("bfloat16").apply_for_eval(params, {"x": x}).item() == pytest.approx(expected, rel=2**-7)


def linear_model(loss):
    features = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    return Model.from_functions(lambda key: jnp.ones(2), lambda w, x: x @ w, features=features, loss=loss)


@pytest.mark.parametrize(("scale", "right"), [(1.0, False), (None, True), (2.0**14, True), (2.0**60, False)])
def test_the_scale_of_the_loss_saves_small_gradients_in_float16(scale, right):
    """The gradient 1e-8 of each output is 0 in float16, and with too large a scale it is infinite."""
    model = linear_model(lambda examples, outputs: 1e-8 * outputs)
    half = model.with_precision("float16", loss_scale=scale)
    batch = batch_for(model, 1)
    gradient, expected = (jax.grad(each.train_loss)(jnp.ones(2), batch) for each in (half, model))
    assert np.allclose(gradient, expected, rtol=3e-2, atol=0) == right
    assert half.train_loss(jnp.ones(2), batch) == pytest.approx(float(model.train_loss(jnp.ones(2), batch)), rel=2e-3)


def test_integers_among_the_outputs_have_no_gradient():
    def apply(w, x):
        logits = x @ w
        return {"logits": logits, "top": jnp.argmax(logits, axis=1)}

    model = Model.from_functions(
        lambda key: jnp.ones([3, 4]), apply, features=FEATURES,
        loss=lambda examples, outputs: fedsim.metrics.cross_entropy(examples, outputs["logits"]),
    )  # fmt: skip
    batch, half = batch_for(model, 6), model.with_precision("float16")
    gradient, expected = (jax.grad(each.train_loss)(jnp.ones([3, 4]), batch) for each in (half, model))
    np.testing.assert_allclose(gradient, expected, rtol=2**-8, atol=2**-10)
    assert half.apply_for_eval(jnp.ones([3, 4]), batch.examples)["top"].dtype == jnp.int32


def test_a_round_in_half_precision_is_close_to_one_in_single():
    updates = []
    for model in (federation.model(), federation.model().with_precision("bfloat16")):
        algorithm = fedsim.algorithms.FedAvg(
            model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Jit()
        )
        start = algorithm.init(jax.random.key(0))
        state, _ = algorithm.apply(start, federation.cohort())
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        updates.append(fedsim.tree.flat(fedsim.tree.subtract(state.params, start.params)))
    error = np.linalg.norm(updates[1] - updates[0]) / np.linalg.norm(updates[0])
    assert 0 < error < 2**-5


def test_what_computes_in_another_precision_is_refused():
    keeps = Model.from_functions(
        lambda key: jnp.ones([3, 4]), lambda w, x: x.astype(jnp.float32) @ w.astype(jnp.float32), features=FEATURES
    )
    with pytest.raises(ValueError, match="Expected a network whose outputs are bfloat16 .*, got float32: remove what converts"):
        keeps.with_precision("bfloat16").apply_for_eval(jnp.ones([3, 4]), {"x": jnp.ones([2, 3])})
    with pytest.raises(ValueError, match="Expected compute to be 'bfloat16' or 'float16', got compute='float32'"):
        keeps.with_precision("float32")
    with pytest.raises(ValueError, match="Expected loss_scale > 0"):
        keeps.with_precision("float16", loss_scale=0)
    with pytest.raises(ValueError, match="Expected a model without parts, got a SplitModel"):
        models.digits_split().with_precision("bfloat16")


def test_tags_are_predicted_from_ids_of_words_in_half_precision():
    """The rows of the weights are divided by the number of words."""
    model = models.stackoverflow_logistic(20, 7, length=8)
    params, examples = model.init(jax.random.key(0)), {"x": jnp.array([[1, 2, 0, 0, 0, 0, 0, 0], [21, 3, 3, 3, 0, 0, 0, 0]])}
    halved = model.with_precision("bfloat16").apply_for_eval(params, examples)
    np.testing.assert_allclose(halved, model.apply_for_eval(params, examples), atol=0.02)
