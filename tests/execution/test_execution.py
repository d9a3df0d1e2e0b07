"""Executions: plans, placement, tracing, errors."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, rng
from fedsim.execution import StageError, _placement
from fedsim.execution._layout import Layout, num_steps, plan_round, widths_for, windows
from fedsim.rounds import RoundPlan


def fedavg(**changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    return fedsim.algorithms.FedAvg(**(settings | changes))


def test_executor_choice_at_apply_time_is_honoured():
    """After ``execution`` is replaced on an algorithm that has run, the next round uses the new one."""
    algorithm = fedavg(execution=fedsim.Jit())
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert len(jax.tree.leaves(state)[0].devices()) == 1
    spread = dataclasses.replace(algorithm, execution=fedsim.Pmap(devices=4))
    state, _ = spread.apply(state, federation.cohort(round=1))
    assert len(jax.tree.leaves(state)[0].devices()) == 4
    state, _ = algorithm.apply(state, federation.cohort(round=2))
    assert len(jax.tree.leaves(state)[0].devices()) == 1

    steps = []

    class Watched(fedsim.algorithms.FedAvg):
        def client_loss(self, shared, params, batch):
            steps.append(isinstance(batch.step, jax.core.Tracer))
            return super().client_loss(shared, params, batch)

    watched = Watched(**{f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
    watched = dataclasses.replace(watched, execution=fedsim.Debug())
    watched.apply(watched.init(jax.random.key(0)), federation.cohort())
    assert steps
    assert not any(steps)


def test_debug_error_names_stage_client_and_shapes():
    class Broken(fedsim.algorithms.FedAvg):
        def client_loss(self, shared, params, batch):
            if int(batch.step) == 1:
                raise ArithmeticError("no luck")
            return super().client_loss(shared, params, batch)

    algorithm = Broken(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Debug()
    )
    with pytest.raises(StageError) as caught:
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    message = str(caught.value)
    assert "ArithmeticError in step 1 of client_update of client 'client0': no luck" in message
    assert "float32[4, 3]" in message
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_streaming_compiles_few_programs_for_any_sizes():
    algorithm = fedavg(execution=fedsim.Pmap(devices=2, memory="stream"))
    population = federation.data(sizes=[1, 100, 2, 0, 17, 64, 5, 9, 33, 1, 1, 250])
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(population, clients=3, seed=0).rounds(12):
        state, _ = algorithm.apply(state, cohort)
    (compiled,) = federation.compiled_rounds(algorithm)
    assert compiled.rounds.num_executables == 1


def test_memory_mapped_columns_give_the_same_result(tmp_path):
    population = federation.data()
    columns = {}
    for name, column in population.columns.items():
        np.save(tmp_path / f"{name}.npy", column)
        columns[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    mapped = fedsim.FederatedData(columns, population.offsets, population.client_ids)
    states = []
    for data, memory in ((population, "resident"), (mapped, "stream")):
        algorithm = fedavg(execution=fedsim.Jit(memory=memory))
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))[0])
    federation.assert_trees_close(*states)


def test_any_client_of_any_round_can_be_run_again_alone():
    """The client has the same loss alone as in a larger cohort."""
    population = federation.data(sizes=(7, 3, 12))
    algorithm = fedavg(execution=fedsim.Jit())
    state = algorithm.init(jax.random.key(0))
    _, info = algorithm.apply(state, fedsim.Cohort.of(population, ["client0", "client1", "client2"], round=5, seed=3))
    _, alone = algorithm.apply(state, fedsim.Cohort.of(population, ["client2"], round=5, seed=3))
    np.testing.assert_array_equal(np.asarray(info.clients["loss"])[2], np.asarray(alone.clients["loss"])[0])


def test_shuffle_differs_between_rounds_and_repeats_between_runs():
    population = federation.data(sizes=(40,))

    def order(round):
        (_, dataset, key), *_ = fedsim.Cohort.of(population, ["client0"], round=round)
        batches = dataset.batches(fedsim.Batches(size=8), key)
        return np.concatenate([batch.examples["x"][batch.mask, 0] for batch in batches])

    np.testing.assert_array_equal(order(0), order(0))
    assert not np.array_equal(order(0), order(1))
    np.testing.assert_array_equal(np.sort(order(0)), np.sort(order(1)))


def test_two_experiment_seeds_give_different_client_keys():
    population = federation.data()
    words = [np.asarray(jax.random.key_data(federation.cohort(population, seed=seed).keys())) for seed in (0, 1)]
    assert not np.any(np.all(words[0] == words[1], axis=1))
    expected = jax.random.fold_in(jax.random.fold_in(rng.stream(rng.root(0), "clients"), 0), 2)
    np.testing.assert_array_equal(words[0][2], jax.random.key_data(expected))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize(("lanes", "overhead"), [(1, 0.0), (4, 4.0), (16, 0.5)])
def test_plan_gives_every_client_to_one_group_and_balances(devices, lanes, overhead):
    population = federation.data(sizes=list(range(1, 41)))
    layout = Layout(50, devices, widths_for(lanes), overhead)
    plan = plan_round(federation.cohort(population), layout, fedsim.Batches(size=3))
    queues = [queue[:length].tolist() for queue, length in zip(plan.queue, plan.length, strict=True)]
    assert sorted(itertools.chain(*queues)) == list(range(40))
    for device, queue in enumerate(queues):
        groups = []  # (first, last + 1) of each group
        for number, width in enumerate(layout.widths):
            first = plan.starts[device, number, : plan.groups[device, number]]
            groups += [(int(at), min(int(at) + width, len(queue))) for at in first]
        assert list(itertools.chain(*(range(*group) for group in sorted(groups)))) == list(range(len(queue)))
    steps = -(-plan.size // 3)
    loads = [(steps[queue] + 0.5).sum() for queue in queues]
    # Graham's bound for longest-first list scheduling.
    best = max(steps.max() + 0.5, sum(loads) / len(loads))
    assert max(loads) <= 4 / 3 * best + 0.5
    for field, rows in zip(plan, RoundPlan.stacked([plan], 2), strict=True):
        np.testing.assert_array_equal(rows, [field, np.zeros_like(field)])


@pytest.mark.parametrize(("widths", "overhead"), [((4, 1), 1.0), ((8, 2, 1), 3.0), ((3, 1), 20.0)])
def test_groups_take_the_least_time_of_all_divisions(widths, overhead):
    """Compares with all divisions of the queue, where a step takes overhead + width."""
    sizes = [300, 90, 70, 68, 60, 31, 30, 29, 8, 7, 3, 1]
    layout, batches = Layout(20, 1, widths, overhead), fedsim.Batches(size=5)
    plan = plan_round(federation.cohort(federation.data_of_zeros(sizes)), layout, batches)
    work = 1 + 2 * -(-np.asarray(sizes) // 5)[plan.queue[0, : len(sizes)]]

    def least(first):
        if first >= len(work):
            return 0.0
        return min(work[first] * (overhead + width) + least(first + width) for width in widths)

    time = sum(
        work[first] * (overhead + width)
        for number, width in enumerate(widths)
        for first in plan.starts[0, number, : plan.groups[0, number]]
    )
    assert time == least(0)
    alone = plan.starts[0, -1, : plan.groups[0, -1]]
    assert (0 in alone) == (overhead < 10)  # The first client has three times as many steps as any other.


@pytest.mark.slow
def test_a_custom_aggregator_runs_on_lanes_and_devices():
    """A monoid that is not a sum (the largest update) is combined over lanes and devices by its own merge."""

    class Largest(aggregators.Aggregator):
        def zero(self, update, slots):
            return jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), update)

        def accumulate(self, accumulator, update, weight, slot):
            return jax.tree.map(lambda a, u: jnp.where(weight > 0, jnp.maximum(a, u), a), accumulator, update)

        def merge(self, a, b):
            return jax.tree.map(jnp.maximum, a, b)

        def finish(self, accumulator):
            return accumulator

    states = []
    for how in (fedsim.Debug(), fedsim.Jit(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=3), fedsim.Pmap(devices=2, lanes=2)):
        algorithm = fedavg(aggregator=Largest(), execution=how)
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0])
    for state in states[1:]:
        federation.assert_trees_close(state, states[0])


def test_one_all_reduce_per_round():
    """Updates, weights and all clients' infos are summed in a single collective."""
    algorithm = fedavg(execution=fedsim.Pmap(devices=2))
    text = algorithm.execution.lower(algorithm, federation.cohort()).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1


