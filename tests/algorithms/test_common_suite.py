"""Tests that every algorithm of the registry must pass, and every aggregator with FedAvg.

The tests do not depend on the names of algorithms. The settings of an algorithm are chosen by the names of its fields, and a
test requires no more than the algorithm's `fedsim.Capabilities` promise. tests/execution/test_memory.py tests every execution
with clients that have memories.
"""

import dataclasses
import functools
import warnings

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, compressors
from fedsim.execution._federated_round import federated_round
from fedsim.experiment import Checkpoints
from fedsim.rounds._numbers import numbers_of
from fedsim.rounds._state import parts_of
from fedsim.tree import is_float

BATCHES = fedsim.Batches(size=4, epochs=2)

# The value of each field by its name, for all algorithms.
SETTINGS = {
    "model": federation.model(),
    "batches": BATCHES,
    "client_optimizer": optax.sgd(0.1, momentum=0.5),
    "num_clients": 8,
    "num_domains": federation.NUM_CLASSES,
    "domain": "y",
    "num_features": 3,
    "num_clusters": 2,
    "num_components": 2,
    "head": lambda module, name: name == "b",
    "norm": lambda name: name.endswith("/b"),
    "num_items": federation.NUM_CLASSES,
    "weak": fedsim.augmentations.noise,
    "strong": fedsim.augmentations.noise,
}
AGGREGATORS = {
    "sum": aggregators.Sum(),
    "coordinate_median": aggregators.CoordinateMedian(),
    "trimmed_mean": aggregators.TrimmedMean(trim=0.2),
    "geometric_median": aggregators.GeometricMedian(),
    "krum": aggregators.Krum(attackers=0),
    "bulyan": aggregators.Bulyan(attackers=0),
    "divide_and_conquer": aggregators.DivideAndConquer(attackers=1),
    "fools_gold": aggregators.FoolsGold(),
    "flame": aggregators.FLAME(),
    "centred_clipping": aggregators.CentredClipping(radius=0.05),
    "clipped": aggregators.Clipped(0.05),
    "compressed": aggregators.Compressed(compressors.Eden(bits=2)),
    "compressed with feedback": aggregators.Compressed(compressors.ErrorFeedback(compressors.TopK(fraction=0.3))),
}
CASES = {name: (fedsim.algorithms.get(name), {}) for name in sorted(fedsim.algorithms.ALGORITHMS)}


def all_at_once(cls):
    """Returns options that combine clipping, compression with error feedback, a stacking aggregator and a downlink."""
    folds = aggregators.MinNorm() if cls is fedsim.algorithms.FedMGDA else aggregators.TrimmedMean(trim=0.2)
    feedback = compressors.ErrorFeedback(compressors.ScaledSign())
    compressed = aggregators.Compressed(feedback, inner=folds)
    return {
        "aggregator": aggregators.Clipped(1.0, inner=compressed),
        "downlink": compressors.ErrorFeedback(compressors.Cast()),
    }


COMPOSED = {
    f"fedavg, {name}": (fedsim.algorithms.FedAvg, {"aggregator": aggregator}) for name, aggregator in AGGREGATORS.items()
}
COMPOSED |= {
    f"{name}, all at once": (cls, all_at_once(cls)) for name, (cls, _) in CASES.items() if cls.capabilities.aggregators
}


def make(name: str, **changes) -> fedsim.Algorithm:
    """Returns an algorithm with those of the settings above that it has fields for."""
    cls, own = (CASES | COMPOSED)[name]
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    settings = SETTINGS | {"execution": fedsim.Jit()} | own | changes
    return cls(**{key: value for key, value in settings.items() if key in fields})


@functools.cache
def compiled(name: str) -> fedsim.Algorithm:
    """Returns an algorithm under `Jit`, which tests share so that its programs are compiled once."""
    return make(name)


def remade(cls, algorithm):
    """Returns an algorithm of a subclass with the same settings."""
    return cls(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init})


# One call of the clients, memories of the clients, two calls.
FAST = {"fedavg", "scaffold", "mime"}


def together(names):
    """Marks the tests of one algorithm to run in one process, where its compiled programs are available."""
    slow = {name: [pytest.mark.slow] * (name not in FAST) for name in names}
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *slow[name]]) for name in names]


def named(request):
    """Provides a name with module scope: pytest runs all tests of one algorithm in a row, and then its programs are deleted."""
    yield request.param
    compiled.cache_clear()
    reference.cache_clear()


