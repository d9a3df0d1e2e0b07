"""Several devices train one client: the same results, parameters that are divided, and the messages between devices."""

import functools
import re

import federation
import haiku as hk
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim.execution._placement import whole_on_client

BATCHES = fedsim.Batches(size=4, epochs=2)
WAYS = {
    "4 x 1": fedsim.Sharded(clients=4),
    "2 x 2": fedsim.Sharded(clients=2, model=2),
    "1 x 4": fedsim.Sharded(clients=1, model=4),
    "1 x 2 x 2": fedsim.Sharded(clients=1, model=2, data=2),
    "2 x 2, 2 lanes, streamed": fedsim.Sharded(clients=2, model=2, lanes=2, memory="stream"),
    "2 x data 2": fedsim.Sharded(clients=2, data=2),
}


def network(examples):
    hidden = jax.nn.tanh(hk.Linear(8)(examples["x"]))
    return hk.Linear(federation.NUM_CLASSES)(hidden)


def model():
    return fedsim.Model.from_haiku(hk.transform(network), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


ALGORITHMS = {
    "FedAvg": fedsim.algorithms.FedAvg,
    "SCAFFOLD": fedsim.algorithms.SCAFFOLD,
    "FedAdam": functools.partial(fedsim.algorithms.FedAdam, server_learning_rate=0.1),
    "Mime": fedsim.algorithms.Mime,
    "Ditto": functools.partial(fedsim.algorithms.Ditto, lam=0.1),
    "top half and error feedback": functools.partial(
        fedsim.algorithms.FedAvg,
        aggregator=fedsim.aggregators.Compressed(fedsim.compressors.ErrorFeedback(fedsim.compressors.TopK(fraction=0.5))),
    ),
    "median": functools.partial(fedsim.algorithms.FedAvg, aggregator=fedsim.aggregators.CoordinateMedian()),
    "averaging": functools.partial(fedsim.algorithms.FedAvg, averaging=0.5),
    "HypCluster": fedsim.algorithms.HypCluster,
    "D-PSGD": functools.partial(fedsim.decentralized.DPSGD, topology=fedsim.decentralized.ring(8)),
}


def make(name, execution):
    options = {"client_optimizer": optax.sgd(0.1, momentum=0.9), "model": model(), "batches": BATCHES, "execution": execution}
    made = ALGORITHMS[name]
    return made(**{key: value for key, value in options.items() if key not in getattr(made, "keywords", {})})


def run(algorithm):
    data = federation.data()
    state = algorithm.init(jax.random.key(1))
    for cohort in fedsim.UniformSampler(data, clients=5, seed=0).rounds(3):
        state, info = algorithm.apply(state, cohort)
    return state, info


@functools.cache
def expected(name):
    return federation.plain(run(make(name, fedsim.Jit())))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 x 2", "1 x 2 x 2", "4 x 1", "1 x 4", "2 x 2, 2 lanes, streamed", "2 x data 2"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_results_are_those_of_one_device(name, way):
    state, info = run(make(name, WAYS[way]))
    federation.assert_trees_close((federation.plain(state), info), expected(name))


def normalized(examples, is_training=True):
    return hk.Linear(federation.NUM_CLASSES)(fedsim.models.BatchNorm()(hk.Linear(8)(examples["x"]), is_training))


def recurrent(examples):
    """Reads the 3 numbers of an example as a sequence."""
    return hk.Linear(federation.NUM_CLASSES)(fedsim.models.LSTM(8)(examples["x"][..., None])[:, -1])


MODELS = {
    "recurrent": (hk.transform(recurrent), {}),
    "running statistics": (hk.transform_with_state(normalized), {}),
    "frozen and kept parts": (hk.transform(network), {"frozen": ["linear/w"], "kept": ["linear_1/w"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 x 2", "1 x 2 x 2"])
@pytest.mark.parametrize("name", MODELS)
def test_results_of_models_with_loops_statistics_and_parts_are_those_of_one_device(name, way):
    transformed, parts = MODELS[name]
    network = fedsim.Model.from_haiku(transformed, features=federation.FEATURES, num_classes=federation.NUM_CLASSES)
    network = network.with_parts(**parts) if parts else network
    options = {"client_optimizer": optax.sgd(0.1), "model": network, "batches": BATCHES}
    results = [run(fedsim.algorithms.FedAvg(**options, execution=execution))[0] for execution in (WAYS[way], fedsim.Jit())]
    federation.assert_trees_close(*map(federation.plain, results))


def test_states_and_memories_are_divided_like_the_parameters():
    state, _ = run(make("SCAFFOLD", WAYS["2 x 2"]))
    weights = state.server.params["linear"]["w"], state.server.opt_state, state.clients.rows
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(weights)}
    assert specs[3, 8] == jax.P(None, "model") and specs[8, 3, 8] == jax.P(None, None, "model")
    shard = state.server.params["linear"]["w"].addressable_shards[0].data
    assert shard.shape == (3, 4)


def test_clients_exchange_one_update_and_their_devices_what_local_steps_need():
    """By the compiled text, all messages in loops are between the devices of one client."""
    rule = {"linear/w": jax.P(None, "model"), "linear/b": jax.P("model"), "linear_1/w": jax.P("model", None)}
    algorithm = fedsim.algorithms.FedAvg(
        model=model().with_shardings(rule), client_optimizer=optax.sgd(0.1), batches=BATCHES, execution=WAYS["2 x 2"]
    )
    text = algorithm.execution.lower(algorithm, federation.cohort()).compile().as_text()
    messages = [line for line in text.splitlines() if re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter)\(", line)]
    # The devices of a CPU agree on their numbers of steps, see `fedsim.execution._placement.in_lockstep`.
    in_loops = [line for line in messages if "while/body" in line and "/pmax" not in line]
    # Devices 0 and 1 train one client; 0 and 2 have the same part of the model.
    assert in_loops and {federation.groups(line) for line in in_loops} == {"{{0,1},{2,3}}"}
    sums = [federation.groups(line) for line in messages if " all-reduce(" in line and "/psum" in line]
    assert sums.count("{{0,2},{1,3}}") == 1
    # The sum of squares of an update, which tells whether it is finite, does not gather the update.
    assert not any("all-gather(" in line and "while/body/reshape" in line for line in in_loops)


@pytest.mark.parametrize("clients", [1, 2])
def test_joined_arrays_of_several_clients_are_right(clients):
    """XLA divides the vector of 69 elements into parts of 35 and 34, and returns wrong slices of two such vectors."""
    mesh, shapes = fedsim.Sharded(clients=clients, model=2).mesh(), [(2, 8), (2, 3, 8), (2, 4), (2, 8, 4), (2,)]
    values = [1 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    specs = [jax.P(None, "model"), jax.P(None, None, "model"), jax.P(None, "model"), jax.P(None, "model"), jax.P()]
    places = [jax.NamedSharding(mesh, spec) for spec in specs]

    def joined(leaves):
        with fedsim.tree.whole_vectors(whole_on_client(mesh)):
            return fedsim.tree.unflat(2 * fedsim.tree.flat(leaves), leaves)

    for function in [joined, lambda leaves: fedsim.tree.psum(leaves, "devices")][:clients]:

        def means(values, function=function):
            *sums, weights = jax.vmap(function)(values)
            return [x / weights.reshape(2, *[1] * (x.ndim - 1)) for x in sums]

        if clients == 2:
            means = jax.shard_map(
                means, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), axis_names={"devices"}, check_vma=False
            )
        results = jax.jit(means, out_shardings=places[:-1])(jax.device_put(values, places))
        *expected, weights = values
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y / weights.reshape(2, *[1] * (y.ndim - 1)), rtol=1e-6)


def test_a_batch_is_divided_over_the_devices_of_its_client():
    algorithm = make("FedAvg", WAYS["1 x 2 x 2"])
    one = make("FedAvg", fedsim.Sharded(clients=1, model=2))
    flops = [each.execution.lower(each, federation.cohort()).compile().cost_analysis()["flops"] for each in (algorithm, one)]
    assert flops[0] < 0.8 * flops[1]


def test_evaluation_takes_divided_parameters():
    state, _ = run(make("FedAvg", WAYS["2 x 2"]))
    ways = [fedsim.evaluate(model(), state.params, federation.data(), execution=way) for way in (fedsim.Jit(), WAYS["2 x 2"])]
    federation.assert_trees_close(ways[0].overall, ways[1].overall)


@pytest.mark.slow
def test_a_checkpoint_continues_on_another_mesh(tmp_path):
    def go_on(execution, folder="run", callbacks=()):
        sampler = fedsim.UniformSampler(federation.data(), clients=5, seed=0)
        options = {"folder": tmp_path / folder, "checkpoint_every": 1, "callbacks": callbacks}
        return fedsim.experiment.run(
            make("SCAFFOLD", execution), sampler, rounds=3, rounds_per_dispatch=1, progress=False, **options
        ).state

    def stop(line, state):
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(WAYS["2 x 2"], callbacks=[stop])
    resumed, whole = go_on(WAYS["1 x 2 x 2"]), go_on(fedsim.Jit(), "other")
    federation.assert_trees_close(federation.plain(resumed), federation.plain(whole))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: fedsim.Sharded(clients=8, model=2).mesh(), r"at most 8, the number of devices, got clients=8, model=2"),
        (lambda: fedsim.Sharded(differentiable=True), "Sharded does not support differentiable=True"),
        (
            lambda: model().with_shardings({"linear_2/w": jax.P("model")}),
            "no parameter 'linear_2/w' to be divided. Did you mean",
        ),
        (lambda: model().with_shardings({"linear/w": jax.P("rows")}), "divided over 'data' or 'model', got 'rows'"),
        (lambda: model().with_shardings({"linear/b": jax.P(None, "model")}), "at most 1 axes for linear/b"),
        (
            lambda: run_fedavg(model().with_shardings({"linear/w": jax.P("model")}), BATCHES, "2 x 2"),
            r"multiples of 2, got linear/w of shape \[3, 8\]",
        ),
        (lambda: run_fedavg(model(), fedsim.Batches(size=3), "2 x data 2"), "multiples of data=2, .* got size=3"),
        (lambda: fedsim.experiment.Settings(mesh="clients=2, modle=2"), "got 'modle' in .* Did you mean 'model'"),
        (
            lambda: fedsim.experiment.Settings(mesh="clients=2 model=2"),
            "separate them by commas, as in mesh='clients=4, model=2'",
        ),
        (lambda: fedsim.experiment.Settings(mesh="clients=two"), "numbers of devices by the names .* got mesh='clients=two'"),
        (lambda: fedsim.experiment.Settings(mesh="clients=2.0"), "clients=2.0: give a positive whole number of devices"),
        (lambda: fedsim.experiment.Settings(mesh="model=0"), "model >= 1, got model=0"),
        (lambda: fedsim.experiment.Settings(mesh="model=2", execution="jit").executor(), "mesh without execution and devices"),
    ],
)
def test_what_does_not_fit_is_named(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def run_fedavg(model, batches, way):
    run(fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=batches, execution=WAYS[way]))


def test_why_members_of_a_population_do_not_share_a_program_is_said():
    algorithm = make("FedAvg", WAYS["2 x 2"])
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert fedsim.execution.obstacle(algorithm, state, federation.cohort()) == "several devices train each of their clients"


def test_settings_name_a_mesh():
    assert fedsim.experiment.Settings(mesh="clients=2, model=2").executor() == fedsim.Sharded(clients=2, model=2)
    assert fedsim.experiment.Settings(mesh="clients=2, model=2, data=3").num_devices == 12
