"""The price of admission: every algorithm of the registry keeps the same promises."""

import dataclasses
import warnings

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim

EXECUTIONS = {
    "jit": fedsim.Jit(),
    "jit, 3 lanes": fedsim.Jit(lanes=3),
    "jit, streamed": fedsim.Jit(memory="stream"),
    "pmap, 1 device": fedsim.Pmap(devices=1),
    "pmap, 2 devices": fedsim.Pmap(devices=2),
    "pmap, 8 devices": fedsim.Pmap(devices=8),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
    "auto": fedsim.Auto(),
    "debug": fedsim.Debug(),
}


def make(name: str, **changes) -> fedsim.Algorithm:
    """An algorithm of the registry with settings that suit it: those it has fields for."""
    cls = fedsim.algorithms.get(name)
    settings = {
        "model": federation.model(),
        "batches": fedsim.Batches(size=4, epochs=2),
        "client_optimizer": optax.sgd(0.1, momentum=0.5),
    } | changes
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    return cls(**{key: value for key, value in settings.items() if key in fields})


@pytest.fixture(params=sorted(fedsim.algorithms.ALGORITHMS))
def name(request):
    return request.param


def run(algorithm, rounds=2, cohorts=None, seed=0):
    state = algorithm.init(jax.random.key(1))
    population = federation.data()
    infos = []
    for r in range(rounds):
        cohort = cohorts[r] if cohorts else federation.cohort(population, round=r, seed=seed)
        state, info = algorithm.apply(state, cohort)
        infos.append(info)
    return jax.device_get(state), jax.device_get(infos)


@pytest.fixture(scope="module")
def reference():
    """Each algorithm's two rounds under `Jit`, computed once."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = run(make(name, execution=fedsim.Jit()))
        return known[name]

    return get


@pytest.mark.parametrize("how", [how for how in EXECUTIONS if how != "jit"])
def test_execution_never_changes_the_answer(name, how, reference):
    state, infos = run(make(name, execution=EXECUTIONS[how]))
    expected_state, expected_infos = reference(name)
    federation.assert_trees_close(state, expected_state)
    federation.assert_trees_close(infos, expected_infos)


def test_several_rounds_in_one_dispatch_give_the_same_answer(name, reference):
    population = federation.data()
    algorithm = make(name, execution=fedsim.Pmap(devices=2))
    state, infos = algorithm.apply_rounds(
        algorithm.init(jax.random.key(1)), [federation.cohort(population, round=r) for r in range(2)], max_rounds=5
    )
    expected_state, expected_infos = reference(name)
    federation.assert_trees_close(state, expected_state)
    federation.assert_trees_close(infos, jax.tree.map(lambda *rows: np.stack(rows), *expected_infos))


def test_apply_does_not_mutate_its_input_state(name):
    algorithm = make(name)
    before = algorithm.init(jax.random.key(1))
    copy = jax.device_get(before)
    first, _ = algorithm.apply(before, federation.cohort())
    federation.assert_trees_equal(before, copy)
    again, _ = algorithm.apply(before, federation.cohort())
    federation.assert_trees_equal(first, again)


def test_state_keeps_structure_shapes_and_dtypes(name):
    algorithm = make(name)
    before = algorithm.init(jax.random.key(1))
    after, _ = algorithm.apply(before, federation.cohort())

    def signature(state):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)

    assert signature(before) == signature(after)


def test_same_seed_repeats_bit_for_bit_and_another_differs(name, reference):
    state, infos = run(make(name, execution=fedsim.Jit()))
    federation.assert_trees_equal(state, reference(name)[0])
    federation.assert_trees_equal(infos, reference(name)[1])
    other, _ = run(make(name, execution=fedsim.Jit(), batches=fedsim.Batches(size=4)), seed=1)
    same, _ = run(make(name, execution=fedsim.Jit(), batches=fedsim.Batches(size=4)), seed=0)
    if make(name).batches.shuffle and name != "fedsgd":
        assert not np.array_equal(jax.tree.leaves(other.params)[0], jax.tree.leaves(same.params)[0])


def test_client_order_does_not_matter(name, reference):
    population = federation.data()
    backwards = population.client_ids[::-1]
    cohorts = [fedsim.Cohort.of(population, backwards, round=r) for r in range(2)]
    state, infos = run(make(name, execution=fedsim.Jit()), cohorts=cohorts)
    expected_state, expected_infos = reference(name)
    federation.assert_trees_close(state, expected_state)
    # The info is in cohort order, whichever order clients were trained in.
    np.testing.assert_array_equal(infos[0].clients["num_examples"], expected_infos[0].clients["num_examples"][::-1])
    np.testing.assert_allclose(infos[0].clients["loss"], expected_infos[0].clients["loss"][::-1], rtol=1e-5)


def test_padding_does_not_matter(name):
    """A batch size that divides every client's size, and one that leaves partial batches, see the same full batch."""
    population = federation.data(sizes=(6, 6))
    whole = make(name, batches=fedsim.Batches(size=6, shuffle=False))
    padded = make(name, batches=fedsim.Batches(size=11, shuffle=False))
    cohorts = [federation.cohort(population)]
    federation.assert_trees_close(run(whole, 1, cohorts)[0], run(padded, 1, cohorts)[0])


