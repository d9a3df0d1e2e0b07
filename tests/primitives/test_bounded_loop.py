"""`bounded_loop` equals a Python loop, in value and in every kind of derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.primitives import bounded_loop


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def looped(start, rate, num_steps, most_steps=40):
    """Has a state whose value the derivative needs, a sum that it does not need, and a counter without a derivative."""

    def step(t, state):
        point, total, count = state
        point = jnp.sin(point * rate + count.astype(point.dtype))
        return point, total + jnp.sum(point * rate), count + 1

    state = start, jnp.zeros((), start.dtype), jnp.int32(0)
    point, total, _ = bounded_loop(num_steps, step, state, most_steps=most_steps)
    return total + jnp.sum(point)


def unrolled(start, rate, num_steps):
    point, total = start, 0.0
    for t in range(num_steps):
        point = jnp.sin(point * rate + t)
        total = total + jnp.sum(point * rate)
    return total + jnp.sum(point)


@pytest.mark.first(2)
@pytest.mark.parametrize("most_steps", [5, 40])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_first_derivatives(num_steps, most_steps):
    start, rate = jnp.array([0.3, 0.5]), jnp.float64(0.7)
    ours = jax.jit(jax.value_and_grad(looped, (0, 1)), static_argnums=3)(start, rate, num_steps, most_steps)
    jax.tree.map(np.testing.assert_allclose, ours, jax.value_and_grad(unrolled, (0, 1))(start, rate, num_steps))
    ours = jax.jvp(lambda *args: looped(*args, num_steps, most_steps), (start, rate), (start, rate))
    np.testing.assert_allclose(ours, jax.jvp(lambda *args: unrolled(*args, num_steps), (start, rate), (start, rate)))


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacrev, jax.jacfwd])
def test_second_derivatives(outer, inner):
    start = jnp.array([0.3, 0.5])
    ours, theirs = [outer(inner(lambda x, f=f: f(x, 0.7, 3)))(start) for f in (looped, unrolled)]
    np.testing.assert_allclose(ours, theirs)


def test_lanes_take_their_own_numbers_of_steps():
    starts, counts = jnp.arange(6.0).reshape(3, 2), jnp.array([0, 2, 5])
    expected = [jax.grad(unrolled)(start, 0.7, int(count)) for start, count in zip(starts, counts, strict=True)]
    inside = jax.vmap(lambda start, count: jax.grad(looped)(start, 0.7, count))(starts, counts)
    outside = jax.grad(lambda starts: jnp.sum(jax.vmap(looped, (0, None, 0))(starts, 0.7, counts)))(starts)
    np.testing.assert_allclose(inside, expected)
    np.testing.assert_allclose(outside, expected)


def test_steps_that_a_lane_does_not_take_have_no_part_in_derivatives():
    def root(x, num_steps):  # whose slope is infinite at the step after the last one of a lane, and NaN after that
        return bounded_loop(num_steps, lambda t, s: s + jnp.sqrt(x * (num_steps - t).astype(x.dtype)), 0 * x, most_steps=4)

    rates, counts = jnp.array([2.0, 3.0]), jnp.int32([1, 3])
    expected = [np.sqrt(range(1, n + 1)).sum() / (2 * np.sqrt(x)) for n, x in ((1, 2.0), (3, 3.0))]
    in_lanes = jax.vmap(root)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(in_lanes(x, counts)))(rates), expected)
    np.testing.assert_allclose(jax.jvp(lambda x: in_lanes(x, counts), (rates,), (jnp.ones(2),))[1], expected)


def test_only_lanes_that_differ_are_computed_for_each_lane():
    def loop(scale):
        def step(t, state):
            shared, own = state
            return shared + 1, own * scale

        return bounded_loop(3, step, (jnp.zeros(5), jnp.ones(())))

    shared, own = jax.make_jaxpr(jax.vmap(loop, out_axes=(None, 0)))(jnp.arange(4.0)).out_avals
    assert shared.shape == (5,) and own.shape == (4,)


def test_the_derivative_of_a_derivative_may_be_transposed_after_vmap():
    start = jnp.array([0.3, 0.5])
    _, along = jax.linearize(lambda x: looped(x, 0.7, 3), start)
    transposed = jax.linear_transpose(lambda many: jnp.sum(jax.vmap(along)(many)), jnp.ones((3, 2)))
    np.testing.assert_allclose(transposed(1.0)[0], [jax.grad(unrolled)(start, 0.7, 3)] * 3)


def test_inside_scan_and_checkpoint():
    def scanned(x):
        def body(x, _):
            return jax.checkpoint(lambda x: bounded_loop(3, lambda t, x: jnp.sin(x * 0.7), x, most_steps=4))(x), None

        return jnp.sum(jax.lax.scan(body, x, None, length=4)[0])

    def plain(x):
        for _ in range(12):
            x = jnp.sin(x * 0.7)
        return jnp.sum(x)

    start = jnp.array([0.3, 0.5])
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(start), jax.grad(plain)(start))


def test_stored_states_grow_with_the_square_root_of_the_steps_and_leave_out_sums():
    """The largest array of the backward pass tells how many states are stored."""

    def most_stored(most_steps):
        def loop(x):
            def step(t, state):
                return jnp.sin(state[0]), state[1] + state[0]

            return jnp.sum(bounded_loop(7, step, (x, x), most_steps=most_steps)[1])

        text = str(jax.make_jaxpr(jax.grad(loop))(jnp.zeros(17)))
        return [rows for rows in (30, 31, 100, 1000, 10000) if f"f64[{rows},17]" in text]

    assert [most_stored(n) for n in (30, 10_000)] == [[30], [100]]
    text = str(jax.make_jaxpr(jax.grad(lambda x: bounded_loop(7, lambda t, y: y + x, x, most_steps=30)))(1.0))
    assert "f64[30]" not in text


def test_forward_mode_needs_no_bound_and_reverse_mode_does():
    def loop(x):
        return bounded_loop(3, lambda t, x: x * x, x)

    assert jax.jvp(loop, (2.0,), (1.0,)) == (256.0, 8 * 2.0**7)
    with pytest.raises(ValueError, match="pass most_steps to bounded_loop"):
        jax.grad(loop)(2.0)


def test_more_steps_than_the_bound():
    def power(base, count):
        return bounded_loop(count, lambda t, x: x * base, jnp.ones(()), most_steps=3)

    with pytest.raises(ValueError, match="num_steps <= most_steps=3, got num_steps=5"):
        power(2.0, 5)
    assert [float(jax.jit(f)(2.0, 5)) for f in (power, jax.grad(power))] == [8.0, 12.0]
    with pytest.raises(TypeError, match="Expected num_steps to be an integer, got 2.5"):
        power(2.0, 2.5)
    with pytest.raises(ValueError, match="most_steps >= 1"):
        bounded_loop(0, lambda t, x: x, 1.0, most_steps=0)


def test_keys_in_the_state():
    def noisy(x):
        def step(t, state):
            key, x = state
            return jax.random.split(key)[0], x * jnp.sin(x) * jax.random.normal(key)

        return bounded_loop(3, step, (jax.random.key(0), x), most_steps=40)[1]

    assert float(jax.grad(noisy)(1.0)) == pytest.approx(float(noisy(1 + 1e-6) - noisy(1 - 1e-6)) / 2e-6, rel=1e-6)


def test_a_step_that_returns_another_kind_of_state():
    with pytest.raises(TypeError, match=r"state\['w'\] of float64\[2\], got float32\[2\]"):
        bounded_loop(3, lambda t, state: {"w": state["w"].astype(jnp.float32)}, {"w": jnp.zeros(2)})
    with pytest.raises(TypeError, match="Expected a step to return a state like the first one"):
        bounded_loop(3, lambda t, state: (state, state), jnp.zeros(2))


def test_a_python_number_in_the_step_outside_of_jit():
    def power(base, exponent):
        return bounded_loop(exponent, lambda t, product: product * base, 1.0, most_steps=4)

    assert [float(jax.grad(power)(2.0, n)) for n in (0, 1, 3)] == [0, 1, 12]