name = pytest.fixture(named, scope="module", params=together(CASES))
composed = pytest.fixture(named, scope="module", params=together(COMPOSED))


def rounds(population, count=2, seed=0):
    return [federation.cohort(population, round=r, seed=seed) for r in range(count)]


def run(algorithm, cohorts):
    state, infos = algorithm.init(jax.random.key(1)), []
    for cohort in cohorts:
        state, info = algorithm.apply(state, cohort)
        infos.append(info)
    return federation.plain(state), jax.device_get(infos)


def check_stages(name):
    """The round of a program in stages, where every client's work is a call of its own, is the round of `apply`."""
    algorithm, cohort = compiled(name), federation.cohort()
    audit, start = fedsim.audit(algorithm, cohort), algorithm.init(jax.random.key(0))
    # The server of FedMatch compares the models of single clients.
    assert (audit.leaks == ()) == (not isinstance(algorithm, fedsim.algorithms.FedMatch))
    arguments = federated_round(algorithm, start, cohort)[1]
    state, info, _ = audit.program.run(*arguments)
    expected_state, expected_info = algorithm.apply(start, cohort)
    without_memories = [parts_of(each)._replace(clients=()) for each in (state, expected_state)]
    federation.assert_trees_close(*without_memories)
    federation.assert_trees_close(info, expected_info)


@pytest.mark.first(1)
def test_rounds_run_stage_by_stage_without_leaks(name):
    check_stages(name)


@pytest.mark.slow
def test_rounds_with_any_aggregator_run_stage_by_stage_without_leaks(composed):
    check_stages(composed)


@pytest.mark.slow
def test_aggregators_and_compressors_combine_with_any_algorithm(composed):
    """The result is the same on two devices and in reverse order of clients. Bits are counted for each client with examples.

    The structure, shapes and dtypes of the state do not change.
    """
    population = federation.data()
    state, infos = run(compiled(composed), rounds(population))
    before = federation.plain(compiled(composed).with_memory(compiled(composed).init(jax.random.key(1)), population))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    took_part = population.sizes > 0
    assert ((infos[1].clients["bits_up"] > 0) == took_part).all() and ((infos[1].clients["bits_down"] > 0) == took_part).all()
    backwards = [fedsim.Cohort.of(population, population.client_ids[::-1], round=r) for r in range(2)]
    algorithm = make(composed, execution=fedsim.Pmap(devices=2, memory="stream"))
    federation.assert_trees_close(run(algorithm, backwards)[0], state, rtol=1e-4, atol=1e-5)


@functools.cache
def reference(name):
    return run(compiled(name), rounds(federation.data()))


@pytest.mark.first(1)
def test_execution_never_changes_the_answer(name):
    state, infos = run(make(name, execution=fedsim.Pmap(devices=8, memory="stream")), rounds(federation.data()))
    federation.assert_trees_close(state, reference(name)[0])
    federation.assert_trees_close(infos, reference(name)[1])


@pytest.mark.first(1)
def test_a_plan_knows_the_messages_of_a_round(name):
    plan = fedsim.plan(make(name, execution=fedsim.Debug()), federation.cohort(), measure=False)
    clients = reference(name)[1][0].clients
    took_part = clients["num_steps"] > 0
    assert plan.down_is_exact and (clients["bits_down"] == np.where(took_part, 8 * plan.bytes_down, 0)).all()
    assert plan.up_is_exact == (name != "dssgd")  # which reports the size of what it selected
    assert not plan.up_is_exact or (clients["bits_up"] == np.where(took_part, 8 * plan.bytes_up, 0)).all()
    assert plan.steps_per_round >= clients["num_steps"].sum() and plan.flops_per_round > 0


def test_debug_gives_the_same_result_as_compiled_execution(name):
    """`Debug` runs each operation separately, which is slow: this uses three of the eight clients, one without examples."""
    population = federation.data()
    few = [fedsim.Cohort(population, np.array([1, 2, 6]), r, fedsim.rng.root(0), slots=8) for r in range(2)]
    state, infos = run(make(name, execution=fedsim.Debug()), few)
    expected_state, expected_infos = run(compiled(name), few)
    federation.assert_trees_close(state, expected_state)
    federation.assert_trees_close(infos, expected_infos)