def test_aggregation_with_zero_total_weight():
    mean = aggregators.Mean()
    fold = mean.accumulate(mean.zero({"w": jnp.zeros(2)}, 1), {"w": jnp.ones(2)}, jnp.float32(0), 0)
    assert mean.finish(fold)["w"].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(jax.jit(mean.finish)(fold)["w"], [0.0, 0.0])


@pytest.mark.slow
def test_dropout_has_a_key_per_step_and_is_the_same_in_every_execution():
    def forward(examples, is_train):
        hidden = hk.Linear(8)(examples["x"])
        if is_train:
            hidden = jnp.where(jax.random.bernoulli(hk.next_rng_key(), 0.5, hidden.shape), 2 * hidden, 0)
        return hk.Linear(federation.NUM_CLASSES)(hidden)

    model = fedsim.Model.from_haiku(
        hk.transform(forward),
        features=federation.FEATURES,
        train_kwargs={"is_train": True},
        eval_kwargs={"is_train": False},
    )
    states = []
    for how in (fedsim.Debug(), fedsim.Jit(), fedsim.Pmap(devices=2, lanes=2)):
        algorithm = fedavg(model=model, execution=how)
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0])
    federation.assert_trees_close(states[1], states[0])
    federation.assert_trees_close(states[2], states[0])
    other, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(seed=1))
    assert not np.allclose(jax.tree.leaves(other.params)[1], jax.tree.leaves(states[2].params)[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedsim.Jit(lanes=0), "Expected lanes >= 1, or None, got lanes=0"),
        (lambda: fedsim.Jit(memory="disk"), "Expected memory to be 'auto', 'resident' or 'stream', got memory='disk'"),
        (lambda: fedsim.Pmap(devices=0), "Expected devices >= 1, or None, got devices=0"),
        (lambda: fedavg(nonfinite="ignore"), "Expected nonfinite to be 'drop' or 'raise'"),
        (
            lambda: fedavg(execution=fedsim.Pmap(devices=99)).apply(None, federation.cohort()),
            "Expected at most 8 devices, .* got devices=99",
        ),
        (lambda: fedavg().apply_rounds(None, []), "Expected at least one cohort"),
        (
            lambda: fedavg().apply_rounds(None, [federation.cohort(), federation.cohort()]),
            "Expected cohorts with the same population",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"y": np.zeros(2, np.int32)}, "reads feature 'x', which the data does not have"),
        (
            {"x": np.zeros([2, 5], np.float32), "y": np.zeros(2, np.int32)},
            r"has shape \[5\] per example, and the model expects \[3\]",
        ),
        ({"x": np.zeros([2, 3], np.int32), "y": np.zeros(2, np.int32)}, "has dtype int32, and the model expects float32"),
        (
            {"x": np.zeros([2, 3], np.float32), "y": np.array([0, 4])},
            "Client 'b' has label y=4, and the model has classes 0 to 3",
        ),
        ({"x": np.zeros([2, 3], np.float32), "y": np.array([-1, 0])}, "Client 'a' has label y=-1"),
        ({"x": np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), "y": np.zeros(2, np.int32)}, "'x' of client 'b' holds a NaN"),
    ],
)
def test_bad_data_is_rejected_before_anything_is_compiled(columns, message):
    population = fedsim.FederatedData.from_arrays(columns, sizes=[1, 1], client_ids=["a", "b"])
    algorithm = fedavg()
    with pytest.raises(ValueError, match=message):
        algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(population, ["a", "b"]))
    assert "traces" not in vars(algorithm).get("_execution", {})
    with pytest.raises(ValueError, match=message):
        fedsim.evaluate(algorithm.model, algorithm.init(jax.random.key(0)).params, population)


