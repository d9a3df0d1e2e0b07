"""`fedsim.models.Conv2D` compared with `hk.Conv2D`: the same parameters give the same outputs and derivatives."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.models import Conv2D, _convolution, conv2d


@pytest.fixture(autouse=True)
def winograd_on_small_images(monkeypatch):
    monkeypatch.setattr(_convolution, "_WINOGRAD_MIN_TILES", 1)


# (kernel, stride, padding, channels in, channels out, height, width); 16 channels and more take Winograd's way.
CASES = [
    (1, (2, 1), "VALID", 3, 4, 5, 6),
    (3, 1, "VALID", 1, 8, 8, 7),
    (3, 1, "SAME", 3, 5, 8, 7),
    (3, 2, "SAME", 3, 5, 8, 7),
    (3, (2, 1), "VALID", 3, 5, 8, 7),
    (5, 1, "SAME", 3, 4, 9, 6),
    ((3, 5), 1, "VALID", 3, 4, 8, 9),
    ((3, 5), 2, "SAME", 3, 4, 8, 9),
    (2, 1, "SAME", 3, 4, 5, 6),
    (3, 1, "VALID", 16, 24, 8, 7),
    (3, 1, "SAME", 24, 16, 5, 4),
    (3, 2, "SAME", 16, 16, 7, 6),
]


def parameters(seed, kernel, channels, out):
    kernel = [kernel] * 2 if isinstance(kernel, int) else kernel
    w = normal(seed, *kernel, channels, out) / np.float32(np.sqrt(np.prod(kernel) * channels))
    return {"conv2_d": {"w": w, "b": normal(seed + 1, out)}}


def network(layer, *args, **kwargs):
    return hk.without_apply_rng(hk.transform(lambda x: layer(*args, **kwargs)(x)))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def outputs_and_gradients(net, params, x):
    """Returns outputs, and the gradients with respect to parameters and input of a loss whose gradients are of order one."""

    def loss(params, x):
        outputs = net.apply(params, x)
        weights = normal(9, *outputs.shape) / np.sqrt(outputs.size)
        return jnp.sum(outputs * weights + outputs**2 / (2 * outputs.size)), outputs

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)


@pytest.mark.first(9)
@pytest.mark.parametrize(("kernel", "stride", "padding", "channels", "out", "height", "width"), CASES)
def test_outputs_and_gradients_equal_haiku(kernel, stride, padding, channels, out, height, width):
    x = normal(0, 2, height, width, channels)
    kwargs = {"stride": stride, "padding": padding}
    ours, haikus = network(Conv2D, out, kernel, **kwargs), network(hk.Conv2D, out, kernel, **kwargs)
    params = parameters(1, kernel, channels, out)
    close(*jax.jit(lambda params, x: [outputs_and_gradients(net, params, x) for net in (ours, haikus)])(params, x))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("channels", "out", "height", "width"), [(16, 24, 8, 7), (24, 16, 5, 4)])
def test_the_form_for_gpus_equals_that_for_cpus_and_xlas(padding, channels, out, height, width, monkeypatch):
    """`conv2d` asks `jax.default_backend`: patches are one product, and Winograd's form is 16."""
    x, w = normal(0, 2, height, width, channels), normal(1, 3, 3, channels, out) / np.sqrt(9 * channels)

    def outputs_and_slopes(convolution):
        def loss(x, w):
            outputs = convolution(x, w)
            return jnp.sum(jnp.sin(outputs)) / np.sqrt(outputs.size), outputs

        return jax.jit(lambda: jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w))()

    def ours(x, w):
        return conv2d(x, w, padding=padding)

    def xlas(x, w):
        outputs = jax.lax.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), padding)
        return outputs.transpose(0, 2, 3, 1)

    expected = outputs_and_slopes(xlas)
    for backend, products in (("cpu", 16), ("gpu", 1)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        slope = jax.make_jaxpr(lambda x: jax.jvp(lambda x: ours(x, w), (x,), (x,)))(x)
        assert str(slope).count("dot_general[") == 2 * products  # of the outputs, and of their derivative
        close(outputs_and_slopes(ours), expected)


@pytest.mark.parametrize(("channels", "stride", "products"), [(3, 1, 0), (16, 1, 0), (32, 1, 16), (32, 2, 0)])
def test_outputs_without_a_derivative_on_a_cpu(channels, stride, products):
    """XLA's convolution, which is fast there, or Winograd's way; in gradients there is no convolution of XLA."""
    x, w = normal(0, 2, 8, 7, channels), normal(1, 3, 3, channels, 32) / np.float32(np.sqrt(9 * channels))
    net, haikus = (network(layer, 32, 3, stride, with_bias=False) for layer in (Conv2D, hk.Conv2D))
    apply = lambda x: net.apply({"conv2_d": {"w": w}}, x)  # noqa: E731
    text = jax.jit(apply).lower(x).as_text()
    assert (text.count("dot_general"), "convolution" in text) == (products, products == 0)
    close(jax.jit(apply)(x), haikus.apply({"conv2_d": {"w": w}}, x))
    kernels = jnp.stack([w, -2 * w])
    of_each = jax.jit(jax.vmap(lambda w: net.apply({"conv2_d": {"w": w}}, x)))
    assert "convolution" not in of_each.lower(kernels).as_text()  # a grouped one is slow
    close(of_each(kernels), jnp.stack([apply(x), -2 * apply(x)]))
    of_both = jax.jit(jax.vmap(lambda w: jax.vmap(lambda x: net.apply({"conv2_d": {"w": w}}, x))(jnp.stack([x, 3 * x]))))
    assert "convolution" not in of_both.lower(kernels).as_text()
    close(of_both(kernels)[1, 1], -6 * apply(x))
    of_images = jax.jit(jax.vmap(apply)).lower(jnp.stack([x, x])).as_text()
    assert ("convolution" in of_images, "batch_group_count = 1" in of_images) == (products == 0, products == 0)
    assert "convolution" not in jax.jit(jax.grad(lambda x: jnp.sum(apply(x)))).lower(x).as_text()


@pytest.mark.parametrize("kwargs", [{}, {"with_bias": False, "name": "first", "w_init": jnp.ones, "b_init": jnp.ones}])
def test_initial_parameters_equal_haiku(kwargs):
    x = jnp.ones([1, 4, 4, 2])
    ours = network(Conv2D, 3, 3, **kwargs).init(jax.random.key(0), x)
    haikus = network(hk.Conv2D, 3, 3, **kwargs).init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, ours, haikus)