@pytest.mark.first(1)
def test_several_rounds_in_one_dispatch_of_two_devices_give_the_same_answer(name):
    algorithm = make(name, execution=fedsim.Pmap(devices=2, lanes=2))
    state, infos = algorithm.apply_rounds(algorithm.init(jax.random.key(1)), rounds(federation.data()), max_rounds=5)
    expected_state, expected_infos = reference(name)
    federation.assert_trees_close(federation.plain(state), expected_state)
    federation.assert_trees_close(infos, jax.tree.map(lambda *rows: np.stack(rows), *expected_infos))


def test_apply_does_not_mutate_its_input_state(name):
    algorithm, population = compiled(name), federation.data()
    before = algorithm.with_memory(algorithm.init(jax.random.key(1)), population)
    for cohort in rounds(population):  # from the initial state, and from a state with memories of clients
        copy = federation.plain(before)
        first, _ = algorithm.apply(before, cohort)
        federation.assert_trees_equal(federation.plain(before), copy)
        again, _ = algorithm.apply(before, cohort)
        federation.assert_trees_equal(federation.plain(first), federation.plain(again))
        before = first


def test_state_keeps_structure_shapes_and_dtypes(name):
    algorithm, population = compiled(name), federation.data()

    def signature(state):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype)), federation.plain(state))

    before = algorithm.with_memory(algorithm.init(jax.random.key(1)), population)
    after, _ = algorithm.apply(before, federation.cohort(population))
    assert signature(before) == signature(after)


def test_same_seed_repeats_bit_for_bit_and_another_differs(name):
    state, infos = run(compiled(name), rounds(federation.data()))
    federation.assert_trees_equal(state, reference(name)[0])
    federation.assert_trees_equal(infos, reference(name)[1])
    other, _ = run(compiled(name), rounds(federation.data(), seed=1))
    if compiled(name).capabilities.ordered:
        assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state, other)), strict=True))


def test_client_order_does_not_matter(name):
    population = federation.data()
    backwards = [fedsim.Cohort.of(population, population.client_ids[::-1], round=r) for r in range(2)]
    state, infos = run(compiled(name), backwards)
    expected_state, expected_infos = reference(name)
    federation.assert_trees_close(state, expected_state)
    # The info is in cohort order, for any order of training.
    in_order = jax.tree.map(lambda x: x[::-1], [info.clients for info in infos])
    federation.assert_trees_close(in_order, [info.clients for info in expected_infos])


@pytest.mark.first(1)
def test_padding_does_not_matter(name):
    """A batch size that divides each client's size and one that leaves partial batches give the same full batch."""
    population = federation.data(sizes=(6, 6))
    sizes = {size: make(name, batches=fedsim.Batches(size=size, shuffle=False), num_clients=2) for size in (6, 11)}
    whole, padded = (run(algorithm, rounds(population, 1))[0] for algorithm in sizes.values())
    federation.assert_trees_close(whole, padded)


@pytest.mark.first(2)
def test_empty_slots_do_not_matter(name):
    population = federation.data()
    few = [fedsim.Cohort(population, np.arange(3), r, fedsim.rng.root(0)) for r in range(2)]
    roomy = [dataclasses.replace(cohort, slots=8) for cohort in few]
    federation.assert_trees_close(run(compiled(name), few)[0], run(compiled(name), roomy)[0])


def test_a_client_of_weight_zero_is_as_if_absent(name):
    """Client 1 has no examples, and ``client_update`` gives the client at position 3 the weight 0."""
    population, algorithm = federation.data(), compiled(name)
    if type(algorithm).round is not fedsim.Algorithm.round:
        pytest.skip("its other calls of clients would have to be silenced, too")

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Silenced(type(algorithm)):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(weight=jnp.where(client.position == 3, 0.0, result.weight))

    silenced = remade(Silenced, algorithm)
    with_all, info = run(silenced, rounds(population, 1))
    others = np.array([0, 2, 4, 5, 6, 7])
    without, _ = run(algorithm, [fedsim.Cohort(population, others, 0, fedsim.rng.root(0), slots=8)])
    federation.assert_trees_close(with_all, without)
    assert np.flatnonzero(info[0].clients["weight"]).tolist() == others.tolist()
    assert info[0].num_aggregated == 6


def test_a_cohort_of_zero_total_weight_does_not_change_the_state(name):
    population, algorithm = federation.data(), compiled(name)
    moved, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    # The initial state would not suffice: only later does a server with momentum change on a zero gradient.
    nobody = fedsim.Cohort(population, np.array([1]), 1, fedsim.rng.root(0), slots=8)
    after, info = algorithm.apply(moved, nobody)
    federation.assert_trees_equal(federation.plain(moved), federation.plain(after))
    assert int(info.num_aggregated) == 0


