"""Federated programs: values, derivatives, and that derivatives are federated programs again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim import primitives as fed

CLIENTS = fed.Placement("clients", 7)
FEDERATED = {"broadcast", "map", "sum", "mean", "max", "min"}
# JAX adds the cotangents of a value that is used twice.
CLOSED = FEDERATED | {"add_any"}


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def at_clients(*shape, seed=0):
    return fed.place(jnp.asarray(np.random.default_rng(seed).normal(size=(7, *shape))), CLIENTS)


def names_at_clients(function, *args):
    """Returns the names of all equations that read or compute arrays with an axis of the seven clients."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [e.primitive.name for e in jaxpr.eqns if any(7 in var.aval.shape for var in [*e.invars, *e.outvars])]


# ---- Derivatives of single primitives.


@pytest.mark.parametrize(
    ("function", "derivative", "transpose"),
    [
        (lambda x: fed.broadcast(x, CLIENTS).stacked, ["broadcast"], ["sum"]),
        (lambda x: fed.sum(fed.Placed(x, CLIENTS)), ["sum"], ["broadcast"]),
        (lambda x: fed.mean(fed.Placed(x, CLIENTS)), ["mean"], ["broadcast"]),
        (lambda x: fed.map(jnp.sin, fed.Placed(x, CLIENTS)).stacked, ["map"], ["map"]),
        (lambda x: fed.max(fed.Placed(x, CLIENTS)), ["broadcast", "map", "map", "sum", "sum"], ["broadcast", "map"]),
    ],
)
def test_derivatives_and_their_transposes(function, derivative, transpose):
    x = jnp.linspace(0.0, 1.0, 7)
    assert names_at_clients(lambda x, dot: jax.jvp(function, (x,), (dot,))[1], x, x)[-len(derivative) :] == derivative
    out, along = jax.linearize(function, x)
    transposed = jax.linear_transpose(along, x)
    used = [name for name in names_at_clients(transposed, out) if name in FEDERATED]
    assert used == transpose
    # <A x, y> = <x, A' y>
    y = jnp.asarray(np.random.default_rng(1).normal(size=out.shape))
    np.testing.assert_allclose(jnp.vdot(along(x), y), jnp.vdot(x, transposed(y)[0]))


def test_the_mean_transposes_to_a_broadcast_of_one_over_n():
    (cotangent,) = jax.linear_transpose(lambda x: fed.mean(fed.Placed(x, CLIENTS)), jnp.zeros([7, 2]))(jnp.ones(2))
    np.testing.assert_allclose(cotangent, np.full([7, 2], 1 / 7))


# ---- Programs.


def mean_loss(params, x, y):
    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params) - y) ** 2)

    return fed.mean(fed.map(loss, fed.broadcast(params, CLIENTS), x, y))


def fedavg(rate, params, x, y, weights):
    """Two rounds of two local steps, with the aggregation weights as parameters."""
    for _ in range(2):

        def train(own, x, y):
            for _ in range(2):
                own = own - rate * jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p) - y) ** 2))(own)
            return own

        params = fed.weighted_mean(fed.map(train, fed.broadcast(params, CLIENTS), x, y), weights)
    return jnp.sum(params**2)


def fedavg_in_numpy(rate, params, x, y, weights):
    for _ in range(2):
        models = []
        for own_x, own_y in zip(x, y, strict=True):
            own = params
            for _ in range(2):
                outputs = np.tanh(own_x @ own)
                own = own - rate * own_x.T @ (2 * (outputs - own_y) * (1 - outputs**2)) / len(own_y)
            models.append(own)
        params = np.average(models, axis=0, weights=weights)
    return np.sum(params**2)


def fedavg_inputs():
    weights = fed.place(jnp.arange(1.0, 8.0), CLIENTS)
    return 0.3, jnp.array([0.2, -0.4, 0.1]), at_clients(5, 3), at_clients(5, seed=1), weights


