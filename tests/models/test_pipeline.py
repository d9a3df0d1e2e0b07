"""Stages that work on microbatches at the same time, against a plain loop over the stages."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.models import pipelined

WIDTH = 16


def stage(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def one_after_another(params, x, stages):
    for number in range(stages):
        x = stage(jax.tree.map(lambda leaf, number=number: leaf[number], params), x)
    return x


def drawn(stages):
    draw = np.random.default_rng(0)
    shapes = {"up": (stages, WIDTH, 2 * WIDTH), "down": (stages, 2 * WIDTH, WIDTH)}
    return {name: jnp.asarray(draw.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.first(2)
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 2), (4, 8), (3, 1)])
def test_outputs_and_gradients_are_those_of_a_loop(stages, microbatches, remat):
    params, x = drawn(stages), jax.random.normal(jax.random.key(0), (8, WIDTH))

    def loss(apply):
        return lambda params: jnp.mean(apply(params) ** 2)

    def plain(params):
        return one_after_another(params, x, stages)

    def in_pipeline(params):
        return pipelined(stage, params, x, microbatches=microbatches, remat=remat)

    np.testing.assert_allclose(in_pipeline(params), plain(params), rtol=1e-5, atol=1e-5)
    gradients = jax.grad(loss(in_pipeline))(params), jax.grad(loss(plain))(params)
    for name in params:
        np.testing.assert_allclose(gradients[0][name], gradients[1][name], rtol=1e-5, atol=1e-5)


def test_a_stage_need_not_be_defined_at_zeros():
    """Attention with a mask of False has a softmax of infinities, whose derivative is NaN."""
    rows, length = 4, 3
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    x = jax.random.normal(jax.random.key(0), (rows, length, WIDTH))

    def attention(w, inputs):
        x, mask = inputs
        scores = jnp.where(mask, jnp.einsum("nid,de,nje->nij", x, w, x), -jnp.inf)
        return x + jax.nn.softmax(scores) @ x, mask

    def in_pipeline(w):
        return pipelined(attention, w, (x, mask), microbatches=2)[0]

    def plain(w):
        return attention(w[2], attention(w[1], attention(w[0], (x, mask))))[0]

    w = 0.1 * jax.random.normal(jax.random.key(1), (3, WIDTH, WIDTH))
    found, expected = (jax.grad(lambda w, apply=apply: jnp.mean(apply(w) ** 2))(w) for apply in (in_pipeline, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def network(params, x, *, microbatches):
    hidden = pipelined(stage, params["layers"], x @ params["first"], microbatches=microbatches)
    return hidden @ params["last"]


def model(microbatches):
    def init(key):
        draw = np.random.default_rng(1)
        ends = {"first": draw.normal(0, 0.3, (5, WIDTH)), "last": draw.normal(0, 0.3, (WIDTH, 3))}
        return {"layers": drawn(4), **{name: jnp.asarray(value, jnp.float32) for name, value in ends.items()}}

    features = {"x": jax.ShapeDtypeStruct((5,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    made = fedsim.Model.from_functions(
        init, lambda params, x: network(params, x, microbatches=microbatches), features=features, num_classes=3
    )
    return made.with_shardings({"layers/*": jax.P("model")})


def rounds(execution):
    draw = np.random.default_rng(2)
    data = fedsim.FederatedData.from_arrays(
        {"x": draw.normal(size=(60, 5)).astype(np.float32), "y": draw.integers(0, 3, 60).astype(np.int32)}, sizes=[10, 20, 30]
    )
    algorithm = fedsim.algorithms.SCAFFOLD(
        model=model(4), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=8), execution=execution
    )
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(data, clients=2, seed=0).rounds(2):
        state, _ = algorithm.apply(state, cohort)
    return state.server.params


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution", [fedsim.Sharded(clients=1, model=4), fedsim.Sharded(clients=2, model=2)], ids=["4", "2 x 2"]
)
def test_rounds_with_a_stage_on_each_device(execution):
    found, expected = rounds(execution), rounds(fedsim.Jit())
    assert found["layers"]["up"].sharding.spec[0] == "model"
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_bubble_in_the_compiled_program(microbatches):
    """A device of p computes (m + p - 1) / m times the p-th part of all products, and sends its outputs to the next one."""
    stages, rows = 4, 16
    mesh = jax.make_mesh((stages,), ("model",), devices=jax.devices()[:stages], axis_types=(jax.sharding.AxisType.Auto,))
    params, x = drawn(stages), jnp.ones((rows, WIDTH))
    divided = jax.device_put(params, jax.NamedSharding(mesh, jax.P("model")))
    whole = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
    compiled = jax.jit(lambda params, x: pipelined(stage, params, x, microbatches=microbatches)).lower(divided, whole).compile()
    text = compiled.as_text()
    # The products of a step are in the loop, whose body the text has once.
    products = re.findall(r"f32\[(\d+(?:,\d+)*)\][^=\n]* (?:dot|custom-call)\(", text)
    sizes = [int(np.prod([int(size) for size in shape.split(",")])) for shape in products]
    assert sorted(sizes) == [rows // microbatches * WIDTH, rows // microbatches * 2 * WIDTH], products
    trips = re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text)
    assert str(microbatches + stages - 1) in trips, trips
    assert "collective-permute" in text and "all-gather" not in text