@pytest.mark.first(2)
def test_a_non_finite_update_is_dropped_and_counted(name):
    """The loss of one client's examples is not finite although its data are, as if the client diverged."""
    if "model" not in {field.name for field in dataclasses.fields(CASES[name][0])}:
        pytest.skip("without a loss there is nothing to diverge")
    model = federation.model()

    def loss(examples, outputs):
        losses = model.loss(examples, outputs)
        return losses * jnp.where(examples["x"][:, 0] > 1e3, np.nan, 1.0)

    columns = {key: np.array(column) for key, column in federation.data(sizes=(5, 3, 4)).columns.items()}
    columns["x"][5:8, 0] = 2e3
    population = fedsim.FederatedData.from_arrays(columns, sizes=(5, 3, 4), client_ids=["client0", "client1", "client2"])
    algorithm = make(name, model=dataclasses.replace(model, loss=loss), num_clients=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, infos = jax.block_until_ready(algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(population)))
        jax.block_until_ready(algorithm.apply(state, federation.cohort(population, round=1)))
        jax.block_until_ready(algorithm.apply(state, federation.cohort(population, round=2)))
    (warning,) = caught  # By now round 0 has been computed, and its problem is reported once.
    assert "1 client update(s) held a NaN or an infinity" in str(warning.message)
    assert "client 'client1' in round 0" in str(warning.message)
    assert infos.clients["dropped"].tolist() == [False, True, False]
    assert int(infos.num_dropped) == 1
    assert infos.clients["weight"][1] == 0
    without, _ = run(algorithm, [fedsim.Cohort(population, np.array([0, 2]), 0, fedsim.rng.root(0), slots=3)])
    federation.assert_trees_close(federation.plain(state), without)
    with pytest.raises(FloatingPointError, match="client 'client1' in round 0"):
        fedsim.execution.report_problems(make(name, nonfinite="raise"), infos, [federation.cohort(population)])


def test_trace_count_independent_of_client_sizes(name):
    """The round is compiled once, although rounds, cohorts, their sizes and the sizes of clients change."""

    class Anew(CASES[name][0]):
        """A class that shares no programs with other classes."""

    algorithm = remade(Anew, compiled(name))
    federation.assert_trees_equal(run(algorithm, rounds(federation.data()))[0], reference(name)[0])  # same bits
    population = federation.data(sizes=(1, 9, 2, 0, 17, 4, 5, 1))  # the same number of examples as usual, in other proportions
    state, draw = algorithm.with_memory(algorithm.init(jax.random.key(1)), population), np.random.default_rng(0)
    for round, count in enumerate((3, 8, 1, 5)):
        cohort = fedsim.Cohort(population, draw.permutation(8)[:count], round, fedsim.rng.root(0), slots=8)
        state, _ = algorithm.apply(state, cohort)
    (programs,) = federation.compiled_rounds(algorithm)
    assert programs.rounds.num_executables == 1


def test_a_checkpoint_in_the_middle_changes_nothing(name, tmp_path):
    algorithm, population = compiled(name), federation.data()
    first, second = rounds(population)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(1)), first)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    restored, _ = checkpoints.newest(jax.eval_shape(lambda: state))
    state, _ = algorithm.apply(restored, second)
    federation.assert_trees_equal(federation.plain(state), reference(name)[0])


@pytest.mark.first(2)
def test_converges_on_a_quadratic_with_a_known_optimum(name):
    """Two clients of equal size have different optima, and the optimum of the mean of their squares is halfway between."""
    capabilities = compiled(name).capabilities
    if not capabilities.minimizes:
        pytest.skip("it does not promise to")
    x = np.repeat(np.array([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]], np.float32), 4, axis=0)
    population = fedsim.FederatedData.from_arrays({"x": x, "y": np.zeros(8, np.int32)}, sizes=(4, 4))
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [3], init=jnp.zeros)[None, :]),
        features={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        loss=lambda examples, outputs: jnp.sum(jnp.square(examples["x"] - outputs), axis=1) / 2,
        metrics={},
    )
    settings = {"model": model, "batches": fedsim.Batches(size=4), "client_optimizer": optax.sgd(0.1), "num_clients": 2}
    algorithm = make(name, **(settings | dict(capabilities.quadratic)))
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), rounds(population, 400))
    np.testing.assert_allclose(np.asarray(jax.tree.leaves(state.params)[0]), x.mean(0), atol=0.02)