def test_an_apply_in_plain_python_can_be_run():
    """An algorithm that overrides ``apply`` with a loop over clients in Python."""

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Count(fedsim.Algorithm):
        def init(self, key):
            return jnp.zeros((), jnp.int32)

        def apply(self, state, cohort):
            sizes = [len(dataset) for _, dataset, _ in cohort]
            return state + sum(sizes), {"clients": jnp.int32(len(sizes))}

    count = Count(batches=fedsim.Batches(size=1))
    cohorts = [federation.cohort(), federation.cohort(round=1)]
    state, infos = count.apply_rounds(count.init(jax.random.key(0)), cohorts)
    assert int(state) == 2 * 39
    assert infos["clients"].tolist() == [8, 8]


@pytest.mark.filterwarnings("ignore:1 client update")
def test_a_finite_update_too_large_to_be_summed_is_dropped():
    """With 1e37 and a weight of 5 the sum would overflow, and the server's parameters would stay infinite."""

    class Diverging(fedsim.algorithms.FedAvg):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            factor = jnp.where(client.position == 0, jnp.float32(1e37), jnp.float32(1))
            return result._replace(update=jax.tree.map(lambda x: x * factor, result.update))

    population = federation.data(sizes=(200, 5, 4))
    algorithm = Diverging(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    cohort = federation.cohort(population)
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    assert info.clients["dropped"].tolist() == [True, False, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))


