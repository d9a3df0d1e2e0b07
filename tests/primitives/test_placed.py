"""Values at clients: dtypes, edge cases, errors, and several devices."""

import os
import subprocess
import sys
import threading

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import primitives as fed

CLIENTS = fed.Placement("clients", 3)
OTHERS = fed.Placement("hospitals", 3)
NOBODY = fed.Placement("clients", 0)


def at(values, placement=CLIENTS):
    return fed.place(jnp.asarray(values), placement)


def test_integers_and_booleans():
    whole = at(jnp.array([1, 2, 4], jnp.int8))
    for reduce, value, dtype in (
        (fed.sum, 7, jnp.int8),
        (fed.mean, 7 / 3, jnp.float32),
        (fed.max, 4, jnp.int8),
        (fed.count, 3, jnp.int32),
        (lambda x: fed.weighted_mean(x, at([1, 0, 1])), 2.5, jnp.float32),
    ):
        assert reduce(whole).dtype == dtype
        assert float(reduce(whole)) == pytest.approx(value)
    truth = at([True, False, True])
    assert (fed.sum(truth).item(), fed.sum(truth).dtype) == (2, jnp.int32)
    assert (fed.mean(truth).dtype, fed.max(truth).item()) == (jnp.float32, True)


def test_half_precision_is_summed_in_single_precision():
    """In bfloat16, 256 + 1 is 256."""
    many = fed.Placement("clients", 257)
    ones = fed.place(jnp.ones(257, jnp.bfloat16).at[0].set(256), many)
    assert fed.sum(ones) == jnp.bfloat16(512)
    assert fed.mean(ones).dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: fed.mean(fed.map(lambda x: (x * x).astype(jnp.float32), x)))(ones)
    assert gradient.stacked.dtype == jnp.bfloat16
    gradient = jax.grad(lambda x, ones: fed.sum(fed.map(lambda own: own * x, ones)))
    assert float(gradient(jnp.bfloat16(1), ones)) == 512
    assert float(fed.stages(gradient, jnp.bfloat16(1), ones).run(jnp.bfloat16(1), ones)) == 512


def test_sums_over_many_clients_one_after_another_are_precise():
    clients = fed.Placement("clients", 300_000)
    x = fed.place(jnp.full(clients.size, 0.1), clients)

    def mean(factor):
        return fed.mean(fed.map(lambda value: factor * value, x, side_by_side=False))

    np.testing.assert_allclose(fed.program(mean)(1.0), 0.1, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(mean)(1.0), 0.1, rtol=1e-6)


def test_a_weighted_mean_has_the_precision_of_its_values():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        mean = fed.weighted_mean(at(np.full(3, 1.0)), at(np.array([1, 1, 1])))
        assert (mean.dtype, mean.item()) == (jnp.float64, 1.0)
        aggregator = fedsim.aggregators.Mean()
        total = aggregator.zero(jnp.zeros(1), 3)
        for slot in range(3):
            total = aggregator.accumulate(total, jnp.ones(1), jnp.float32(1), slot)
        assert aggregator.finish(total).tolist() == [1.0]


def test_no_clients():
    nothing = fed.place(jnp.zeros([0, 2]), NOBODY)
    np.testing.assert_array_equal(fed.sum(nothing), [0, 0])
    np.testing.assert_array_equal(fed.mean(nothing), [0, 0])
    np.testing.assert_array_equal(fed.weighted_mean(nothing, fed.place(jnp.zeros(0), NOBODY)), [0, 0])
    assert fed.broadcast(jnp.ones(2), NOBODY).stacked.shape == (0, 2)
    assert fed.map(lambda x: x @ x, nothing).stacked.shape == (0,)
    assert float(jax.grad(lambda s: jnp.sum(fed.mean(fed.map(lambda x: s * x, nothing))))(1.0)) == 0
    with pytest.raises(ValueError, match="Expected at least one client for max"):
        fed.max(nothing)