def test_fedavg_and_its_hypergradients_against_numpy():
    rate, params, x, y, weights = fedavg_inputs()
    plain = (params, x.stacked, y.stacked, weights.stacked)
    assert float(fedavg(rate, params, x, y, weights)) == pytest.approx(fedavg_in_numpy(rate, *map(np.asarray, plain)))
    by_rate, by_params, by_weights = jax.jit(jax.grad(fedavg, (0, 1, 4)))(rate, params, x, y, weights)

    def difference(change):
        return [fedavg_in_numpy(*change(h)) for h in (1e-6, -1e-6)]

    def slope(change):
        up, down = difference(change)
        return (up - down) / 2e-6

    params, x, y, weights = map(np.asarray, plain)
    assert float(by_rate) == pytest.approx(slope(lambda h: (rate + h, params, x, y, weights)), rel=1e-6)
    for by_param, unit in zip(by_params, np.eye(3), strict=True):
        expected = slope(lambda h, unit=unit: (rate, params + h * unit, x, y, weights))
        assert float(by_param) == pytest.approx(expected, rel=1e-6)
    assert float(by_weights.stacked[2]) == pytest.approx(
        slope(lambda h: (rate, params, x, y, weights + h * np.eye(7)[2])), rel=1e-5
    )


def test_derivatives_consist_of_the_same_primitives():
    rate, params, x, y, weights = fedavg_inputs()

    def reverse(params):
        return jax.grad(lambda p: fedavg(rate, p, x, y, weights))(params)

    for derivative in (
        lambda params: jax.jvp(lambda p: fedavg(rate, p, x, y, weights), (params,), (params,)),
        reverse,
        lambda params: jax.jvp(reverse, (params,), (params,)),
        lambda params: jax.grad(lambda p: jnp.sum(reverse(p) ** 2))(params),
    ):
        assert set(names_at_clients(derivative, params)) <= CLOSED


def test_fedsgd_is_the_gradient_of_the_mean_loss():
    _, params, x, y, _ = fedavg_inputs()
    outputs = np.tanh(x.stacked @ params)
    expected = np.einsum("ne,ned->d", 2 * (outputs - y.stacked) * (1 - outputs**2) / 5, x.stacked) / 7
    np.testing.assert_allclose(jax.grad(mean_loss)(params, x, y), expected)


# ---- Nested placements: silos that have clients.


def test_hierarchical_averaging():
    silos, clients = fed.Placement("silos", 2), fed.Placement("clients", 3)
    targets = np.random.default_rng(0).normal(size=(2, 3, 4))
    examples = fed.place(fed.Placed(jnp.asarray(targets), clients), silos)

    def of_silo(params, targets):
        for _ in range(2):  # rounds within a silo
            params = fed.mean(fed.map(lambda p, t: p - 0.5 * (p - t), fed.broadcast(params, clients), targets))
        return params

    def program(params):
        return fed.mean(fed.map(of_silo, fed.broadcast(params, silos), examples))

    np.testing.assert_allclose(program(jnp.zeros(4)), 0.75 * targets.mean((0, 1)))
    np.testing.assert_allclose(jax.jit(jax.jacrev(program))(jnp.zeros(4)), 0.25 * np.eye(4))
    with pytest.raises(ValueError, match="Each of the 2 silos has values of its own clients"):
        fed.mean(examples)
    assert "clients" in str(jax.make_jaxpr(program)(jnp.zeros(4)))


# ---- Random programs under random transformations.

CLIENT_STEPS = {
    "square": lambda own, shared: own**2,
    "sine": lambda own, shared: jnp.sin(own + shared),
    "product": lambda own, shared: own * jnp.sum(shared) + shared,
    "loop": lambda own, shared: fed.bounded_loop(jnp.int32(2), lambda t, x: jnp.tanh(x + shared), own, most_steps=3),
}
REDUCTIONS = ["sum", "mean", "max", "weighted"]