@pytest.mark.parametrize("channels", [3, 16])
def test_sgd_inside_fori_loop_equals_haiku_outside(channels):
    x, target = normal(0, 4, 6, 6, channels), normal(1, 4, 6, 6, 16)
    ours, haikus = network(Conv2D, 16, 3), network(hk.Conv2D, 16, 3)
    start = parameters(0, 3, channels, 16)

    def step(net, params):
        gradient = jax.grad(lambda params: jnp.mean((net.apply(params, x) - target) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)

    looped = jax.jit(lambda params, n: jax.lax.fori_loop(0, n, lambda _, params: step(ours, params), params))
    expected, haiku_step = start, jax.jit(lambda params: step(haikus, params))
    for _ in range(5):
        expected = haiku_step(expected)
    close(looped(start, 5), expected)


@pytest.mark.parametrize("channels", [3, 16])
def test_vmap_over_weights_equals_haiku_one_by_one(channels):
    x = normal(0, 3, 2, 6, 5, channels)
    ours, haikus = network(Conv2D, 16, 3, padding="VALID"), network(hk.Conv2D, 16, 3, padding="VALID")
    params = [parameters(client, 3, channels, 16) for client in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    together = jax.jit(jax.vmap(lambda params, x: outputs_and_gradients(ours, params, x)))(stacked, x)
    alone = jax.jit(lambda params, x: outputs_and_gradients(haikus, params, x))
    for client in range(3):
        one = jax.tree.map(lambda leaf, client=client: leaf[client], together)
        close(one, alone(params[client], x[client]))


@pytest.mark.parametrize("channels", [3, 16])
def test_it_compiles_to_matrix_products_only(channels):
    x, w = normal(0, 3, 2, 6, 6, channels), normal(1, 3, 3, 3, channels, 16)
    gradient = jax.vmap(jax.grad(lambda w, x: jnp.sum(conv2d(x, w) ** 2)))
    text = jax.jit(gradient).lower(w, x).as_text()
    assert "dot_general" in text
    assert "convolution" not in text
    control = jax.vmap(jax.grad(lambda w, x: jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME"))))
    assert "convolution" in jax.jit(control).lower(normal(0, 3, 4, 2, 3, 3), normal(1, 3, 1, 2, 6, 6)).as_text()


def test_gradients_of_what_does_not_change_are_not_computed():
    """The images of a first layer, and a frozen kernel."""
    x, w = normal(0, 2, 6, 6, 1), normal(1, 3, 3, 1, 8)
    count = lambda argnums: str(  # noqa: E731
        jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(conv2d(x, w) ** 2), argnums))(w, x)
    ).count("dot_general[")
    assert (count(0), count(1), count((0, 1))) == (2, 2, 3)  # forward and dw; forward and dx; all


@pytest.mark.parametrize("channels", [2, 16])
def test_second_derivatives_equal_haiku_in_both_modes(channels):
    x = normal(0, 2, 5, 5, channels)
    ours, haikus = network(Conv2D, 16, 3), network(hk.Conv2D, 16, 3)
    params, direction = parameters(1, 3, channels, 16), parameters(2, 3, channels, 16)

    def curvature(net, forward):
        gradient = jax.grad(lambda params: jnp.mean(jnp.tanh(net.apply(params, x)) ** 2))
        if forward:
            return jax.jvp(gradient, (params,), (direction,))[1]
        inner = lambda params: sum(  # noqa: E731
            jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient(params), direction)), strict=True)
        )
        return jax.grad(inner)(params)

    expected, reverse, forward = jax.jit(lambda: (curvature(haikus, False), curvature(ours, False), curvature(ours, True)))()
    close(reverse, expected)
    close(forward, expected)


