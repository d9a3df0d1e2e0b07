"""Models of images and of generated data: published parameter counts, and forward passes compared with NumPy."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from fedsim import models
from fedsim.models import _cifar


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def drawn(model):
    """Returns parameters of the scale of initial ones, without zeros, so that a missing offset or bias is noticed."""
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        fan_in = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 100
        values = generator.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(fan_in))
        return values + 1 if path[-1].key == "scale" else values

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def photographs(n, size=32, channels=3):
    generator = np.random.default_rng(1)
    return {"x": generator.integers(0, 256, [n, size, size, channels], np.uint8), "y": np.arange(n, dtype=np.int32)}


def linear(params, name, x):
    return x @ params[name]["w"] + params[name].get("b", np.float32(0))


def convolve(params, name, x, stride=1):
    w = params[name]["w"]
    pads = [(0, 0)]
    for length, kernel in zip(x.shape[1:3], w.shape[:2], strict=True):
        total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
        pads.append((total // 2, total - total // 2))
    windows = sliding_window_view(np.pad(x, [*pads, (0, 0)]), w.shape[:2], axis=(1, 2))[:, ::stride, ::stride]
    return np.tensordot(windows, w, [(3, 4, 5), (2, 0, 1)]) + params[name].get("b", np.float32(0))


def pool(x, size=2):
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::2, ::2].max((-2, -1))


def relu(x):
    return np.maximum(x, 0)


def middle(x):
    x = x[:, 4:28, 4:28].astype(np.float64)
    return ((x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True)).astype(np.float32)


def assert_evaluates_to(model, params, examples, expected):
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


def test_parameter_counts_are_the_published_ones():
    assert count(models.mnist_2nn()) == 199_210  # McMahan et al., section 3
    assert count(models.mnist_cnn()) == 1_663_370  # the same
    assert count(models.emnist_autoencoder()) == 2_837_314  # "2.8M"
    # A ResNet-18 for 1,000 classes has 11,689,512.
    assert count(models.cifar100_resnet18(1000)) == 11_689_512
    assert count(models.cifar100_resnet18()) == 11_689_512 - 900 * 513
    assert count(models.cifar100_resnet18(downsample=True, groups=32)) == count(models.cifar100_resnet18())
    assert count(models.cifar100_logistic()) == 24 * 24 * 3 * 100 + 100
    assert 1e6 < count(models.cifar10_cnn()) < 1.1e6  # "about 10^6"
    assert count(models.synthetic_logistic()) == 610
    assert count(models.toy_regression(5)) == 5


def test_autoencoder_equals_numpy():
    model, examples = models.emnist_autoencoder(), photographs(3, 28, 1)
    params = drawn(model)
    pixels = examples["x"].reshape(3, 784).astype(np.float32) / 255
    x = pixels
    for layer in range(8):
        x = linear(params, f"linear_{layer}" if layer else "linear", x)
        x = x if layer == 3 else 1 / (1 + np.exp(-x))
    assert_evaluates_to(model, params, examples, x)
    np.testing.assert_allclose(model.loss(examples, x), ((x - pixels) ** 2).mean(1), rtol=1e-5)
    assert set(model.features) == {"x"}


def test_autoencoder_starts_with_glorots_normal_weights():
    params = models.emnist_autoencoder().init(jax.random.key(0))
    assert abs(float(params["linear"]["w"].std()) / np.sqrt(2 / (784 + 1000)) - 1) < 0.01


def test_mnist_cnn_equals_numpy():
    model, examples = models.mnist_cnn(), photographs(3, 28, 1)
    params = drawn(model)
    x = examples["x"].astype(np.float32) / 255
    x = pool(relu(convolve(params, "conv2_d_1", pool(relu(convolve(params, "conv2_d", x))))))
    assert_evaluates_to(model, params, examples, linear(params, "linear_1", relu(linear(params, "linear", x.reshape(3, -1)))))


def test_cifar10_cnn_equals_numpy():
    model, examples = models.cifar10_cnn(), photographs(3)
    params = drawn(model)
    x = middle(examples["x"])
    x = pool(relu(convolve(params, "conv2_d_1", pool(relu(convolve(params, "conv2_d", x))))))
    x = relu(linear(params, "linear_1", relu(linear(params, "linear", x.reshape(3, -1)))))
    assert_evaluates_to(model, params, examples, linear(params, "linear_2", x))


def test_cifar100_logistic_equals_numpy():
    model, examples = models.cifar100_logistic(), photographs(3)
    params = drawn(model)
    assert_evaluates_to(model, params, examples, linear(params, "linear", middle(examples["x"]).reshape(3, -1)))


@pytest.mark.slow
@pytest.mark.parametrize("downsample", [False, True])
def test_resnet18_equals_numpy(downsample):
    model, examples = models.cifar100_resnet18(downsample=downsample), photographs(2)
    params = drawn(model)
    convolutions = (f"conv2_d_{i}" if i else "conv2_d" for i in range(99))
    norms = (f"group_norm_{i}" if i else "group_norm" for i in range(99))

    def normalize(x):
        name = next(norms)
        groups = x.reshape(*x.shape[:3], 2, -1)
        groups = groups - groups.mean((1, 2, 4), keepdims=True)
        groups = groups / np.sqrt((groups**2).mean((1, 2, 4), keepdims=True) + 1e-3)
        return groups.reshape(x.shape) * params[name]["scale"] + params[name]["offset"]

    x = relu(normalize(convolve(params, next(convolutions), middle(examples["x"]), 2)))
    x = pool(np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)], constant_values=-np.inf), 3)
    for stage in range(4):
        for number in range(2):
            stride = 2 if downsample and stage and not number else 1
            y = x if stage == number == 0 else relu(normalize(x))
            y = convolve(params, next(convolutions), y, stride)
            y = convolve(params, next(convolutions), relu(normalize(y)))
            if stage and not number:
                x = normalize(convolve(params, next(convolutions), x, stride))
            x = x + y
    assert x.shape[1:] == ((1, 1, 512) if downsample else (6, 6, 512))
    expected = linear(params, "linear", relu(normalize(x)).mean((1, 2)))
    assert next(convolutions) == "conv2_d_20"
    assert_evaluates_to(model, params, examples, expected)


def test_crops_are_random_in_training_and_central_in_evaluation():
    model, examples = models.cifar100_logistic(), photographs(4)
    params = drawn(model)
    train = jax.jit(model.apply_for_train)
    one, again, other = (train(params, examples, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    shifted = {"x": examples["x"].copy()}
    shifted["x"][:, 0] = 0  # A row outside the central window.
    np.testing.assert_array_equal(*(jax.jit(model.apply_for_eval)(params, e) for e in ({"x": examples["x"]}, shifted)))


def test_brightness_and_scale_of_a_photograph_do_not_matter():
    model, x = models.cifar100_logistic(), photographs(2)["x"] // 4
    params = drawn(model)
    outputs = [model.apply_for_eval(params, {"x": each}) for each in (x, 2 * x + 30, x.astype(np.float32) / 255)]
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=1e-4)


def test_group_norm_equals_haiku_with_its_gradients():
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(3, 2, [2, 3, 5, 6]), jnp.float32)

    def both(layer):
        net = hk.without_apply_rng(hk.transform(lambda x: layer(x)))
        params = jax.tree.map(lambda leaf: leaf + jnp.arange(6) / 6, net.init(jax.random.key(0), x))
        loss = lambda params, x: jnp.sum(jnp.sin(net.apply(params, x)))  # noqa: E731
        gradients = jax.grad(loss, (0, 1))(params, x)
        return net.apply(params, x), jax.tree.leaves(gradients)

    ours, haikus = both(lambda x: models.GroupNorm(3)(x)), both(lambda x: hk.GroupNorm(3)(x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, haikus)


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="groups=4"):
        hk.transform(lambda x: models.GroupNorm(4)(x)).init(jax.random.key(0), jnp.ones([1, 2, 2, 6]))
    with pytest.raises(ValueError, match="groups=3"):
        models.cifar100_resnet18(groups=3)


def test_overlapping_pool_equals_reduce_window():
    x = jnp.asarray(np.random.default_rng(0).normal(size=[2, 6, 8, 3]), jnp.float32)
    expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    np.testing.assert_array_equal(_cifar._overlapping_max_pool(x), expected)


@pytest.mark.parametrize("make", [models.mnist_cnn, models.cifar10_cnn, models.cifar100_logistic, models.cifar100_resnet18])
def test_error_for_zero_classes(make):
    with pytest.raises(ValueError, match="Expected num_classes >= 1, got num_classes=0"):
        make(0)


def test_toy_regression_is_linear_with_its_squared_error():
    model = models.toy_regression(3)
    w = np.array([[1.0], [-2.0], [0.5]], np.float32)
    x, y = np.random.default_rng(0).normal(size=[4, 3]).astype("f4"), np.ones(4, "f4")
    outputs = model.apply_for_eval({"linear": {"w": w}}, {"x": x})
    np.testing.assert_allclose(outputs, (x @ w)[:, 0], rtol=1e-5)
    np.testing.assert_allclose(model.loss({"y": y}, outputs), ((x @ w)[:, 0] - 1) ** 2, rtol=1e-5)
    assert set(model.metrics) == {"loss"}
    with pytest.raises(ValueError, match="dimension"):
        models.toy_regression(0)
