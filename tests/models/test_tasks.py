"""Models of the digits and EMNIST: parameter counts, forward passes compared with NumPy, and features."""

import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import fedsim
from fedsim import models


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def layers(*widths):
    return sum(fan_in * fan_out + fan_out for fan_in, fan_out in itertools.pairwise(widths))


@pytest.fixture(scope="module")
def examples():
    generator = np.random.default_rng(0)
    return {
        "x": generator.integers(0, 256, [5, 28, 28, 1], np.uint8),
        "y": generator.integers(0, 62, [5], np.int32),
    }


def initial(model):
    """Returns parameters of the scale of initial ones, with biases that are not zero, so that a missing bias is noticed."""
    generator = np.random.default_rng(0)

    def draw(leaf):
        fan_in = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 100
        return generator.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(fan_in))

    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))


def test_parameter_counts():
    assert count(models.emnist_cnn()) == 1_206_590
    assert count(models.emnist_cnn(np.int64(10))) == 1_206_590 - 52 * 129  # y.max() + 1 is a NumPy number
    assert count(models.emnist_dense()) == layers(784, 200, 200, 62)
    assert count(models.emnist_dense(10, hidden=(50,))) == layers(784, 50, 10)
    assert count(models.emnist_logistic()) == layers(784, 62)
    assert count(models.digits_dense()) == layers(64, 128, 64, 10)
    assert count(models.digits_logistic()) == layers(64, 10)
    assert count(models.dense([3, 4], 7, hidden=(5, 6))) == layers(12, 5, 6, 7)
    assert count(models.logistic([3, 4], 7)) == layers(12, 7)


def linear(params, name, x):
    return x @ np.asarray(params[name]["w"]) + np.asarray(params[name]["b"])


def test_dense_equals_numpy(examples):
    model = models.emnist_dense()
    params = initial(model)
    x = (examples["x"].astype(np.float32) / 255).reshape(5, 784)
    x = np.maximum(linear(params, "linear", x), 0)
    x = np.maximum(linear(params, "linear_1", x), 0)
    expected = linear(params, "linear_2", x)
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)
    trained = model.apply_for_train(params, examples, jax.random.key(0))
    np.testing.assert_allclose(trained, expected, atol=1e-5, rtol=1e-5)


def test_cnn_equals_numpy(examples):
    model = models.emnist_cnn()
    params = initial(model)

    def convolve(name, x):
        windows = sliding_window_view(x, (3, 3), axis=(1, 2))  # n, h, w, c, 3, 3
        w, b = (np.asarray(params[name][leaf]) for leaf in "wb")
        return np.einsum("nhwcij,ijco->nhwo", windows, w, optimize=True) + b

    x = np.maximum(convolve("conv2_d", examples["x"].astype(np.float32) / 255), 0)
    x = np.maximum(convolve("conv2_d_1", x), 0)
    x = sliding_window_view(x, (2, 2), axis=(1, 2))[:, ::2, ::2].max(axis=(-2, -1)).reshape(5, -1)
    x = np.maximum(linear(params, "linear", x), 0)
    expected = linear(params, "linear_1", x)
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["emnist_logistic", "emnist_dense", "emnist_cnn"])
def test_bytes_and_floats_give_the_same_outputs(name, examples):
    model = models.get(name)
    params = initial(model)
    floats = {**examples, "x": examples["x"].astype(np.float32) / 255}
    np.testing.assert_allclose(
        jax.jit(model.apply_for_eval)(params, examples),
        jax.jit(model.apply_for_eval)(params, floats),
        atol=1e-6,
        rtol=1e-6,
    )


def test_digits_are_scaled_by_sixteen():
    model = models.digits_dense()
    params, x = initial(model), np.random.default_rng(0).integers(0, 17, [3, 8, 8, 1], np.uint8)
    hidden = np.maximum(linear(params, "linear", x.reshape(3, 64).astype(np.float32) / 16), 0)
    hidden = np.maximum(linear(params, "linear_1", hidden), 0)
    np.testing.assert_allclose(model.apply_for_eval(params, {"x": x}), linear(params, "linear_2", hidden), atol=1e-5, rtol=1e-5)