def program_of(steps, plain):
    """Returns a function from a vector to a number; with ``plain``, one that uses arrays with an axis of clients instead."""
    data = at_clients(3).stacked

    def program(x):
        value = x
        for step, reduction in steps:
            own = jax.vmap(CLIENT_STEPS[step], (0, None)) if plain else CLIENT_STEPS[step]
            if plain:
                stacked = own(data, value)
                if reduction == "weighted":
                    weights = jnp.exp(stacked[:, 0])
                    value = jnp.sum(stacked * weights[:, None], 0) / jnp.sum(weights)
                else:
                    value = getattr(jnp, reduction)(stacked, axis=0)
            else:
                placed = fed.map(own, fed.place(data, CLIENTS), fed.broadcast(value, CLIENTS))
                if reduction == "weighted":
                    value = fed.weighted_mean(placed, fed.map(lambda own: jnp.exp(own[0]), placed))
                else:
                    value = getattr(fed, reduction)(placed)
            value = jnp.tanh(value)
        return jnp.sum(value)

    return program


def with_custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: jax.vjp(f, x), lambda pull, cotangent: pull(cotangent))
    return wrapped


DIRECTION = np.array([0.3, -1.0, 0.7])
TRANSFORMATIONS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "grad": lambda f: lambda x: jnp.vdot(jax.grad(f)(x), DIRECTION),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.asarray(DIRECTION),))[1],
    "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, 2 * x]))),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, t: (c + f(x * t), None), 0.0, jnp.array([0.5, 1.0]))[0],
    "custom_vjp and grad": lambda f: lambda x: jnp.vdot(jax.grad(with_custom_vjp(f))(x), DIRECTION),
}
PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(CLIENT_STEPS)), st.sampled_from(REDUCTIONS)), min_size=1, max_size=2)
AT = np.array([0.1, -0.2, 0.4])


def check_random_program(steps, transformations, fused=False, recompute=True):
    ours, expected = program_of(steps, plain=False), program_of(steps, plain=True)
    ours = fed.program(ours, recompute=recompute) if fused else ours
    for name in transformations:
        ours, expected = TRANSFORMATIONS[name](ours), TRANSFORMATIONS[name](expected)
    np.testing.assert_allclose(jax.jit(ours)(AT), jax.jit(expected)(AT), rtol=1e-8, atol=1e-10)


@pytest.mark.first(2)
@pytest.mark.parametrize(("inner", "outer"), list(itertools.product(["grad", "vmap", "scan"], ["jit", "grad", "jvp", "vmap"])))
def test_two_transformations(inner, outer):
    check_random_program([("loop", "weighted")], [inner, outer])


@pytest.mark.first(7)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("transformation", ["jit", "grad", "jvp", "vmap"])
def test_a_fused_program_has_the_same_derivatives(transformation, recompute):
    check_random_program([("loop", "weighted"), ("sine", "max")], [transformation], fused=True, recompute=recompute)


def test_a_backward_pass_computes_the_clients_work_again_or_stores_it():
    def loss(p, x):
        return fed.mean(fed.map(lambda own: jnp.tanh(jnp.exp(p * own)), x))

    def exponentials(recompute):
        derivative = jax.value_and_grad(fed.program(loss, recompute=recompute))
        return jax.jit(derivative).lower(0.5, at_clients()).as_text().count("stablehlo.exponential")

    assert (exponentials(True), exponentials(False)) == (2, 1)


def test_clients_work_side_by_side_or_one_after_another():
    matrices = at_clients(3, 3)

    def loops(way, fuse=lambda function: function):
        run = fuse(lambda x: fed.sum(fed.map(jnp.sin, fed.map(lambda own: own @ own, x, side_by_side=way))))
        text = jax.jit(run).lower(matrices).as_text()
        np.testing.assert_allclose(run(matrices), np.sin(matrices.stacked @ matrices.stacked).sum(0))
        return text.count("stablehlo.while")

    # A fused program has the only choice that was made. Without one, a CPU multiplies matrices one after another.
    for fuse in (lambda function: function, fed.program):
        assert [loops(way, fuse) for way in (True, False)] == [0, 1]
    assert loops(None) == (jax.default_backend() == "cpu")


