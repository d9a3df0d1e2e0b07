"""`fedsim.models.Linear` against `hk.Linear`: the same parameters must give the same outputs and derivatives."""

import functools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.models import Linear, _linear

TRANSPOSED = [(20, 784, 62), (5, 16, 62), (32, 8, 128), (8, 16, 25)]
PLAIN = [(33, 16, 62), (20, 60, 10), (20, 16, 129), (9, 16, 22)]  # too many rows, no blocks, wide, small


def network(layer, *args, **kwargs):
    return hk.without_apply_rng(hk.transform(lambda x: layer(*args, **kwargs)(x)))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parameters(seed, width, outputs):
    return {"linear": {"b": normal(seed, outputs), "w": normal(seed + 100, width, outputs) / np.sqrt(width)}}


def close(ours, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, expected)


def loss(net, params, x):
    return jnp.mean(jnp.tanh(net.apply(params, x)) ** 2)


def of_both(function, *args):
    """``function`` of the two networks, each in a program of its own: in one, XLA computes once what is equal."""
    return [jax.jit(functools.partial(function, network(layer, 62)))(*args) for layer in (Linear, hk.Linear)]


@pytest.mark.parametrize(("rows", "width", "outputs"), TRANSPOSED + PLAIN)
def test_outputs_and_gradients_equal_haiku(rows, width, outputs):
    x, params = normal(0, rows, width), parameters(1, width, outputs)
    ours, haikus = network(Linear, outputs), network(hk.Linear, outputs)
    np.testing.assert_array_equal(*(jax.jit(net.apply)(params, x) for net in (ours, haikus)))
    close(*(jax.jit(jax.grad(functools.partial(loss, net), argnums=(0, 1)))(params, x) for net in (ours, haikus)))


@pytest.mark.parametrize(("rows", "width", "outputs"), TRANSPOSED + PLAIN)
def test_the_input_is_transposed_where_that_pays_and_nowhere_else(rows, width, outputs):
    net, params = network(Linear, outputs), parameters(1, width, outputs)
    text = jax.jit(jax.grad(lambda params, x: loss(net, params, x))).lower(params, normal(0, rows, width)).as_text()
    assert (f"-> tensor<{width // 8}x8x{rows}xf32>" in text) == ((rows, width, outputs) in TRANSPOSED)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU compiler")
@pytest.mark.parametrize("clients", [None, 2])
def test_compiled_the_weights_gradient_is_a_product_in_the_plain_order(clients):
    def first_contracted(layer):
        slope = jax.grad(functools.partial(loss, network(layer, 62)))
        args = parameters(1, 784, 62), normal(0, 20, 784)
        if clients is not None:
            slope, args = jax.vmap(slope), jax.tree.map(lambda leaf: np.stack([leaf] * clients), args)
        text = jax.jit(slope).lower(*args).compile().as_text()
        shape = "784,62" if clients is None else f"{clients},784,62"
        (product,) = re.findall(rf"= f32\[{shape}\]\S* dot\(.*lhs_contracting_dims={{(\d)}}", text)
        return int(product) - (clients is not None)

    assert (first_contracted(Linear), first_contracted(hk.Linear)) == (1, 0)  # of [rows, in]: transposed, as it is


def test_gradient_of_a_first_layer_leaves_out_the_input():
    net, params, x = network(Linear, 62), parameters(1, 784, 62), normal(0, 20, 784)

    def count(argnums):
        return str(jax.make_jaxpr(jax.grad(lambda p, x: loss(net, p, x), argnums))(params, x)).count("dot_general[")

    assert (count(0), count((0, 1))) == (2, 3)  # forward and dw; and dx


@pytest.mark.parametrize("kwargs", [{}, {"with_bias": False, "name": "first", "w_init": jnp.ones}, {"b_init": jnp.ones}])
@pytest.mark.parametrize("shape", [(20, 16), (16,), (2, 3, 16)])
def test_initial_parameters_and_outputs_equal_haiku(kwargs, shape):
    ours, haikus = network(Linear, 62, **kwargs), network(hk.Linear, 62, **kwargs)
    params = ours.init(jax.random.key(0), jnp.ones(shape))
    jax.tree.map(np.testing.assert_array_equal, params, haikus.init(jax.random.key(0), jnp.ones(shape)))
    np.testing.assert_array_equal(ours.apply(params, normal(0, *shape)), haikus.apply(params, normal(0, *shape)))