@pytest.mark.first(1)
@pytest.mark.parametrize("how", [fedsim.Jit(lanes=2), fedsim.Debug(), fedsim.Jit()])
@pytest.mark.filterwarnings("ignore:1 of 3 clients.* can never take a step")
def test_a_client_that_takes_no_step_does_not_count(how):
    """It is neither averaged as an update of zero nor, if it divides by its size, counted as dropped."""

    class DividesBySteps(fedsim.algorithms.FedAvg):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            steps = client.num_steps.astype(jnp.float32)
            return result._replace(update=jax.tree.map(lambda x: x / steps, result.update))

    population = federation.data(sizes=(8, 3, 0))
    batches = fedsim.Batches(size=4, drop_remainder=True)
    algorithm = DividesBySteps(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=batches, execution=how)
    state = algorithm.init(jax.random.key(0))
    together, info = algorithm.apply(state, federation.cohort(population))
    alone, _ = algorithm.apply(state, fedsim.Cohort.of(population, ["client0"]))
    federation.assert_trees_close(together, alone)
    assert info.clients["weight"].tolist() == [8, 0, 0]
    assert int(info.num_dropped) == 0


def test_mean_of_integers_and_half_precision_is_computed_in_float32():
    mean = aggregators.Mean()
    updates = [({"n": jnp.int32(n), "h": jnp.float16(200.0)}, jnp.float32(w)) for n, w in ((1, 400), (2, 420), (4, 1))]
    fold = mean.zero(updates[0][0], len(updates))
    for update, weight in updates:
        fold = mean.accumulate(fold, update, weight, 0)
    finished = mean.finish(fold)
    np.testing.assert_allclose(finished["n"], (400 + 840 + 4) / 821, rtol=1e-6)
    np.testing.assert_allclose(finished["h"], 200.0, rtol=1e-6)


@pytest.mark.slow
def test_optimizers_that_need_the_loss_receive_it():
    """A Polyak step needs the loss's value: with the optimum at 0 it is loss / |gradient|^2 along the gradient."""
    algorithm = fedavg(
        client_optimizer=optax.polyak_sgd(max_learning_rate=10.0), batches=fedsim.Batches(size=16, shuffle=False)
    )
    population = federation.data(sizes=(10,))
    state = algorithm.init(jax.random.key(0))
    after, _ = algorithm.apply(state, federation.cohort(population))
    batch = next(population.client(0).batches(algorithm.batches, jax.random.key(0)))
    loss, gradient = jax.value_and_grad(algorithm.model.train_loss)(state.params, jax.tree.map(jnp.asarray, batch))
    rate = loss / sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))
    expected = jax.tree.map(lambda p, g: p - rate * g, state.params, gradient)
    federation.assert_trees_close(after.params, expected, rtol=1e-4)


def test_algorithms_with_a_model_check_their_data():
    class OwnParts(fedsim.Algorithm):
        model = federation.model()

    columns = {"x": np.zeros([1, 3], np.float32), "y": np.array([9], np.int32)}
    population = fedsim.FederatedData.from_arrays(columns, sizes=[1])
    with pytest.raises(ValueError, match="has label y=9"):
        OwnParts(batches=fedsim.Batches(size=1)).apply(None, federation.cohort(population))