def check_derivatives(cls_name, **changes):
    """Compares derivatives after two rounds with central differences, or expects an error that names the algorithm.

    The derivatives are by the rates of the optimizers, by every number in the algorithm's fields, and by the initial parameters
    (or state, if there are no parameters) along a random direction.
    """
    algorithm = make(cls_name, **changes)
    if algorithm.not_differentiable:
        with pytest.raises(ValueError, match=f"{type(algorithm).__name__} itself, which {algorithm.not_differentiable}"):
            fedsim.differentiable(algorithm)
        return
    names = {field.name for field in dataclasses.fields(algorithm) if field.init}
    # The result is far from linear in b2 at its default, 0.99.
    numbers = {name: 0.5 if name == "b2" else value for name, value in numbers_of(algorithm).items() if value}
    numbers |= {name: rate for name, rate in {"client_optimizer": 0.2, "server_optimizer": 0.7}.items() if name in names}
    draw, state = np.random.default_rng(0), algorithm.init(jax.random.key(1))
    server = parts_of(state).server
    start = getattr(server, "params", server)
    direction = jax.tree.map(lambda x: jnp.asarray(0.2 * draw.normal(size=x.shape) * is_float(x), x.dtype), start)
    cohorts = rounds(federation.data())

    def objective(at):
        """Takes factors of the numbers, and how far the initial parameters move along the direction."""
        values = {name: factor * numbers[name] for name, factor in at.items() if name in numbers}
        momentum = {"client_optimizer": 0.5, "server_optimizer": None}
        made = {name: optax.sgd(x, momentum[name]) if name in momentum else x for name, x in values.items()}
        moved = jax.tree.map(lambda x, d: x + at[""] * d if is_float(x) else x, start, direction)
        moved = server._replace(params=moved) if hasattr(server, "params") else moved
        moved = moved if state is server else state._replace(server=moved)
        after, _ = fedsim.differentiable(make(cls_name, **{**changes, **made})).apply_rounds(moved, cohorts)
        return sum(jnp.mean(jnp.sin(2 * x + 1)) for x in jax.tree.leaves(after) if is_float(x))

    at = dict.fromkeys(numbers, 1.0) | {"": 0.0}
    value_and_slopes = jax.value_and_grad(objective)
    if cls_name != "feddyn":  # XLA for CPUs (jaxlib 0.10.2 and 0.12.0) cannot compile all of this as one program.
        value_and_slopes = jax.jit(value_and_slopes)
    _, slopes = value_and_slopes(at)
    for name in at:
        above, below = (value_and_slopes(at | {name: at[name] + step})[0] for step in (0.01, -0.01))
        assert float(slopes[name]) == pytest.approx(float(above - below) / 0.02, rel=0.02, abs=1e-3), name
    assert max(abs(float(slope)) for slope in slopes.values()) > 0.01


@pytest.mark.first(1)
def test_derivatives_agree_with_finite_differences(name):
    check_derivatives(name)


def test_registry_and_docs_list_every_algorithm_module(name):
    cls, _ = CASES[name]
    assert getattr(fedsim.algorithms, cls.__name__) is cls
    assert cls.__doc__
    cited = __import__(cls.__module__, fromlist=["_"]).__doc__
    assert "https://arxiv.org" in cited or "https://doi.org" in cited


