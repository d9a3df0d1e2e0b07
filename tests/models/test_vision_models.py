"""Models of images and of generated data: published parameter counts, and forward passes compared with NumPy."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from numpy.lib.stride_tricks import sliding_window_view

import fedsim
from fedsim import models
from fedsim.models import _cifar, _photographs


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def drawn(model):
    """Returns parameters of the scale of initial ones, without zeros, so that a missing offset or bias is noticed."""
    return drawn_like(jax.eval_shape(model.init, jax.random.key(0)))


def drawn_like(params):
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        fan_in = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 100
        values = generator.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(fan_in))
        return values + 1 if path[-1].key == "scale" else values

    return jax.tree_util.tree_map_with_path(draw, params)


def photographs(n, size=32, channels=3):
    generator = np.random.default_rng(1)
    return {"x": generator.integers(0, 256, [n, size, size, channels], np.uint8), "y": np.arange(n, dtype=np.int32)}


def linear(params, name, x):
    return x @ params[name]["w"] + params[name].get("b", np.float32(0))


def convolve(params, name, x, stride=1):
    windows, w = windows_of(x, params[name]["w"].shape, stride), params[name]["w"]
    return np.tensordot(windows, w, [(3, 4, 5), (2, 0, 1)]) + params[name].get("b", np.float32(0))


def windows_of(x, kernel, stride):
    """Returns ``[n, ho, wo, c, kh, kw]``, with SAME padding."""
    pads = [(0, 0)]
    for length, size in zip(x.shape[1:3], kernel[:2], strict=True):
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((total // 2, total - total // 2))
    return sliding_window_view(np.pad(x, [*pads, (0, 0)]), kernel[:2], axis=(1, 2))[:, ::stride, ::stride]


def pool(x, size=2):
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::2, ::2].max((-2, -1))


def relu(x):
    return np.maximum(x, 0)


def standard(x):
    x = x.astype(np.float64)
    return ((x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True)).astype(np.float32)


def middle(x):
    return standard(x[:, 4:28, 4:28])


class Layers:
    """The layers of a network in NumPy, which take the parameters in the order in which Haiku numbers its modules."""

    def __init__(self, params, groups=2, eps=1e-5):
        self.params, self.groups, self.eps, self.numbers = params, groups, eps, {}

    def next(self, kind):
        number = self.numbers[kind] = self.numbers.get(kind, -1) + 1
        return f"{kind}_{number}" if number else kind

    def convolve(self, x, stride=1):
        return convolve(self.params, self.next("conv2_d"), x, stride)

    def depthwise(self, x, stride=1):
        layer = self.params[self.next("depthwise_conv2_d")]
        return np.einsum("nijckl,klc->nijc", windows_of(x, (3, 3), stride), layer["w"][:, :, 0]) + layer.get("b", np.float32(0))

    def linear(self, x):
        return linear(self.params, self.next("linear"), x)

    def normalize(self, x):
        if not any(name.startswith("group_norm") for name in self.params):
            return x
        layer, groups = self.params[self.next("group_norm")], x.reshape(*x.shape[:3], self.groups, -1)
        groups = groups - groups.mean((1, 2, 4), keepdims=True)
        groups = groups / np.sqrt((groups**2).mean((1, 2, 4), keepdims=True) + self.eps)
        return groups.reshape(x.shape) * layer["scale"] + layer["offset"]

    def layer_norm(self, x):
        layer, x = self.params[self.next("layer_norm")], x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * layer["scale"] + layer["offset"]


def assert_evaluates_to(model, params, examples, expected):
    np.testing.assert_allclose(jax.jit(model.apply_for_eval)(params, examples), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
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
    for make, blocks in ((models.resnet8, 1), (models.resnet20, 3)):  # of 6n + 2 layers, He et al., section 4.2
        assert count(make()) == residual_count((16, 32, 64), blocks) + 64 * 10 + 10
    assert count(models.resnet20()) == 269_722  # "0.27M", table 6
    assert count(models.resnet18()) == residual_count((64, 128, 256, 512), 2, shortcuts=True) + 512 * 10 + 10 == 11_173_962
    # The same layers with a first convolution of 7 by 7 are the ResNet-18 for 1,000 classes, which has 11,689,512.
    assert count(models.resnet18(1000)) == 11_689_512 - 3 * (49 - 9) * 64
    assert count(models.mobilenet_v2(1000)) == 3_504_872  # "3.4M", Sandler et al., table 4, where it is rounded down
    assert count(models.mobilenet_v2(1000, width=0.5)) == 1_968_680
    block = 4 * (192 * 192 + 192) + 192 * 768 + 768 + 768 * 192 + 192 + 4 * 192
    assert count(models.vit_tiny()) == 12 * block + (48 + 1) * 192 + 192 + 65 * 192 + 2 * 192 + 192 * 10 + 10
    assert count(models.vit_tiny(1000, size=224, patch=16)) == 5_717_416  # "5M", Touvron et al., table 1
    assert count(models.toy_regression(5)) == 5


def residual_count(widths, blocks, *, shortcuts=False):
    """Returns the number of parameters of convolutions, and of a scale and an offset for each of their channels."""
    layers = [(9, 3, widths[0])]
    for before, width in zip((widths[0], *widths), widths, strict=False):
        for number in range(blocks):
            layers += [(9, width if number else before, width), (9, width, width)]
        layers += [(1, before, width)] if shortcuts and before != width else []
    return sum(pixels * before * width + 2 * width for pixels, before, width in layers)


def test_autoencoder_equals_numpy():
    model, examples = models.emnist_autoencoder(), photographs(3, 28, 1)
    params = drawn(model)
    pixels = examples["x"].reshape(3, 784).astype(np.float32) / 255
    x = pixels
    for layer in range(8):
        x = linear(params, f"linear_{layer}" if layer else "linear", x)
        x = x if layer == 3 else 1 / (1 + np.exp(-x))
    assert_evaluates_to(model, params, examples, x)
    np.testing.assert_allclose(model.loss(examples, x), 20 * ((x - pixels) ** 2).mean(1), rtol=1e-5)
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
    net = Layers(params, eps=1e-3)
    x = relu(net.normalize(net.convolve(middle(examples["x"]), 2)))
    x = pool(np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)], constant_values=-np.inf), 3)
    for stage in range(4):
        for number in range(2):
            stride = 2 if downsample and stage and not number else 1
            y = x if stage == number == 0 else relu(net.normalize(x))
            y = net.convolve(y, stride)
            y = net.convolve(relu(net.normalize(y)))
            if stage and not number:
                x = net.normalize(net.convolve(x, stride))
            x = x + y
    assert x.shape[1:] == ((1, 1, 512) if downsample else (6, 6, 512))
    assert_evaluates_to(model, params, examples, net.linear(relu(net.normalize(x)).mean((1, 2))))
    assert net.next("conv2_d") == "conv2_d_20"


def resnet(net, x, widths, blocks, padded):
    """He et al. (2016): ReLU after each sum, and half of the size at the first block of each later stage."""
    x = relu(net.normalize(net.convolve(x)))
    for stage in range(len(widths)):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            y = relu(net.normalize(net.convolve(x, stride)))
            y = net.normalize(net.convolve(y))
            if stride == 2 and padded:
                x = np.pad(x[:, ::2, ::2], [(0, 0)] * 3 + [(0, x.shape[-1])])
            elif stride == 2:
                x = net.normalize(net.convolve(x, 2))
            x = relu(x + y)
    return net.linear(x.mean((1, 2)))


@pytest.mark.parametrize(
    ("make", "blocks", "options"),
    [
        (models.resnet8, 1, {}),
        (models.resnet8, 1, {"norm": "none"}),
        pytest.param(models.resnet20, 3, {"groups": 4}, marks=pytest.mark.slow),
        pytest.param(models.resnet18, 2, {"num_classes": 100}, marks=pytest.mark.slow),
    ],
)
def test_resnets_for_small_images_equal_numpy(make, blocks, options):
    model, examples = make(**options), photographs(2)
    params, widths = drawn(model), (64, 128, 256, 512) if make is models.resnet18 else (16, 32, 64)
    net = Layers(params, groups=options.get("groups", 2))
    expected = resnet(net, standard(examples["x"]), widths, blocks, padded=make is not models.resnet18)
    assert_evaluates_to(model, params, examples, expected)


def test_without_normalization_blocks_start_as_the_identity():
    """The sum of a block is its input, so the features are those of the first convolution, with zeros for further channels."""
    model, examples = models.resnet8(norm="none"), photographs(2)
    params = model.init(jax.random.key(0))
    x = relu(convolve(jax.device_get(params), "conv2_d", standard(examples["x"])))[:, ::4, ::4].mean((1, 2))
    assert_evaluates_to(model, params, examples, x @ params["linear"]["w"][:16])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "none"])
def test_mobilenet_equals_numpy(norm):
    model, examples = models.mobilenet_v2(width=0.5, norm=norm), photographs(2)
    params = drawn(model)
    net = Layers(params)

    def relu6(x):
        return np.clip(x, 0, 6)

    x = relu6(net.normalize(net.convolve(standard(examples["x"]))))
    assert x.shape == (2, 32, 32, 16)
    for expansion, channels, blocks, stride in [
        (1, 8, 1, 1), (6, 16, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1)
    ]:  # fmt: skip
        for number in range(blocks):
            y = relu6(net.normalize(net.convolve(x))) if expansion > 1 else x
            assert y.shape[-1] == expansion * x.shape[-1]
            y = relu6(net.normalize(net.depthwise(y, 1 if number else stride)))
            y = net.normalize(net.convolve(y))
            assert y.shape[-1] == channels
            x = x + y if (number or stride == 1) and x.shape[-1] == channels else y
    assert x.shape == (2, 4, 4, 160)
    assert_evaluates_to(model, params, examples, net.linear(relu6(net.normalize(net.convolve(x))).mean((1, 2))))


@pytest.mark.slow
def test_vision_transformer_equals_numpy():
    model, examples = models.vit_tiny(size=8), photographs(2, size=8)
    params = drawn(model)
    net, own = Layers(params), params["~"]
    x = standard(examples["x"])
    patches = [x[:, i : i + 4, j : j + 4].reshape(2, 48) for i in (0, 4) for j in (0, 4)]
    x = net.linear(np.stack(patches, 1))
    x = np.concatenate([np.repeat(own["token"], 2, 0), x], 1) + own["positions"]
    for _ in range(12):
        y = net.layer_norm(x)
        query, key, value = (net.linear(y).reshape(2, 5, 3, 64).swapaxes(1, 2) for _ in range(3))
        scores = np.exp(query @ key.swapaxes(2, 3) / 8)
        attended = (scores / scores.sum(-1, keepdims=True)) @ value
        x = x + net.linear(attended.swapaxes(1, 2).reshape(2, 5, 192))
        y = net.linear(net.layer_norm(x))
        x = x + net.linear(y * (1 + scipy.special.erf(y / np.sqrt(2))) / 2)
    assert_evaluates_to(model, params, examples, net.linear(net.layer_norm(x)[:, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2, (1, 3)])
def test_depthwise_convolution_equals_haiku_with_its_gradients(stride):
    x = jnp.asarray(np.random.default_rng(0).normal(size=[2, 7, 6, 5]), jnp.float32)

    def both(layer):
        net = hk.without_apply_rng(hk.transform(lambda x: layer(x)))
        params = drawn_like(net.init(jax.random.key(0), x))
        gradients = jax.grad(lambda params, x: jnp.sum(jnp.sin(net.apply(params, x))), (0, 1))(params, x)
        return net.apply(params, x), gradients

    with jax.numpy_rank_promotion("allow"):  # required by Haiku
        expected = both(lambda x: hk.DepthwiseConv2D(1, 3, stride)(x))
    found = both(lambda x: models.DepthwiseConv2D(3, stride)(x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def one_batch(examples):
    examples = {name: jnp.asarray(each) for name, each in examples.items()}
    return fedsim.Batch(examples, jnp.ones(len(examples["y"]), bool), jax.random.key(0), 0)


@pytest.mark.slow
def test_remat_changes_no_gradient():
    batch, plain, again = one_batch(photographs(2)), models.resnet8(), models.resnet8(remat=True)
    params = plain.init(jax.random.key(1))
    gradients = [jax.jit(jax.grad(model.train_loss))(params, batch) for model in (plain, again)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *gradients)


@pytest.mark.first(1)
@pytest.mark.parametrize(("make", "blocks"), [(models.resnet8, 3), (models.mobilenet_v2, 17), (models.vit_tiny, 12)])
def test_every_block_is_computed_again_with_remat(make, blocks):
    batch, programs = one_batch(photographs(1)), []
    for model in (make(), make(remat=True)):
        params = jax.eval_shape(model.init, jax.random.key(0))
        programs.append(jax.make_jaxpr(model.train_loss)(params, batch).jaxpr)
    counts = [sum(each.primitive.name in ("remat2", "checkpoint") for each in program.eqns) for program in programs]
    assert counts == [0, blocks]


@pytest.mark.slow
def test_a_resnet_learns_colours():
    model, examples = models.resnet8(), photographs(12)
    colours = np.array([[200, 50, 50], [50, 200, 50], [50, 50, 200]], np.uint8)
    examples = {"x": (examples["x"] // 8 + colours[examples["y"] % 3][:, None, None]).astype(np.uint8), "y": examples["y"] % 3}
    optimizer, losses = optax.sgd(0.03, momentum=0.9), []
    params = model.init(jax.random.key(0))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        loss, gradient = jax.value_and_grad(model.train_loss)(params, one_batch(examples)._replace(key=key))
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    for number in range(15):
        params, state, loss = step(params, state, jax.random.key(number))
        losses.append(float(loss))
    assert np.mean(losses[-3:]) < 0.3 * losses[0]


def test_margin_is_of_the_mean_and_in_training_only():
    """A network that returns its window: in training it is a shifted, mirrored part of the image with a margin of zeros."""
    model = _photographs.classifier(lambda x, training: x.reshape(x.shape[0], -1), 3072, margin=4)
    examples, eye = photographs(20), {"linear": {"w": np.eye(3072, dtype=np.float32), "b": np.zeros(3072, np.float32)}}
    images = standard(examples["x"])
    assert_evaluates_to(model, eye, examples, images.reshape(20, -1))
    windows = np.asarray(model.apply_for_train(eye, examples, jax.random.key(0))).reshape(20, 32, 32, 3)
    found = []
    for image, window in zip(images, windows, strict=True):
        padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
        crops = sliding_window_view(padded, (32, 32, 3))[:, :, 0]
        for flipped in (window, window[:, ::-1]):
            found += (
                [np.abs(crops - flipped).max((2, 3, 4)).argmin()] if np.abs(crops - flipped).max((2, 3, 4)).min() < 1e-4 else []
            )
    assert len(found) == 20 and len(set(found)) > 5


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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="groups to divide 16, got groups=3"):
        models.resnet20(groups=3)
    with pytest.raises(ValueError, match="patch to divide size=32, got patch=5"):
        models.vit_tiny(patch=5)


@pytest.mark.parametrize("make", [models.resnet8, models.resnet18, models.resnet20, models.mobilenet_v2])
def test_another_normalization_is_refused(make):
    with pytest.raises(ValueError, match="Expected norm to be 'batch', 'group' or 'none', got norm='layer'"):
        make(norm="layer")


def test_overlapping_pool_equals_reduce_window():
    x = jnp.asarray(np.random.default_rng(0).normal(size=[2, 6, 8, 3]), jnp.float32)
    expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    np.testing.assert_array_equal(_cifar._overlapping_max_pool(x), expected)


CLASSIFIERS = [
    models.mnist_cnn,
    models.cifar10_cnn,
    models.cifar100_logistic,
    models.cifar100_resnet18,
    models.resnet8,
    models.resnet18,
    models.resnet20,
    models.mobilenet_v2,
    models.vit_tiny,
]


@pytest.mark.parametrize("make", CLASSIFIERS)
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