def test_vmap_over_weights_equals_haiku_one_by_one():
    x = normal(0, 3, 20, 16)
    params = [parameters(client, 16, 62) for client in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    ours, haikus = (jax.grad(lambda p, x, net=net: loss(net, p, x)) for net in (network(Linear, 62), network(hk.Linear, 62)))
    together = jax.jit(jax.vmap(ours))(stacked, x)
    of_one_input = jax.jit(jax.vmap(ours, in_axes=(0, None)))(stacked, x[0])
    for client in range(3):
        close(jax.tree.map(lambda leaf, client=client: leaf[client], together), haikus(params[client], x[client]))
        close(jax.tree.map(lambda leaf, client=client: leaf[client], of_one_input), haikus(params[client], x[0]))


def test_forward_and_second_derivatives_equal_haiku():
    x, params, direction = normal(0, 20, 16), parameters(1, 16, 62), (parameters(2, 16, 62), normal(3, 20, 16))

    def derivatives(net, params, x):
        def of(*at):
            return loss(net, *at)

        gradient = jax.grad(of, argnums=(0, 1))
        along = lambda *at: sum(map(jnp.vdot, *map(jax.tree.leaves, (gradient(*at), direction))))  # noqa: E731
        return {
            "forward": jax.jvp(of, (params, x), direction),
            "forward of weights": jax.jvp(lambda p: of(p, x), (params,), direction[:1]),
            "forward of reverse": jax.jvp(gradient, (params, x), direction),
            "reverse of reverse": jax.grad(along, argnums=(0, 1))(params, x),
            "reverse of forward": jax.grad(lambda p: jax.jvp(of, (p, x), direction)[1])(params),
        }

    close(*of_both(derivatives, params, x))


def test_a_nan_of_an_input_reaches_its_own_weights_only():
    x, params = normal(0, 20, 16), parameters(1, 16, 62)
    x[0, 0] = np.nan  # the element that is asked whether the transposition is there
    pull = jax.jit(lambda x: jax.grad(lambda p: jnp.sum(network(Linear, 62).apply(p, x) * normal(4, 20, 62)))(params))
    weights = pull(x)["linear"]["w"]
    assert np.isnan(weights[0]).all()
    assert np.isfinite(weights[1:]).all()


def test_half_precision():
    x, params = normal(0, 20, 16), parameters(1, 16, 62)
    half, x_half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (params, x))
    slope = jax.jit(jax.grad(lambda p, x: loss(network(Linear, 62), p, x)))(half, x_half)["linear"]["w"]
    assert slope.dtype == jnp.bfloat16
    expected = jax.grad(lambda p: loss(network(hk.Linear, 62), p, x))(params)["linear"]["w"]
    np.testing.assert_allclose(slope.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max())


def test_an_input_without_axes_is_refused():
    with pytest.raises(ValueError, match="scalar"):
        network(Linear, 62).init(jax.random.key(0), jnp.float32(1))


@pytest.mark.parametrize("rows", [20, 40])
@pytest.mark.parametrize("given", [False, True])
def test_all_products_are_of_the_precision_that_was_asked_for(given, rows):
    """Also where a derivative is asked for outside of the default's context."""

    def text(layer):
        def forward(x):
            return layer(62)(x, precision="highest" if given else None)

        def lossy(params, x):
            with jax.default_matmul_precision("default" if given else "highest"):
                return jnp.sum(hk.without_apply_rng(hk.transform(forward)).apply(params, x) ** 2)

        args = parameters(1, 16, 62), normal(0, rows, 16)
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(lossy), argnums=(0, 1)))(*args))

    for jaxpr in (text(Linear), text(hk.Linear)):
        assert jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == jaxpr.count("dot_general[") >= 3


def test_a_batch_of_any_size_is_exported():
    net, params = network(Linear, 62), parameters(1, 16, 62)
    (rows,) = jax.export.symbolic_shape("rows")
    whole = jax.export.export(jax.jit(net.apply))(params, jax.ShapeDtypeStruct((rows, 16), jnp.float32))
    for size in (1, 20, 40):
        x = normal(0, size, 16)
        close(whole.call(params, x), x @ params["linear"]["w"] + params["linear"]["b"])


@pytest.mark.parametrize("of_input", [("d", None), (None, "d"), (None, None)])
def test_of_explicitly_sharded_inputs_the_gradient_is_the_same(of_input):
    x, params = normal(0, 20, 16), parameters(1, 16, 62)
    (expected,) = of_both(jax.grad(loss, argnums=1), params, x)[1:]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        slope = jax.jit(jax.grad(functools.partial(loss, network(Linear, 62))))(params, jax.device_put(x, jax.P(*of_input)))
    close(slope, expected)


@pytest.mark.parametrize("rows", [1, 20])
def test_interceptors_meet_one_call(rows):
    def doubled(call, args, kwargs, context):
        return 2 * call(*args, **kwargs) if context.method_name == "__call__" else call(*args, **kwargs)

    def forward(x):
        with hk.intercept_methods(doubled):
            return Linear(62)(x)

    x, params = normal(0, rows, 16), parameters(1, 16, 62)
    outputs = hk.without_apply_rng(hk.transform(forward)).apply(params, x)
    np.testing.assert_array_equal(outputs, 2 * network(hk.Linear, 62).apply(params, x))


def test_other_platforms_get_a_transposition_to_fold():
    x = jax.ShapeDtypeStruct((20, 16), jnp.float32)
    lowered = {
        name: jax.jit(_linear._transposed).trace(x).lower(lowering_platforms=(name,)).as_text()
        for name in ("cpu", "tpu", "cuda")
    }
    assert {name: "select" in text for name, text in lowered.items()} == {"cpu": True, "tpu": False, "cuda": False}