def test_one_image_and_half_precision():
    x = normal(0, 6, 6, 16)
    net, haikus = network(Conv2D, 16, 3), network(hk.Conv2D, 16, 3)
    params = parameters(1, 3, 16, 16)
    close(*jax.jit(lambda params: [net.apply(params, x), haikus.apply(params, x)])(params))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    outputs = jax.jit(net.apply)(half, x.astype(jnp.bfloat16))
    assert outputs.dtype == jnp.bfloat16
    close(outputs.astype(jnp.float32), haikus.apply(params, x), tolerance=0.05)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rate": 2}, "rate=2"),
        ({"data_format": "NCHW"}, "Expected data_format='NHWC'"),
        ({"mask": np.ones([3, 3, 1, 4])}, "mask"),
        ({"feature_group_count": 2}, "feature_group_count=2"),
        ({"padding": "CIRCULAR"}, "CIRCULAR"),
        ({"padding": ((1, 1), (1, 1))}, "Pad the images first"),
        ({"stride": 0}, "stride"),
        ({"kernel_shape": (3, 3, 3)}, "kernel_shape"),
        ({"kernel_shape": 9, "padding": "VALID"}, "at least the size of the kernel"),
    ],
)
def test_errors_name_what_is_not_supported(kwargs, message):
    net = network(Conv2D, **{"output_channels": 4, "kernel_shape": 3, **kwargs})
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        net.init(jax.random.key(0), jnp.ones([1, 8, 8, 1]))


def test_errors_for_inputs_that_are_not_float_images():
    net = network(Conv2D, 4, 3)
    with pytest.raises(ValueError, match="uint8"):
        net.init(jax.random.key(0), jnp.ones([1, 8, 8, 1], jnp.uint8))
    with pytest.raises(ValueError, match=r"\[8, 8\]"):
        net.init(jax.random.key(0), jnp.ones([8, 8]))
    with pytest.raises(ValueError, match="3 channels"):
        conv2d(jnp.ones([1, 8, 8, 3]), jnp.ones([3, 3, 1, 4]))


@pytest.mark.parametrize(("images", "products"), [(8, 1), (32, 16)])
def test_patches_are_used_for_few_tiles(monkeypatch, images, products):
    monkeypatch.undo()
    x, w = jnp.ones([images, 8, 8, 16]), jnp.ones([3, 3, 16, 16])
    text = str(jax.make_jaxpr(lambda w: jax.jvp(lambda w: conv2d(x, w), (w,), (w,)))(w))
    assert text.count("dot_general[") == 2 * products