def test_where_data_is_stored_is_decided_once(monkeypatch):
    """The free memory changes during a run, but the program must not."""
    population, mesh = federation.data(), fedsim.Jit().mesh()
    assert _placement.is_resident(population, mesh, "auto")
    monkeypatch.setattr(_placement, "_RESIDENT_SHARE", 0.0)
    assert _placement.is_resident(population, mesh, "auto")
    assert not _placement.is_resident(federation.data(), mesh, "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [fedsim.Pmap(devices=2, lanes=2), fedsim.Jit(memory="stream"), fedsim.Jit(), fedsim.Pmap(devices=2)]
)
def test_a_round_in_several_programs_is_the_same_round(how, monkeypatch):
    """Long rounds are divided between clients; each program passes the accumulator to the next."""
    algorithm = fedavg(execution=how, server_optimizer=optax.sgd(1.0, momentum=0.9))
    whole, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    (compiled,) = federation.compiled_rounds(algorithm)
    parts, infos = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert (
        1 <= federation.num_executables_of_parts(compiled) <= 2
    )  # the first carry may have another sharding than the later ones
    federation.assert_trees_close(parts, whole)
    federation.assert_trees_close(infos, info)
    stacked, infos = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), [federation.cohort()], max_rounds=3)
    federation.assert_trees_close(stacked, whole)
    federation.assert_trees_close(infos, jax.tree.map(lambda x: x[None], info))


@pytest.mark.parametrize(("devices", "lanes"), [(1, 1), (2, 3)])
def test_windows_cover_every_group_once_in_order(devices, lanes, monkeypatch):
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 5)
    population, batches = federation.data(sizes=[3, 0, 40, 1, 9, 9, 2, 2]), fedsim.Batches(size=2)
    layout = Layout(8, devices, widths_for(lanes), 1.0)
    plan = plan_round(federation.cohort(population), layout, batches)
    parts = windows(plan, layout, num_steps(plan.size, batches, [batches], plan.most_steps))
    assert len(parts) > 1
    np.testing.assert_array_equal(parts[0][..., 0], 0)
    np.testing.assert_array_equal(parts[-1][..., 1], plan.groups)
    for before, after in itertools.pairwise(parts):
        np.testing.assert_array_equal(before[..., 1], after[..., 0])
        assert (after[..., 1] >= after[..., 0]).all()


@pytest.mark.slow
def test_the_timeout_of_collectives_on_a_cpu_is_longer_than_the_default():
    """By default XLA ends the process after 40 seconds. The user's own flags are kept, and XLA accepts the result."""
    code = (
        "import os, fedsim, jax; fedsim.use_all_cores(2); P = jax.sharding.PartitionSpec;"
        "mesh = jax.sharding.Mesh(jax.devices(), 'd'); total = lambda x: jax.lax.psum(x, 'd');"
        "total = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P('d'), out_specs=P()));"
        "print(total(jax.numpy.ones(2)), os.environ['XLA_FLAGS'])"
    )
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    for given, expected in (("", f"{flag}=3600"), (f"{flag}=7", f"{flag}=7")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": given}, capture_output=True, text=True
        )
        assert done.stdout.startswith("[2.]") and done.stdout.count(flag) == 1 and expected in done.stdout.split()


def test_a_deleted_root_key_is_rejected():
    """This also holds if the key was used before."""
    algorithm, cohort = fedavg(), federation.cohort()
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    cohort.key.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        algorithm.apply(state, cohort)


def test_a_root_key_in_numpy_is_read_in_every_round():
    """The array may have changed."""
    algorithm, root = fedavg(), np.array([0, 0], np.uint32)
    state, cohort = algorithm.init(jax.random.key(0)), federation.cohort()
    for seed in (0, 0, 1):
        root[1] = seed
        given, _ = algorithm.apply(state, dataclasses.replace(cohort, key=root))
        expected, _ = algorithm.apply(state, federation.cohort(seed=seed))
        jax.tree.map(np.testing.assert_array_equal, given.params, expected.params)