def test_weights_of_zero():
    values, zero = at([1.0, jnp.nan, jnp.inf]), at([0.0, 0.0, 0.0])
    assert fed.weighted_mean(values, zero) == 0
    gradient = jax.grad(lambda w: fed.weighted_mean(at([1.0, 2.0, 3.0]), w))(zero)
    np.testing.assert_array_equal(gradient.stacked, 0)
    assert fed.weighted_mean(values, at([2.0, 0.0, 0.0])) == 1
    # d/dw_j of sum(w x) / sum(w) is (x_j - mean) / sum(w).
    gradient = jax.grad(lambda w: fed.weighted_mean(at([1.0, 2.0, 6.0]), w))(at([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(gradient.stacked, (np.array([1, 2, 6]) - 2.75) / 4, rtol=1e-6)
    with pytest.raises(ValueError, match=r"one number at each client, got float32\[2\] at each of 3 clients"):
        fed.weighted_mean(values, at(np.ones([3, 2], np.float32)))


def test_the_derivative_by_a_weight_of_zero():
    """d/dw_j of sum(w x) / sum(w) is (x_j - mean) / sum(w), also where w_j is 0, so that learned weights can grow again."""
    gradient = jax.grad(lambda w: fed.weighted_mean(at([1.0, 2.0, 5.0]), w))(at([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(gradient.stacked, (np.array([1.0, 2.0, 5.0]) - 1.5) / 2)


def test_half_precision_does_not_overflow_on_the_way():
    many = fed.Placement("clients", 100)
    thousands = fed.place(jnp.full(100, 1000, jnp.float16), many)
    assert fed.program(lambda x: fed.mean(fed.map(lambda own: 1 * own, x)))(thousands) == 1000
    assert fed.weighted_mean(thousands, fed.place(jnp.full(100, 70_000), many)) == 1000
    gradient = jax.grad(lambda p: fed.mean(fed.broadcast(p, fed.Placement("clients", 70_000))))(jnp.float16(1))
    assert float(gradient) == pytest.approx(1, abs=2e-3)


def test_an_axis_that_is_not_the_clients():
    pairs = fed.place(jnp.zeros([3, 2]), CLIENTS)
    with pytest.raises(ValueError, match=r"one entry for each of 3 clients for mean, got shape \[2\]"):
        jax.vmap(fed.mean)(pairs)
    with pytest.raises(ValueError, match="no single truth value"):
        bool(pairs)


def test_ties_share_the_derivative_of_a_maximum():
    gradient = jax.grad(lambda x: fed.max(x))(at([2.0, 1.0, 2.0]))
    np.testing.assert_allclose(gradient.stacked, [0.5, 0, 0.5])


def test_trees_keys_and_arithmetic():
    tree = fed.place({"w": jnp.ones([3, 2]), "b": jnp.arange(3.0)}, CLIENTS)
    np.testing.assert_allclose(fed.sum(2 * tree - tree / 2)["b"], 4.5)
    keys = fed.place(jax.random.split(jax.random.key(0), 3), CLIENTS)
    draws = fed.map(lambda key: jax.random.normal(key, (2,)), keys).stacked
    np.testing.assert_allclose(
        draws, jax.vmap(lambda key: jax.random.normal(key, (2,)))(jax.random.split(jax.random.key(0), 3))
    )
    np.testing.assert_allclose(np.exp(at([0.0, 1.0, 2.0])).stacked, np.exp([0.0, 1.0, 2.0]), rtol=1e-6)


@pytest.mark.parametrize("server", [np.zeros(3, np.float32), jnp.zeros(3)])
def test_a_value_of_the_server_needs_a_broadcast(server):
    own = at([1.0, 2.0, 3.0])
    message = r"The server's float32\[3\] cannot be combined with float32\[\] at each of 3 clients: broadcast"
    for combine in (lambda: server + own, lambda: own * server, lambda: np.maximum(own, server)):
        with pytest.raises(ValueError, match=message):
            combine()
    with pytest.raises(
        ValueError, match=r"float32\[\] at each of 3 hospitals cannot be combined with .* 3 clients: first reduce"
    ):
        own + at([1.0, 2.0, 3.0], OTHERS)
    with pytest.raises(ValueError, match=r"Expected values of clients for map, got the server's float32\[3\]"):
        fed.map(jnp.add, own, server)
    with pytest.raises(ValueError, match="Expected values of clients for mean"):
        fed.mean(server)
    with pytest.raises(ValueError, match="Expected a value of the server, got"):
        fed.broadcast(own, CLIENTS)
    with pytest.raises(TypeError):
        jnp.add(server, own)


def test_nested_values_are_described():
    nested = fed.place({"x": fed.place(jnp.ones([3, 2, 5]), CLIENTS).stacked, "y": jnp.ones(3)}, OTHERS)
    assert repr(nested) == "Placed({x: float32[2, 5], y: float32[]} at each of 3 hospitals)"
    clients = fed.Placement("clients", 2)
    nested = fed.map(lambda own: {"x": fed.place(own["x"], clients), "y": own["y"]}, nested)
    assert repr(nested) == "Placed({x: float32[5] at each of 2 clients, y: float32[]} at each of 3 hospitals)"
    with pytest.raises(ValueError, match=r"Expected a value of the server, got .*float32\[5\] at each of 2 clients"):
        fed.broadcast(nested, CLIENTS)


def test_other_bad_input():
    with pytest.raises(ValueError, match=r"one entry per client, got shape \[2\] at stacked\['x'\]"):
        fed.place({"x": np.zeros(2)}, CLIENTS)
    with pytest.raises(ValueError, match="Expected name to be an identifier"):
        fed.Placement("my clients", 3)
    with pytest.raises(ValueError, match="multiple of the number of devices"):
        fed.Placement("clients", 3, devices=(jax.devices()[0],) * 2)
    with pytest.raises(ValueError, match="at least one value for map"):
        fed.map(lambda: 0)


def test_what_a_function_closes_over_reaches_every_client_without_copies():
    large = jnp.ones(1000)

    def program(large):
        return fed.sum(fed.map(lambda x: x * jnp.sum(large), at([1.0, 2.0, 3.0])))

    assert float(program(large)) == 6000
    jaxpr = jax.make_jaxpr(jax.grad(program))(large)
    assert "3,1000" not in str(jaxpr)  # the gradient is summed client by client
    np.testing.assert_allclose(jax.grad(program)(large), 6)


def test_programs_in_threads_do_not_disturb_each_other():
    def program(size, results):
        placement = fed.Placement("clients", size)
        results[size] = float(jax.jit(lambda: fed.sum(fed.broadcast(jnp.float32(1), placement)))())

    results: dict[int, float] = {}
    threads = [threading.Thread(target=program, args=(size, results)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: float(size) for size in range(1, 9)}


EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from fedsim import primitives as fed

def program(placement):
    def loss(rate, params, x):
        def train(params, x):
            step = lambda t, p: p - rate * jax.grad(lambda p: jnp.mean((x @ p) ** 2))(p)
            return fed.bounded_loop(3, step, params, most_steps=4)
        models = fed.map(train, fed.broadcast(params, placement), fed.place(x, placement))
        worst = fed.max(fed.map(lambda p, x: jnp.mean((x @ p) ** 2), models, fed.place(x, placement)))
        return jnp.sum(fed.mean(models)) + worst
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 5, 3)), jnp.float32)
    args = jnp.float32(0.1), jnp.ones(3), x
    value = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return value(*args), jax.jvp(lambda r: jax.grad(loss)(r, *args[1:]), args[:1], args[:1]), value.lower(*args).compile()

one, eight = [program(fed.Placement("clients", 16, devices)) for devices in (None, tuple(jax.devices()))]
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one[:2], eight[:2])
assert "all-reduce" in eight[2].as_text() and "all-reduce" not in one[2].as_text()
print(len(jax.devices()))
"""


@pytest.mark.slow
def test_eight_devices_give_the_same_values_and_derivatives():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", EIGHT_DEVICES], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr[-2000:]


def _mesh(kind):
    return jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])


def test_a_placement_over_devices_works_in_a_context_with_a_mesh():
    """As in programs of DrJAX, which need such a context; the mesh of the context has another axis."""
    placement = fed.Placement("clients", 4, devices=jax.devices()[:4])

    def program(server, values):
        return fed.mean(fed.map(lambda a, b: a * b, fed.broadcast(server, placement), values))

    with jax.set_mesh(_mesh(jax.sharding.AxisType.Auto)):
        values = fed.place(np.arange(4, dtype=np.float32), placement)
        for function in (program, jax.jit(program)):
            assert float(function(np.float32(2), values)) == 3.0
            assert float(jax.grad(function)(np.float32(2), values)) == 1.5
    with (
        jax.set_mesh(_mesh(jax.sharding.AxisType.Explicit)),
        pytest.raises(ValueError, match="Expected no explicit axes in jax.set_mesh around the placement 'clients'"),
    ):
        program(np.float32(2), values)


def test_algorithms_and_evaluation_work_in_a_context_with_a_mesh():
    data = federation.data()
    algorithm = fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2),
        execution=fedsim.Pmap(devices=2),
    )  # fmt: skip
    start = algorithm.init(jax.random.key(0))

    def loss():
        state, _ = algorithm.apply(start, fedsim.Cohort.of(data, data.client_ids))
        return fedsim.evaluate(algorithm.model, state.params, data).overall["loss"]

    expected = loss()
    with jax.set_mesh(_mesh(jax.sharding.AxisType.Auto)):
        assert loss() == expected