def deep_model(first=None):
    """Returns a model of two layers; with the parameters of the first one, these are constants of the network."""

    def network(examples):
        layer = hk.Linear(5, name="first") if first is None else lambda x: x @ first["w"] + first["b"][None]
        return hk.Linear(federation.NUM_CLASSES, name="second")(jax.nn.tanh(layer(examples["x"])))

    return fedsim.Model.from_haiku(hk.transform(network), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def trains_frozen_models(cls):
    """Whether the server has one model of all parameters that are not frozen, which no field of the algorithm divides."""
    fields = {field.name for field in dataclasses.fields(cls)}
    divided = fields & {"head", "norm", "widths", "num_components"} or issubclass(cls, fedsim.algorithms.FedProto)
    return "model" in fields and not divided


@pytest.mark.first(1)
@pytest.mark.parametrize("name", together([name for name, (cls, _) in CASES.items() if trains_frozen_models(cls)]))
def test_frozen_parameters_are_constants_of_the_model(name):
    """Training with a frozen layer is training a network in which this layer is a constant, also in the bits of messages."""
    whole, population = deep_model(), federation.data()
    drawn = whole.init(jax.random.key(1))
    constant = dataclasses.replace(deep_model(drawn["first"]), init=lambda key: {"second": whole.init(key)["second"]})
    results = []
    for model in (whole.with_parts(frozen="first/*"), constant):
        algorithm = make(name, model=model)
        state = algorithm.init(jax.random.key(1))
        for cohort in rounds(population):
            state, info = algorithm.apply(state, cohort)
        results.append((state, info))
    (frozen, info), (expected, expected_info) = results
    federation.assert_trees_close(frozen.params["second"], expected.params["second"])
    federation.assert_trees_close(info.clients, expected_info.clients)
    federation.assert_trees_equal(jax.device_get(frozen.params["first"]), jax.device_get(drawn["first"]))
    assert np.abs(np.asarray(expected.params["second"]["w"]) - np.asarray(drawn["second"]["w"])).max() > 1e-4


def model_with(part):
    """Returns a model with batch normalization whose clients change this part of `fedsim.model.ModelParts`."""

    def network(examples, is_training):
        hidden = fedsim.models.BatchNorm(name="norm")(hk.Linear(5, name="body")(examples["x"]), is_training)
        return hk.Linear(federation.NUM_CLASSES, name="head")(jax.nn.tanh(hidden))

    model = fedsim.Model.from_haiku(
        hk.transform_with_state(network),
        features=federation.FEATURES,
        num_classes=federation.NUM_CLASSES,
        statistics={"statistics": "average", "own_statistics": "client", "kept": "frozen"}[part],
        train_kwargs={"is_training": True},
        eval_kwargs={"is_training": False},
    )
    return model.with_parts(kept="head/*") if part == "kept" else model


def takes(name, part):
    capabilities = CASES[name][0].capabilities
    return capabilities.model_parts and part not in capabilities.refused_parts


TRAINING = [name for name, (cls, _) in CASES.items() if "model" in {field.name for field in dataclasses.fields(cls)}]
PARTS = [(name, part) for name in TRAINING for part in ("statistics", "own_statistics", "kept")]
# A personal model with parts of its own, statistics of each cluster, a pass without local steps.
FAST_PARTS = [("ditto", "kept"), ("hypcluster", "statistics"), ("fedsgd", "own_statistics")]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "part"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST_PARTS)) for case in PARTS if takes(*case)],
)
def test_clients_change_parts_of_a_model(name, part):
    """The result is the same on two devices and in Python, and what clients keep differs and is not the server's."""
    population, results = federation.data(sizes=(5, 3, 4)), []
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Debug()):
        algorithm = make(name, model=model_with(part), execution=execution)
        start = algorithm.init(jax.random.key(1))
        state, infos = start, []
        for cohort in rounds(population):
            state, info = algorithm.apply(state, cohort)
            infos.append(info)
        results.append((federation.plain(state), jax.device_get(infos)))
    # Initial parameters that differ by 1e-7 change pFedMe's result by 3e-4 here: batches of two examples have small variances.
    atol = 1e-4 if name == "pfedme" else 1e-5
    for other in results[1:]:
        federation.assert_trees_close(other, results[0], rtol=1e-4, atol=atol)
    before, after = jax.device_get((start.params, state.params))
    assert np.abs(after["body"]["w"] - before["body"]["w"]).max() > 1e-4
    moved = np.abs(after["norm"]["mean"] - before["norm"]["mean"]).max()
    if part == "statistics":
        assert moved > 1e-4
        return
    own = results[0][0].clients[0][0][1]
    of_clients = own.kept["head"]["w"] if part == "kept" else own.own_statistics["norm"]["mean"]
    assert moved == 0 and np.ptp(of_clients, axis=0).max() > 1e-4
    if part == "kept":
        federation.assert_trees_equal(after["head"], before["head"])


@pytest.mark.first(6)
@pytest.mark.parametrize(("name", "part"), [case for case in PARTS if not takes(*case)])
def test_other_parts_are_refused_with_a_reason(name, part):
    model, cohort = model_with(part), federation.cohort(federation.data(sizes=(5, 3, 4)))
    words = fedsim.model.PARTS_IN_WORDS

    def run():
        algorithm = make(name, model=model)
        algorithm.apply(algorithm.init(jax.random.key(0)), cohort)

    # The running statistics of the model with kept parameters are frozen, which may be refused before.
    with pytest.raises(ValueError, match=rf"takes no model with ({words[part]}|{words['frozen']}): .*; use"):
        run()
