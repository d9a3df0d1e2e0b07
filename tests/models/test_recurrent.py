"""`fedsim.models.LSTM` compared with the unrolled `hk.LSTM`: outputs and derivatives with the same parameters."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.models import LSTM

CASES = [(1, 1, 1, 1), (3, 7, 5, 6), (2, 40, 3, 8)]  # batch, time, in, hidden


def both(hidden):
    """Returns networks of fedsim's and of Haiku's layer, each followed by a linear layer, with equal parameter names."""

    def theirs(x):
        core = hk.LSTM(hidden)
        return hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)[0]

    return hk.without_apply_rng(hk.transform(lambda x: LSTM(hidden)(x))), hk.without_apply_rng(hk.transform(theirs))


def drawn(case, seed=0):
    batch, time, features, hidden = case
    generator = np.random.default_rng(seed)
    ours, theirs = both(hidden)
    x = jnp.asarray(generator.standard_normal([batch, time, features]), jnp.float32)
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), x)
    params = jax.tree.map(lambda s: jnp.asarray(generator.standard_normal(s.shape) / np.sqrt(s.shape[0]), jnp.float32), shapes)
    weights = jnp.asarray(generator.standard_normal([batch, time, hidden]), jnp.float32)
    return ours, theirs, params, x, weights


def close(ours, theirs, tolerance=1e-5):
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs))
    assert scale > 1e-3
    check = lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * max(scale, 1), rtol=tolerance)  # noqa: E731
    jax.tree.map(check, ours, theirs)


def test_initial_parameters_have_haikus_names_and_spread():
    ours, theirs = both(64)
    x = jnp.zeros([1, 2, 32])
    a, b = (jax.jit(net.init)(jax.random.key(0), x) for net in (ours, theirs))
    assert jax.tree.map(jnp.shape, a) == jax.tree.map(jnp.shape, b)
    for p in (a, b):
        w = p["lstm/linear"]["w"]
        assert abs(float(w.std()) * np.sqrt(96) - 0.88) < 0.02 and not p["lstm/linear"]["b"].any()


@pytest.mark.first(1)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_haikus(case):
    ours, theirs, params, x, weights = drawn(case)
    loss = lambda net: jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(net.apply(p, x) * weights), argnums=(0, 1)))  # noqa: E731
    close(jax.jit(ours.apply)(params, x), theirs.apply(params, x))
    close(loss(ours)(params, x), loss(theirs)(params, x))


@pytest.mark.first(2)
@pytest.mark.parametrize("case", [*CASES, (2, 21, 3, 4)])
def test_the_form_for_gpus_equals_that_for_cpus(case, monkeypatch):
    """The layer chooses by `jax.default_backend`; 21 and 40 steps are more than are unrolled at once."""
    ours, _, params, x, weights = drawn(case)

    def loss(params, x):
        outputs = ours.apply(params, x)
        return jnp.sum(outputs * weights), outputs

    def on(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        form = str(jax.make_jaxpr(lambda x: ours.apply(params, x))(x))
        assert ("custom_jvp_call" in form) == (backend == "cpu")  # so there are two implementations
        return jax.jit(lambda: jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x))()

    close(on("gpu"), on("cpu"))


def test_forward_mode_equals_haikus():
    ours, theirs, params, x, _ = drawn(CASES[1])
    tangents = drawn(CASES[1], seed=1)[2:4]
    push = lambda net: jax.jvp(net.apply, (params, x), tangents)  # noqa: E731
    close(push(ours), push(theirs))


@pytest.mark.slow
def test_hessian_vector_products_equal_haikus_in_both_orders():
    """Per-FedAvg needs these products."""
    ours, theirs, params, x, weights = drawn((3, 4, 5, 6))
    direction = drawn((3, 4, 5, 6), seed=1)[2]

    def products(net):
        gradient = jax.grad(lambda p: jnp.sum(jnp.sin(net.apply(p, x)) * weights))
        forward = jax.jvp(gradient, (params,), (direction,))[1]
        dot = lambda p: sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (gradient(p), direction)), strict=True))  # noqa: E731
        return jax.jit(lambda: (forward, jax.grad(dot)(params)))()

    close(products(ours), products(theirs), 3e-5)


def test_vmap_over_clients_parameters_equals_each_client_alone():
    ours, _, params, x, weights = drawn(CASES[1])
    lanes = jax.tree.map(lambda p: jnp.stack([p, -p, 0.5 * p]), params)
    gradient = jax.grad(lambda p: jnp.sum(ours.apply(p, x) * weights))
    together = jax.jit(jax.vmap(gradient))(lanes)
    for lane in range(3):
        close(jax.tree.map(lambda p: p[lane], together), gradient(jax.tree.map(lambda p: p[lane], lanes)))  # noqa: B023


def test_the_gradient_of_the_weights_is_not_accumulated_in_a_loop():
    """With the hand-written tangent, no loop of the gradient carries an array as large as the weights."""
    ours, theirs, params, x, weights = drawn((4, 9, 12, 10))

    def largest_carry(net):
        jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(net.apply(p, x) * weights)))(params)
        scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
        results = [pair for s in scans for pair in zip(s.outvars, s.params["jaxpr"].jaxpr.outvars, strict=True)]
        # Carried arrays have the same shape outside the loop; the stacked outputs of the steps do not.
        return max(outer.aval.size for outer, inner in results if outer.aval.shape == inner.aval.shape)

    assert largest_carry(ours) == 4 * 10
    assert largest_carry(theirs) == 22 * 40