def test_an_empty_client_contributes_nothing(name):
    """Also under uniform weighting, where its weight would otherwise be 1."""
    population = federation.data(sizes=(5, 0, 4))
    algorithm = make(name, weighting="uniform")
    with_empty, info = run(algorithm, 1, [fedsim.Cohort.of(population, ["client0", "client1", "client2"])])
    without, _ = run(algorithm, 1, [fedsim.Cohort.of(population, ["client0", "client2"])])
    federation.assert_trees_close(with_empty, without)
    assert info[0].clients["weight"].tolist() == [1, 0, 1]
    assert info[0].num_aggregated == 2


@pytest.mark.parametrize("how", ["pmap, 2 devices", "debug"])
def test_a_cohort_of_zero_total_weight_leaves_the_state_as_it_was(name, how):
    population = federation.data(sizes=(5, 0, 0))
    algorithm = make(name, execution=EXECUTIONS[how])
    moved, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    # Not from the initial state: a server with momentum would move on a zero gradient.
    after, info = algorithm.apply(moved, fedsim.Cohort.of(population, ["client1", "client2"], round=1))
    federation.assert_trees_equal(moved, after)
    assert int(info.num_aggregated) == 0


@pytest.mark.parametrize(("how", "poison"), [("pmap, 2 devices", np.nan), ("debug", np.inf)])
def test_a_non_finite_update_is_dropped_and_counted(name, how, poison):
    """The loss of one client's examples is made non-finite: finite data, a diverging client."""
    model = federation.model()

    def loss(examples, outputs):
        losses = model.loss(examples, outputs)
        return losses * jnp.where(examples["x"][:, 0] > 1e3, poison, 1.0)

    columns = {key: np.array(column) for key, column in federation.data(sizes=(5, 3, 4)).columns.items()}
    columns["x"][5:8, 0] = 2e3
    population = fedsim.FederatedData.from_arrays(columns, sizes=(5, 3, 4), client_ids=["client0", "client1", "client2"])
    algorithm = make(name, model=dataclasses.replace(model, loss=loss), execution=EXECUTIONS[how])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, infos = run(algorithm, 1, [federation.cohort(population)])
        for round in (1, 2):  # By now round 0 has been computed, and it is said once.
            jax.block_until_ready(algorithm.apply(state, federation.cohort(population, round=round)))
    (warning,) = caught
    assert "1 client update(s) held a NaN or an infinity" in str(warning.message)
    assert "client 'client1' in round 0" in str(warning.message)
    assert infos[0].clients["dropped"].tolist() == [False, True, False]
    assert infos[0].num_dropped == 1
    assert infos[0].clients["weight"][1] == 0
    without, _ = run(algorithm, 1, [fedsim.Cohort.of(population, ["client0", "client2"])])
    federation.assert_trees_close(state, without)
    strict = dataclasses.replace(algorithm, nonfinite="raise")
    with pytest.raises(FloatingPointError, match="client 'client1' in round 0"):
        strict.apply(strict.init(jax.random.key(1)), federation.cohort(population))


def test_trace_count_independent_of_client_sizes(name):
    """Rounds, cohorts and sizes change; the step is traced once (plus never again)."""
    model = federation.model()
    traces = []

    def counting(examples, outputs):
        traces.append(None)
        return model.loss(examples, outputs)

    algorithm = make(name, model=dataclasses.replace(model, loss=counting), execution=fedsim.Pmap(devices=2))
    population = federation.data(sizes=(1, 30, 2, 0, 17, 64, 5, 9))
    sampler = fedsim.UniformSampler(population, clients=3, seed=0)
    state = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(state, sampler.cohort(0))
    once = len(traces)
    for cohort in sampler.rounds(8, start=1):
        state, _ = algorithm.apply(state, cohort)
    assert len(traces) == once
    assert len(algorithm._compiled) == 1
    assert next(iter(algorithm._compiled.values())).rounds._cache_size() == 1


def test_converges_on_a_quadratic_with_a_known_optimum(name):
    """Clients pull towards different points; the weighted mean of squares has its optimum at the weighted mean point."""
    sizes = (2, 6)
    x = np.repeat(np.array([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]], np.float32), sizes, axis=0)
    population = fedsim.FederatedData.from_arrays({"x": x}, sizes=sizes)
    optimum = x.mean(0)
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [3], init=jnp.zeros)[None, :]),
        features={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        loss=lambda examples, outputs: jnp.sum(jnp.square(examples["x"] - outputs), axis=1) / 2,
        metrics={},
    )
    slow = {"fedadam": 0.03, "fedyogi": 0.03, "fedadagrad": 0.3, "fedavgm": 1.0}
    changes = {"server_learning_rate": slow[name]} if name in slow else {}
    algorithm = make(name, model=model, batches=fedsim.Batches(size=8), client_optimizer=optax.sgd(0.1), **changes)
    cohorts = [federation.cohort(population, round=r) for r in range(400)]
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)
    np.testing.assert_allclose(np.asarray(jax.tree.leaves(state.params)[0]), optimum, atol=0.02)


def test_registry_and_docs_list_every_algorithm_module(name):
    cls = fedsim.algorithms.get(name)
    assert getattr(fedsim.algorithms, cls.__name__) is cls
    assert cls.__doc__
    assert "https://arxiv.org" in __import__(cls.__module__, fromlist=["_"]).__doc__