def test_clients_functions_may_have_a_custom_reverse_mode():
    own_sine = jax.custom_vjp(jnp.sin)
    own_sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, cotangent: (3 * cotangent * cosine,))

    def loss(p, x):
        def of_client(p, x):
            return fed.bounded_loop(2, lambda t, total: total + own_sine(p * x), 0.0, most_steps=2)

        return fed.mean(fed.map(of_client, fed.broadcast(p, CLIENTS), x))

    x = at_clients()
    for run in (loss, jax.jit(loss), fed.program(loss), fed.program(loss, recompute=False)):
        np.testing.assert_allclose(jax.grad(run)(0.5, x), np.mean(3 * 2 * x.stacked * np.cos(0.5 * x.stacked)))


def test_a_fused_program_stores_neither_copies_nor_results_of_clients():
    rate, params, x, y, weights = fedavg_inputs()
    fused = fed.program(fedavg)
    assert float(fused(rate, params, x, y, weights)) == pytest.approx(float(fedavg(rate, params, x, y, weights)))
    equations = jax.make_jaxpr(fused)(rate, params, x, y, weights).jaxpr.eqns
    federated = [e for e in equations if "placement" in e.params]
    assert [e.primitive.name for e in federated] == ["map", "map"]  # one for each round
    assert all(all(e.params["summed"]) for e in federated)
    kept = fed.program(lambda x: (fed.mean(x), fed.sum(fed.map(jnp.square, x)), fed.map(jnp.square, x)))(x)
    np.testing.assert_allclose(kept[1], np.sum(x.stacked**2, 0))
    np.testing.assert_allclose(kept[2].stacked, x.stacked**2)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(PROGRAMS, st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), max_size=3), st.booleans())
def test_random_programs_under_random_transformations(steps, transformations, fused):
    check_random_program(steps, transformations, fused)


def test_fused_programs_of_derivatives_by_what_a_function_closes_over():
    """The derivative is a sum over clients inside a map, which later maps of the same program may read."""
    x = at_clients()

    def derivative(p, x):
        return jax.grad(lambda p: fed.sum(fed.map(lambda own: p * own * own, x)))(p)

    def twice(p, x):
        slope = derivative(p, x)
        return fed.sum(fed.map(lambda own: own * slope, x))

    def centred(p, x):
        sines = fed.map(jnp.sin, x)
        return fed.sum(fed.map(lambda own: (own - jnp.mean(sines.stacked)) ** 2, x))

    def two_uses(p, x):
        return jax.grad(lambda p: sum(fed.mean(fed.map(f, fed.map(lambda own: p * own, x))) for f in (jnp.sin, jnp.cos)))(p)

    data = x.stacked
    expected = {
        derivative: np.sum(data**2),
        twice: np.sum(data) * np.sum(data**2),
        centred: np.sum((data - np.mean(np.sin(data))) ** 2),
        two_uses: np.mean(data * np.cos(0.5 * data) - data * np.sin(0.5 * data)),
    }
    for function, value in expected.items():
        for run in (function, fed.program(function), fed.stages(function, 0.5, x).run):
            np.testing.assert_allclose(run(0.5, x), value)
    assert "sum of" in str(fed.stages(derivative, 0.5, x))
    assert fed.stages(two_uses, 0.5, x).leaks == ()
    nested = jax.grad(fed.program(jax.grad(fed.program(lambda p: fed.mean(fed.map(lambda own: jnp.sin(p * own), x))))))
    np.testing.assert_allclose(nested(0.5), -np.mean(data**2 * np.sin(0.5 * data)))
    assert fed.program(lambda r, x: r * fed.mean(x))(0.5, fed.place(jnp.ones(7, jnp.bfloat16), CLIENTS)).dtype == jnp.bfloat16


def test_functions_with_a_custom_derivative_are_not_taken_apart():
    with pytest.raises(ValueError, match="functions with a custom derivative"):
        fed.program(with_custom_vjp(lambda x: fed.mean(fed.broadcast(x, CLIENTS))))(1.0)
