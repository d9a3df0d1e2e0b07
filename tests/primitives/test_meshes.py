"""Placements on one axis of a mesh that has others: values, derivatives, how arrays are divided, and errors.

The cases are those of the test suite of DrJAX 0.2.1, in the words of `fedsim.primitives` (docs/migration.md counts them), and
programs whose derivatives have a closed form.
"""

import contextlib
import re

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedsim
from fedsim import primitives as fed

KINDS = [AxisType.Auto, AxisType.Explicit]
AUTO = AxisType.Auto
SIZE, WIDTH = 100, 10


def mesh_of(kind, **axes):
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[: np.prod([*axes.values()])]
    )


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def spec_of(x):
    spec = tuple(getattr(x.sharding, "spec", ()))
    return spec + (None,) * (x.ndim - len(spec))


@contextlib.contextmanager
def given(way, mesh, size=SIZE, name="clients"):
    """Gives a placement its mesh by `jax.set_mesh` or as an argument. Types of arrays need the context in any case."""
    context = jax.set_mesh(mesh) if way == "context" or AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()
    with context:
        yield fed.Placement(name, size, mesh=None if way == "context" else mesh)


def compiled_or_not(function):
    return function, jax.jit(function)


# ---- How the values of clients are divided.


@pytest.mark.parametrize("way", ["context", "argument"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broadcast_is_divided_over_the_clients_and_as_its_value_is(kind, way):
    mesh, x = mesh_of(kind, clients=2, data=2), np.arange(WIDTH, dtype=np.float32)
    single = jax.device_put(jax.device_put(x, jax.devices()[0]), NamedSharding(mesh, P()))
    with given(way, mesh) as clients:
        for value, spec in ((x, (None,)), (single, (None,)), (on(mesh, x, "data"), ("data",))):
            for send in compiled_or_not(lambda x: fed.broadcast(x, clients).stacked):
                copies = send(value)
                assert spec_of(copies) == ("clients", *spec)
                assert copies.sharding.shard_shape(copies.shape) == (50, 5 if spec == ("data",) else 10)
                np.testing.assert_array_equal(copies, np.tile(x, (SIZE, 1)))
    with given(way, mesh_of(kind, clients=1, data=1)) as clients:
        for send in compiled_or_not(lambda x: fed.broadcast(x, clients).stacked):
            assert send(x).sharding.is_fully_replicated


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_without_an_axis_of_the_clients_divides_only_the_other_axes(kind):
    mesh, clients = mesh_of(kind, data=2), fed.Placement("clients", SIZE)
    x = on(mesh, np.ones(WIDTH, np.float32), "data")
    for context in (jax.set_mesh(mesh), contextlib.nullcontext()):
        with context:
            for send in compiled_or_not(lambda x: fed.broadcast(x, clients).stacked):
                assert spec_of(send(x)) == (None, "data")
            twice = fed.map(lambda own: own + x, fed.broadcast(x, clients)).stacked
            assert spec_of(twice) == (None, "data") and bool((twice == 2).all())


def test_another_axis_gives_way_to_the_clients():
    mesh, x = mesh_of(AxisType.Explicit, clients=2, data=2), np.ones((8, 8), np.float32)
    with jax.set_mesh(mesh):
        for stack in compiled_or_not(lambda x: fed.place(x, fed.Placement("clients", 8)).stacked):
            assert spec_of(stack(on(mesh, x, "data", "clients"))) == ("clients", None)


def within_data(x, y):
    return jax.shard_map(jnp.add, in_specs=(P("data"), P("data")), out_specs=P("data"), axis_names={"data"})(x, y)


FUNCTIONS = {"add": jax.jit(jnp.add), "zeros": lambda x, y: jnp.zeros_like(x), "shard_map": within_data}


@pytest.mark.first(4)
@pytest.mark.parametrize("way", ["context", "argument"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_of_clients_are_divided_over_them_and_as_the_function_divides(name, kind, way):
    mesh, x = mesh_of(kind, clients=2, data=2), np.ones((SIZE, WIDTH), np.float32)
    with given(way, mesh) as clients:
        for spec in ((None, None), (None, "data"), ("clients", "data")):
            if name == "shard_map" and kind != AUTO and spec[1] is None:
                continue  # JAX 0.12 wants explicit axes to be divided before a shard_map over them.
            for run in compiled_or_not(
                lambda x, y: fed.map(FUNCTIONS[name], fed.place(x, clients), fed.place(y, clients)).stacked
            ):
                out = run(on(mesh, x, *spec), on(mesh, 2 * x, *spec))
                inner = "data" if name == "shard_map" else spec[1]
                if name != "zeros" or kind != AUTO:  # XLA is free to divide constants.
                    assert spec_of(out) == ("clients", inner)
                    assert out.sharding.shard_shape(out.shape) == (50, 5 if inner else 10)
                np.testing.assert_array_equal(out, 0 * x if name == "zeros" else 3 * x)


# ---- Values and derivatives.


RATE, STEPS = 0.1, np.array([0, 1, 2, 3, 1, 2, 3, 1], np.int32)
TARGETS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
PARAMS = np.array([0.5, -1.0, 2.0, 1.0], np.float32)


def after_training(clients, divide=lambda x: x):
    """Returns the sum of squares of the mean model, where client i takes STEPS[i] steps towards its target."""

    def loss(params, targets, rate):
        def train(params, target, steps, rate):
            def step(t, params):
                return divide(params) - rate * jax.grad(lambda p: jnp.sum((p - target) ** 2) / 2)(params)

            return fed.bounded_loop(steps, step, params, most_steps=3)

        targets, steps = fed.place(targets, clients), fed.place(STEPS, clients)
        models = fed.map(train, fed.broadcast(params, clients), targets, steps, fed.broadcast(rate, clients))
        return jnp.sum(fed.mean(models) ** 2)

    return loss


def closed_form():
    """Returns the loss, its gradient by parameters and targets, and the derivative of the first of them by the rate."""
    kept = (1 - RATE) ** STEPS[:, None]
    slope = -STEPS[:, None] * (1 - RATE) ** (STEPS[:, None] - 1.0)  # of what is kept, by the rate
    model = np.mean(TARGETS + kept * (PARAMS - TARGETS), 0)
    of_model = np.mean(slope * (PARAMS - TARGETS), 0)
    gradients = 2 * model * kept.mean(), 2 * model * (1 - kept) / 8
    return (model**2).sum(), gradients, 2 * of_model * kept.mean() + 2 * model * slope.mean()


@pytest.mark.first(3)
@pytest.mark.parametrize("fused", ["", "fused", "fused, stored"])
@pytest.mark.parametrize("way", ["context", "argument"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_closed_form(kind, way, fused):
    mesh = mesh_of(kind, clients=2, data=2)
    with given(way, mesh, size=8) as clients:
        divide = (lambda x: jax.lax.with_sharding_constraint(x, P("data"))) if kind == AUTO else (lambda x: x)
        loss = after_training(clients, divide)
        if fused:
            loss = fed.program(loss, recompute=fused == "fused")

        @jax.jit
        def derivatives(params, targets, rate):
            value, gradients = jax.value_and_grad(loss, (0, 1))(params, targets, rate)
            return value, gradients, jax.jvp(lambda r: jax.grad(loss)(params, targets, r), (rate,), (jnp.ones_like(rate),))[1]

        value, gradients, mixed = derivatives(on(mesh, PARAMS, "data"), TARGETS, jnp.float32(RATE))
        assert spec_of(gradients[0]) == ("data",)
        got = jax.device_get((value, gradients, mixed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, closed_form())


def test_a_network_that_is_divided_over_the_devices_of_a_client():
    """The gradient is that of plain JAX on one device; devices of different clients exchange messages once, for the mean."""
    mesh, rng = mesh_of(AUTO, clients=2, model=2), np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("up", (3, 8)), ("down", (8, 2)))}
    x = rng.normal(size=(4, 5, 3)).astype(np.float32)
    specs = {"up": P(None, "model"), "down": P("model", None)}
    clients = fed.Placement("clients", 4, mesh=mesh)

    def client_loss(params, x):
        return jnp.mean((jax.nn.tanh(x @ params["up"]) @ params["down"]) ** 2)

    def of_client(params, x):
        divided = {name: jax.lax.with_sharding_constraint(leaf, specs[name]) for name, leaf in params.items()}
        return client_loss(divided, x)

    def loss(params, x):
        return fed.mean(fed.map(of_client, fed.broadcast(params, clients), fed.place(x, clients)))

    expected = jax.tree.map(lambda *gradients: sum(gradients) / 4, *[jax.grad(client_loss)(params, own) for own in x])
    gradient = jax.jit(jax.grad(loss))
    divided = {name: on(mesh, leaf, *specs[name]) for name, leaf in params.items()}
    got = gradient(divided, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    assert {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in got.items()} == {"up": (3, 4), "down": (4, 2)}
    text = gradient.lower(divided, x).compile().as_text()
    messages = [line for line in text.splitlines() if re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter)\(", line)]
    # Devices 0 and 1 train one client; 0 and 2 have the same part of the network.
    assert sorted(map(federation.groups, messages)) == ["{{0,1},{2,3}}", "{{0,2},{1,3}}"]


@pytest.mark.parametrize("way", ["devices", "mesh", "context"])
def test_a_program_is_one_pass_on_several_devices(way):
    mesh = mesh_of(AUTO, clients=2, data=2)
    options = {"devices": jax.devices()[:2]} if way == "devices" else {"mesh": mesh} if way == "mesh" else {}
    clients = fed.Placement("clients", 8, **options)

    @fed.program
    def program(x):
        copies = fed.broadcast(x, clients)
        return fed.mean(fed.map(jnp.sin, fed.map(jnp.negative, copies))), fed.sum(copies)

    with jax.set_mesh(mesh) if way == "context" else contextlib.nullcontext():
        names = [equation.primitive.name for equation in jax.make_jaxpr(program)(1.0).eqns]
        assert names.count("map") == 1 and "mean" not in names
        np.testing.assert_allclose(jax.jit(program)(1.0), (-np.sin(1), 8), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: program(x)[0]))(1.0), -np.cos(1), rtol=1e-6)


def test_two_placements_on_two_axes():
    """Silos on one axis, and the clients of each silo on the other one."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for kind in KINDS:
        for way in ("context", "argument"):
            mesh = mesh_of(kind, silos=2, clients=4)
            with given(way, mesh, 2, "silos") as silos, given(way, mesh, 4) as clients:

                def of_silo(p, own, clients=clients):
                    return fed.mean(fed.map(lambda p, x: p * (1 + x), fed.broadcast(p, clients), fed.place(own, clients)))

                def loss(p, x, silos=silos, of_silo=of_silo):
                    return fed.mean(fed.map(of_silo, fed.broadcast(p, silos), fed.place(x, silos)))

                assert float(loss(jnp.float32(2), x)) == 9
                gradients = jax.jit(jax.grad(loss, (0, 1)))(jnp.float32(2), x)
                assert float(gradients[0]) == 4.5
                np.testing.assert_allclose(gradients[1], np.full((2, 4), 0.25))


def first_of_two(function):
    """Returns a function whose second call has no cotangent."""
    two = jax.jit(lambda x: (function(x), function(x)))
    return jax.jit(lambda x: two(x)[0])


CONTEXTS = {"no mesh": None, "auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CONTEXTS)
def test_each_function_and_its_jacobians(name):
    kind, clients = CONTEXTS[name], fed.Placement("clients", SIZE)
    with contextlib.nullcontext() if kind is None else jax.set_mesh(mesh_of(kind, clients=2, data=4)):

        def send(x):
            return fed.broadcast(x, clients).stacked

        def functions(reduce):
            return lambda x: reduce(fed.place(x, clients)), lambda x: reduce(fed.broadcast(x, clients))

        one, ones, column = jnp.float32(1), np.ones(SIZE), jnp.ones((SIZE, 1))
        for compute in (*compiled_or_not(send), jax.jacfwd(send), jax.jacrev(send)):
            np.testing.assert_array_equal(compute(one), ones)
        for reduce, total in ((fed.sum, SIZE), (fed.mean, 1)):
            reduced, of_copies = functions(reduce)
            for compute in compiled_or_not(reduced):
                np.testing.assert_allclose(compute(column), [total])
            for jacobian in (jax.jacfwd, jax.jacrev):
                np.testing.assert_allclose(jacobian(reduced)(column), np.full((1, SIZE, 1), total / SIZE), rtol=1e-6)
                np.testing.assert_allclose(jacobian(of_copies)(jnp.ones(1)), [[total]], rtol=1e-6)
            first = first_of_two(reduced)
            np.testing.assert_allclose(jax.jacrev(first)(column), np.full((1, SIZE, 1), total / SIZE), rtol=1e-6)
            names = [
                {e.primitive.name for e in jax.make_jaxpr(derivative(reduced))(column).eqns}
                for derivative in (jax.jacfwd, jax.jacrev)
            ]
            assert reduce.__name__ in names[0] and "broadcast" in names[1]
        np.testing.assert_array_equal(jax.jacrev(first_of_two(send))(one), ones)
        assert "sum" in {e.primitive.name for e in jax.make_jaxpr(jax.jacrev(send))(one).eqns}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_with_a_condition_of_each_client(kind):
    def over(threshold, value):
        return jax.lax.cond(value > threshold, lambda: jnp.ones_like(value), lambda: jnp.zeros_like(value))

    with jax.set_mesh(mesh_of(kind, clients=4, data=2)):
        for size, threshold, share in ((100, 24, 0.75), (20, 3, 0.8), (100, 24, 0.75)):
            clients = fed.Placement("clients", size)
            values = fed.place(jnp.arange(size), clients)
            assert float(fed.mean(fed.map(over, fed.broadcast(threshold, clients), values))) == np.float32(share)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_other_functions_on_a_mesh(kind):
    x, clients = np.arange(8, dtype=np.float32), fed.Placement("clients", 8)
    with jax.set_mesh(mesh_of(kind, clients=2, data=4)):
        placed = fed.place(x, clients)
        assert float(fed.reduce(lambda x: jnp.median(x, axis=0), placed, name="median")) == 3.5
        assert (float(fed.max(placed)), int(fed.count(placed)), float(fed.mean(2 * placed + 1))) == (7, 7, 8)
        assert float(fed.weighted_mean(placed, fed.place(x, clients))) == 5
        np.testing.assert_allclose(jax.vmap(lambda s: fed.sum(fed.broadcast(s, clients)))(jnp.arange(3.0)), [0, 8, 16])
        keys = fed.place(jax.random.split(jax.random.key(0), 8), clients)
        np.testing.assert_array_equal(
            fed.map(jax.random.uniform, keys).stacked, jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 8))
        )
        plan = fed.stages(lambda x: fed.mean(fed.map(jnp.sin, x)), placed)
        assert [stage.kind for stage in plan.stages] == ["clients", "reduction"] and not plan.leaks


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_of_the_placement_needs_no_context(kind):
    x = on(mesh_of(kind, clients=4, data=2), np.ones((8, 8), np.float32), "data")
    assert spec_of(fed.broadcast(x, fed.Placement("clients", 8, mesh=x.sharding.mesh)).stacked) == ("clients", "data", None)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_algorithms_are_not_divided_over_an_axis_that_is_called_clients(kind):
    data = federation.data()
    algorithm = fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4)
    )
    cohort, state = fedsim.Cohort.of(data, data.client_ids[:4]), algorithm.init(jax.random.key(0))

    def reports():
        after, info = algorithm.apply(state, cohort)
        return federation.plain(after), info.total("weight"), str(fedsim.audit(algorithm, cohort))

    expected = reports()
    with jax.set_mesh(mesh_of(kind, clients=3, data=2)):
        federation.assert_trees_equal(reports()[:2], expected[:2])
        assert reports()[2] == expected[2]


def test_the_devices_are_those_of_the_context():
    clients = fed.Placement("clients", 8)
    send = jax.jit(lambda x: fed.broadcast(x, clients).stacked)
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        with jax.set_mesh(jax.make_mesh((4,), ("clients",), axis_types=(AUTO,), devices=devices)):
            assert send(np.ones(3)).sharding.device_set == set(devices)


# ---- Errors.


def test_what_a_mesh_does_not_allow():
    mesh = mesh_of(AUTO, clients=2, data=2)
    with pytest.raises(ValueError, match=r"Expected mesh to have an axis 'phones'.*got a mesh with axes clients=2 \(auto\)"):
        fed.Placement("phones", 8, mesh=mesh)
    with pytest.raises(
        ValueError, match="multiple of 2, the size of the axis 'clients' of the mesh, got size=7: use a smaller"
    ):
        fed.Placement("clients", 7, mesh=mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="multiple of 2.*got size=7"):
        fed.broadcast(1.0, fed.Placement("clients", 7))
    with pytest.raises(ValueError, match="Expected devices or mesh, got both for 'clients'"):
        fed.Placement("clients", 8, devices=jax.devices(), mesh=mesh)

    def over_clients(x):
        return fed.sum(fed.place(x, fed.Placement("clients", 4)))

    within = jax.shard_map(over_clients, mesh=mesh, in_specs=P("clients"), out_specs=P())
    with pytest.raises(
        ValueError, match=r"Expected the axis 'clients' of the mesh to be auto or explicit.*\(manual\).*outside"
    ):
        jax.jit(within)(jnp.ones(8))
    outer, inner = fed.Placement("clients", 2, mesh=mesh), fed.Placement("phones", 2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="Expected the placement 'phones' to be on the mesh of the function that uses it"):
        fed.map(lambda own: fed.sum(fed.place(own, inner)), fed.place(jnp.ones((2, 2)), outer))


@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AUTO), (AUTO, AxisType.Explicit)])
def test_axes_are_all_auto_or_all_explicit(kinds):
    clients = fed.Placement("clients", 2)
    with jax.set_mesh(mesh_of(kinds, clients=2, data=4)):
        for use in (lambda: fed.broadcast(1.0, clients), lambda: fed.place(jnp.zeros(2), clients)):
            with pytest.raises(ValueError, match=r"Expected the axes of the mesh to be all auto or all explicit.*axis_types="):
                use()


def test_explicit_axes_need_arguments_and_do_not_allow_calls_of_single_clients():
    clients = fed.Placement("clients", 2)
    with jax.set_mesh(mesh_of(AxisType.Explicit, clients=2, data=2)):
        placed, rate = fed.place(jnp.ones(2), clients), jnp.float32(2)
        with pytest.raises(ValueError, match="closes over: broadcast this and pass it to map"):
            fed.map(lambda x: rate * x, placed)
        with pytest.raises(ValueError, match="not to be divided over an explicit axis"):
            fed.stages(lambda x: fed.sum(fed.map(jnp.sin, x)), placed).run(placed)


def test_what_lies_on_a_mesh_is_indexed_by_clients_that_get_it_as_an_argument():
    clients = fed.Placement("clients", 4, tuple(jax.devices()[:2]))
    rows = fed.place(jnp.arange(4), clients)
    table = jax.device_put(jnp.arange(12.0).reshape(4, 3), jax.NamedSharding(clients.mesh, jax.P()))

    def total(row, table):
        return jnp.sum(table[jnp.stack([row, row])])

    expected = [6.0, 24.0, 42.0, 60.0]
    assert fed.map(total, rows, fed.broadcast(table, clients)).stacked.tolist() == expected
    of_program = fed.program(lambda table: fed.map(lambda row: total(row, table), rows))
    assert of_program(table).stacked.tolist() == expected  # as of `table` before, which the function closes over
    with pytest.raises(ValueError, match="all arrays that lie on a mesh as arguments, got one that it closes over: broadcast"):
        fed.map(lambda row: total(row, table), rows)


def test_errors_of_calls_and_of_functions():
    clients = fed.Placement("clients", 1)
    one = fed.place(jnp.ones(1), clients)
    for call in (lambda: fed.broadcast(1.0, clients, 1.0), lambda: fed.sum(one, one), lambda: fed.mean(one, one)):
        with pytest.raises(TypeError, match="takes . positional arguments? but . were given"):
            call()

    def broken(own):
        raise ValueError("an error of the client's function")

    for context in (contextlib.nullcontext(), jax.set_mesh(mesh_of(AUTO, clients=1, data=2))):
        with context, pytest.raises(ValueError, match="an error of the client's function"):
            fed.map(broken, fed.place(jnp.ones(1), clients))