def test_cnn_has_dropout_in_training_only(examples):
    model = models.emnist_cnn()
    params = initial(model)
    train = jax.jit(model.apply_for_train)
    one, again, other = (train(params, examples, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


@pytest.mark.parametrize("name", ["emnist_logistic", "emnist_dense", "emnist_cnn"])
def test_loss_of_uniform_logits_is_the_log_of_the_number_of_classes(name, examples):
    model = models.get(name)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), jax.eval_shape(model.init, jax.random.key(0)))
    losses = model.loss({"y": jnp.asarray(examples["y"])}, jax.jit(model.apply_for_eval)(params, examples))
    np.testing.assert_allclose(losses, np.full(5, np.log(62)), rtol=1e-6)


def test_second_derivatives_of_the_cnn():
    def logits(x):
        x = jax.nn.softplus(models.max_pool(models.Conv2D(4, 3, padding="VALID")(x), 2))
        return hk.Linear(3)(models.dropout(hk.next_rng_key(), 0.25, x).reshape(2, -1))

    net, x = hk.transform(logits), jnp.asarray(np.random.default_rng(0).standard_normal([2, 6, 6, 1]), jnp.float32)
    params = net.init(jax.random.key(0), x)
    gradient = jax.grad(lambda params: jnp.mean(net.apply(params, jax.random.key(1), x) ** 2))
    half_square = lambda params: sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient(params))) / 2  # noqa: E731

    @jax.jit
    def both_modes(params):  # the gradient of |g|^2 / 2 is the Hessian times g
        return jax.grad(half_square)(params), jax.jvp(gradient, (params,), (gradient(params),))[1]

    reverse, forward = both_modes(params)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(forward)) > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), reverse, forward)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.dense([0, 2], 3), "shape"),
        (lambda: models.dense([2], 0), "num_classes"),
        (lambda: models.dense([2], 3, hidden=(-1,)), "hidden"),
        (lambda: models.logistic([2], 3, scale=0), "scale"),
        (lambda: models.emnist_cnn(0), "num_classes"),
    ],
)
def test_sizes_must_be_positive(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_registered_model_is_public_and_every_model_registered():
    assert all(getattr(models, name) is factory for name, factory in models.MODELS.items())
    no_models = {
        "BatchNorm",
        "Conv2D",
        "DepthwiseConv2D",
        "GroupNorm",
        "LSTM",
        "Linear",
        "conv2d",
        "dropout",
        "max_pool",
        "get",
        "MODELS",
        "decoder_of",
        "decoder_params",
        "pipelined",
    }
    no_models |= {"center_crop", "random_crop_and_flip", "standardize"}
    public = {name for name in dir(models) if not name.startswith("_")}
    assert public - no_models == set(models.MODELS)


def test_error_for_an_unknown_model_lists_the_nearest_names():
    with pytest.raises(ValueError, match="emnist_dense"):
        models.get("emnist_dens")
    with pytest.raises(ValueError, match="emnist_cnn, emnist_dense"):
        models.get("zzz")
    assert models.get("dense", shape=(4,), num_classes=2).num_classes == 2


class OtherLibrary:
    """A module with the methods of Flax's."""

    def init(self, key, x):
        return {"params": {"w": jnp.zeros([2, 3])}}

    def apply(self, variables, x):
        return x @ variables["params"]["w"]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (OtherLibrary(), r"got a OtherLibrary: for functions of your own .*, use fedsim.Model.from_functions\(init, apply\)"),
        (lambda examples: examples["x"], r"got a function: give hk.transform\(function\)"),
        (hk.Linear, r"give hk.transform\(function\)"),
    ],
)
def test_a_network_that_haiku_has_not_transformed_is_refused_with_a_remedy(network, message):
    features = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ValueError, match=f"Expected transformed to be the result of hk.transform, .*{message}"):
        fedsim.Model.from_haiku(network, features=features)
    with pytest.raises(ValueError, match="Expected server to be the result of hk.transform, got a"):
        fedsim.SplitModel.from_parts(device=hk.transform(lambda x: x), server=network, features=features)


def test_the_remedy_for_a_network_of_another_library_works():
    module = OtherLibrary()
    features = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    model = fedsim.Model.from_functions(lambda key: module.init(key, None), module.apply, features=features)
    batch = fedsim.Batch({"x": jnp.ones([4, 2]), "y": jnp.zeros(4, jnp.int32)}, jnp.ones(4, bool), jax.random.key(0), 0)
    assert np.isclose(model.train_loss(model.init(jax.random.key(0)), batch), np.log(3))
