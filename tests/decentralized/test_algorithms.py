"""Decentralized algorithms against loops in NumPy, and where their theory says that they go."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import linear_models
import networkx as nx
import numpy as np
import optax
import pytest

import fedsim
from fedsim import decentralized

RATE = 0.3
SIZES = (7, 4, 3, 12, 1, 5)
DATA = federation.data(SIZES)
RING = decentralized.ring(6)


def make(name, **changes):
    settings = {
        "model": federation.model(), "client_optimizer": optax.sgd(RATE), "batches": linear_models.ONE_STEP,
        "topology": RING, "execution": fedsim.Jit(),
    }  # fmt: skip
    return getattr(decentralized, name)(**settings | changes)


def everyone(round, data=DATA):
    return fedsim.Cohort(data, np.arange(data.num_clients), round, fedsim.rng.root(0))


def run(algorithm, rounds, data=DATA):
    state = algorithm.init(jax.random.key(1))
    for round in range(rounds):
        state, info = algorithm.apply(state, everyone(round, data))
    return state, info


def thetas(models):
    return np.concatenate(
        [np.asarray(models["linear"]["w"], np.float64), np.asarray(models["linear"]["b"], np.float64)[:, None]], 1
    )


def gradients(x):
    """Returns each node's full gradient at its own parameters."""
    examples = [DATA.client(i) for i in range(len(SIZES))]
    return np.stack(
        [linear_models.gradient(theta, linear_models.with_ones(d["x"]), d["y"]) for theta, d in zip(x, examples, strict=True)]
    )


def mixed(matrix, x):
    return np.einsum("ij,j...->i...", matrix.toarray() if hasattr(matrix, "toarray") else matrix, x)


def dpsgd(x, rounds, matrices):
    for t in range(rounds):
        x = mixed(matrices[t % len(matrices)], x) - RATE * gradients(x)
    return x


def dfedavg(x, rounds, matrices):
    for t in range(rounds):
        x = mixed(matrices[t % len(matrices)], x - RATE * gradients(x))
    return x


def gradient_tracking(x, rounds, matrices):
    y, last = np.zeros_like(x), np.zeros_like(x)
    for t in range(rounds):
        g = RATE * gradients(x)
        y, last = mixed(matrices[t % len(matrices)], y) + g - last, g
        x = mixed(matrices[t % len(matrices)], x - y)
    return x


def d2(x, rounds, matrices):
    xs, gs = [x], []
    for t in range(rounds):
        gs.append(RATE * gradients(xs[-1]))
        step = xs[-1] - gs[-1] if t == 0 else 2 * xs[-1] - xs[-2] - gs[-1] + gs[-2]
        xs.append(mixed(matrices[0], step))
    return xs[-1]


def push(x, rounds, matrices):
    w = np.ones(len(x))
    for t in range(rounds):
        x = mixed(matrices[t % len(matrices)], x - RATE * gradients(x / w[:, None, None]))
        w = mixed(matrices[t % len(matrices)], w)
    return x


def quasi_global(x, rounds, matrices):
    m = np.zeros_like(x)  # the paper's momentum, not times the rate
    for t in range(rounds):
        new = mixed(matrices[t % len(matrices)], x - RATE * (gradients(x) + 0.9 * m))
        m, x = 0.9 * m + 0.1 * (x - new) / RATE, new
    return x


def diloco(x, rounds, matrices):
    m = np.zeros_like(x)
    for t in range(rounds):
        m = 0.9 * m + RATE * gradients(x)
        x = mixed(matrices[t % len(matrices)], x - 0.7 * (0.9 * m + RATE * gradients(x)))
    return x


def choco(x, rounds, matrices):
    h = x.copy()
    for t in range(rounds):
        x = x - RATE * gradients(x)
        difference = (x - h).reshape(len(x), -1)
        kept = np.zeros_like(difference)
        largest = np.argsort(-np.abs(difference), axis=1)[:, : -(-difference.shape[1] // 2)]
        np.put_along_axis(kept, largest, np.take_along_axis(difference, largest, 1), 1)
        h = h + kept.reshape(h.shape)
        x = x + 0.5 * (mixed(matrices[t % len(matrices)], h) - h)
    return x


DIRECTED = decentralized.Topology([nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (2, 0)])])


def relay(x, rounds, edges):
    """Message for message, as the paper's Algorithm 1 is written."""
    neighbours = {i: [b if a == i else a for a, b in edges if i in (a, b)] for i in range(len(x))}
    messages = {(i, j): (0.0, 0) for i in neighbours for j in neighbours[i]}
    for _ in range(rounds):
        trained = x - RATE * gradients(x)
        new = {}
        for i, j in messages:
            others = [messages[k, i] for k in neighbours[i] if k != j]
            new[i, j] = trained[i] + sum(m for m, _ in others), 1 + sum(c for _, c in others)
        messages = new
        x = np.stack(
            [
                (trained[i] + sum(messages[j, i][0] for j in neighbours[i]))
                / (1 + sum(messages[j, i][1] for j in neighbours[i]))
                for i in range(len(x))
            ]
        )
    return x


@pytest.mark.parametrize("topology", [decentralized.line(6), decentralized.binary_tree(6)])
def test_relay_sgd_equals_a_loop_over_messages(topology):
    algorithm = make("RelaySGD", topology=topology)
    state, info = run(algorithm, 9)
    expected = relay(thetas(algorithm.init(jax.random.key(1)).models), 9, list(topology.graphs[0].edges))
    np.testing.assert_allclose(thetas(state.models), expected, rtol=2e-4, atol=2e-5)
    assert float(info["bits_up"]) == 10 * 32 * (expected[0].size + 1)
    with pytest.raises(ValueError, match="RelaySGD needs a tree"):
        make("RelaySGD")


@pytest.mark.parametrize("own_edges", [[], [(0, 0), (2, 2)]])  # An edge of a node to itself is no message.
def test_asynchronous_pairs_equal_a_loop_over_events(own_edges):
    graph = nx.path_graph(6)
    graph.add_edges_from(own_edges)
    algorithm = make("ADPSGD", topology=decentralized.Topology([graph]))
    nodes = decentralized.FinishingNodes(
        DATA, algorithm.batches, fedsim.systems.Devices(seconds_per_step=fedsim.systems.LogNormal(sigma=0.3)), per_round=3
    )
    state = algorithm.init(jax.random.key(1))
    x = thetas(state.models)
    read = x.copy()
    for round, cohort in enumerate(nodes.rounds(8)):
        state, _ = algorithm.apply(state, cohort)
        key, moves = fedsim.rng.round_key(fedsim.rng.root(0), round, "exchange"), RATE * gradients(read)
        for slot, i in enumerate(cohort.clients.tolist()):
            others = [j for j in (i - 1, i + 1) if 0 <= j < 6]
            j = others[int(jax.random.randint(jax.random.fold_in(key, slot), (), 0, len(others)))]
            mean = (x[i] + x[j]) / 2
            x[j], x[i] = mean, mean - moves[i]
            read[i] = x[i]
    assert round == 7 and len({tuple(cohort.clients) for cohort in nodes.rounds(8)}) > 2
    np.testing.assert_allclose(thetas(state.models), x, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(thetas(state.memory), read, rtol=2e-4, atol=2e-5)


def test_nodes_finish_in_the_order_of_their_speeds():
    nodes = decentralized.FinishingNodes(DATA, fedsim.Batches(size=1), per_round=1)
    finished = [(cohort.clients[0], cohort.measures["simulated_seconds"]) for cohort in nodes.rounds(40)]
    expected = sorted((time, node) for node, size in enumerate(SIZES) for time in range(size, 200, size))[:40]
    assert finished == [(node, time) for time, node in expected]


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("name", "reference", "settings"),
    [
        ("DPSGD", dpsgd, {}),
        ("DPSGD", dpsgd, {"topology": decentralized.base_graph(6)}),
        ("DFedAvg", dfedavg, {"topology": decentralized.star(6)}),
        ("GradientTracking", gradient_tracking, {}),
        ("GradientTracking", gradient_tracking, {"topology": decentralized.exponential(6)}),
        ("D2", d2, {}),
        ("D2", d2, {"topology": decentralized.line(6), "weights": "lazy"}),
        ("StochasticGradientPush", push, {"topology": DIRECTED}),
        ("QuasiGlobalMomentum", quasi_global, {}),
        ("DecentralizedDiLoCo", diloco, {}),
        ("ChocoSGD", choco, {"compressor": fedsim.compressors.TopK(fraction=0.5), "gamma": 0.5}),
    ],
)
def test_rounds_equal_a_loop_in_numpy(name, reference, settings):
    algorithm = make(name, **settings)
    state, info = run(algorithm, 7)
    start = thetas(algorithm.init(jax.random.key(1)).models)
    expected = reference(start, 7, algorithm.matrices)
    np.testing.assert_allclose(thetas(state.models), expected, rtol=2e-4, atol=2e-5)
    models = expected / np.asarray(state.memory)[:, None, None] if name == "StochasticGradientPush" else expected
    away = models - models.mean(0)
    assert float(info["consensus_distance"]) == pytest.approx(np.sqrt((away**2).sum() / 6), rel=1e-3)
    edges = np.mean(
        [graph.to_directed().number_of_edges() for graph in algorithm.topology.graphs[6 % algorithm.topology.period :][:1]]
    )
    per_message = {"GradientTracking": 2, "ChocoSGD": None}.get(name, 1)
    if per_message:
        extra = 32 * edges if name == "StochasticGradientPush" else 0
        assert float(info["bits_up"]) == edges * per_message * 32 * start[0].size + extra


def test_the_complete_graph_is_centralized_sgd():
    state, info = run(make("DFedAvg", topology=decentralized.complete(6)), 5)
    x = thetas(make("DFedAvg").init(jax.random.key(1)).models)[0]
    for _ in range(5):
        x = x - RATE * gradients(np.stack([x] * 6)).mean(0)
    np.testing.assert_allclose(thetas(state.models), np.stack([x] * 6), rtol=1e-4, atol=1e-6)
    assert float(info["consensus_distance"]) < 1e-6


def test_the_complete_graph_is_diloco():
    """Nodes keep the state of the inner optimizer as DiLoCo's workers do, and together the momentum of its server."""
    options = {"client_optimizer": optax.sgd(0.1, 0.9), "batches": fedsim.Batches(size=4, steps=3)}
    data = federation.data([4] * 6)
    without_server = make("DecentralizedDiLoCo", topology=decentralized.complete(6), **options)
    state, _ = run(without_server, 4, data)
    central = fedsim.algorithms.DiLoCo(model=without_server.model, **options)
    served = central.init(jax.random.key(1))
    for round in range(4):
        served, _ = central.apply(served, everyone(round, data))
    np.testing.assert_allclose(
        thetas(state.models), np.tile(thetas(jax.tree.map(lambda x: x[None], served.params)), (6, 1, 1)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.first(2)
@pytest.mark.parametrize("topology", [RING, decentralized.star(40)])  # rows of equal and of unequal lengths
@pytest.mark.parametrize("kind", ["messages", "links"])
@pytest.mark.parametrize("stays_with_sender", [False, True])
def test_lost_messages_are_replaced_by_the_own_value_or_stay_with_the_sender(topology, kind, stays_with_sender):
    matrix = topology.matrices()[0].toarray()
    mixer = decentralized._mixer.Mixer.of(topology.matrices())
    x, n = np.random.default_rng(0).standard_normal([topology.nodes, 3]).astype(np.float32), topology.nodes
    fractions = {"messages": 0.0, "links": 0.0} | {kind: 0.4}
    seen = []

    @jax.jit
    def mix(key, values):
        return mixer(
            values, jnp.int32(0), decentralized._mixer.MessageLoss(key, **fractions, stays_with_sender=stays_with_sender)
        )

    for seed in range(60):
        used = np.asarray(mix(jax.random.key(seed), jnp.eye(n)))  # unit vectors show the matrix that was used
        np.testing.assert_allclose(used.sum(axis=0 if stays_with_sender else 1), 1, rtol=1e-5)
        lost = (matrix > 0) & (used == 0) & ~np.eye(n, dtype=bool)
        expected = np.where(lost, 0, matrix) + np.diag((matrix * lost).sum(axis=0 if stays_with_sender else 1))
        np.testing.assert_allclose(used, expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(np.asarray(mix(jax.random.key(seed), jnp.asarray(x))), expected @ x, rtol=1e-4, atol=1e-5)
        assert kind == "messages" or (lost == lost.T).all()
        seen.append(lost.sum() / ((matrix > 0).sum() - n))
    assert np.mean(seen) == pytest.approx(0.4, abs=0.1)


def test_pushed_sums_stay_means_if_messages_are_lost():
    algorithm = make("StochasticGradientPush", topology=DIRECTED, message_loss=0.3, client_optimizer=optax.sgd(1e-6))
    start = algorithm.init(jax.random.key(1))
    state = start
    for round in range(10):
        state, _ = algorithm.apply(state, everyone(round))
    np.testing.assert_allclose(float(jnp.sum(state.memory)), 6, rtol=1e-5)
    assert float(jnp.ptp(state.memory)) > 0.1
    federation.assert_trees_close(algorithm.node_models(state), start.models, rtol=1e-3, atol=1e-3)


def test_relay_sgd_counts_the_models_that_arrive():
    algorithm = make("RelaySGD", topology=decentralized.line(6), message_loss=0.3, client_optimizer=optax.sgd(1e-6))
    state = start = algorithm.init(jax.random.key(1))
    for round in range(10):
        state, _ = algorithm.apply(state, everyone(round))
    assert float(jnp.sum(state.memory.counts)) < 30  # 1 to 5 in each direction if nothing is lost
    federation.assert_trees_close(state.models, start.models, rtol=1e-3, atol=1e-3)


def mean_of_numbers(name, x, dtype=jnp.float32, **changes):
    """Returns an algorithm whose nodes each have one number, of which the model is to be the mean, and their data."""
    net = hk.transform(lambda examples: jnp.broadcast_to(hk.get_parameter("w", [], dtype, init=jnp.zeros), examples["x"].shape))
    model = fedsim.Model.from_haiku(
        net, features={"x": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, outputs: (outputs.astype(jnp.float32) - examples["x"]) ** 2 / 2,
    )  # fmt: skip
    settings = {"client_optimizer": optax.sgd(0.05), "topology": decentralized.ring(len(x))} | changes
    data = fedsim.FederatedData.from_arrays({"x": np.asarray(x, np.float32)}, sizes=[1] * len(x))
    return make(name, model=model, batches=fedsim.Batches(size=1), **settings), data


def numbers_of(algorithm, data, rounds):
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), [everyone(round, data) for round in range(rounds)])
    return algorithm.node_models(state)["~"]["w"], state


@pytest.mark.first(1)
@pytest.mark.parametrize("topology", [RING, decentralized.exponential(6), decentralized.star(6)])
@pytest.mark.parametrize("losses", [{"message_loss": 0.5}, {"message_loss": 0.2, "link_failures": 0.3}])
def test_gradient_tracking_is_exact_although_messages_are_lost(topology, losses):
    algorithm, data = mean_of_numbers("GradientTracking", [0, 4, 8, -3, 5, 10], topology=topology, **losses)
    numbers, state = numbers_of(algorithm, data, 600)
    mean, last = (np.asarray(each["~"]["w"]) for each in state.memory)
    np.testing.assert_allclose(mean.sum(), last.sum(), atol=1e-5)
    np.testing.assert_allclose(numbers, 4.0, rtol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["D2", "GradientTracking"])
def test_rounded_mixing_weights_do_not_add_up_over_rounds(name):
    algorithm, data = mean_of_numbers(name, 1000 * np.array([0, 4, 8, -3, 5, 10]))
    np.testing.assert_allclose(numbers_of(algorithm, data, 500)[0], 4000.0, rtol=2e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "topology", "changes"),
    [
        ("DFedAvg", decentralized.complete(300), {}),
        ("DFedAvg", decentralized.complete(30), {"robust_mixing": decentralized.TrimmedMixing(2)}),
        ("StochasticGradientPush", decentralized.complete(300), {}),
        ("RelaySGD", decentralized.line(300), {}),
    ],
)
def test_in_half_precision_nodes_that_agree_stay_where_they_are(name, topology, changes):
    changes = {"client_optimizer": optax.sgd(1.0), **changes}
    algorithm, data = mean_of_numbers(name, np.full(topology.nodes, 5), jnp.bfloat16, topology=topology, **changes)
    numbers, state = numbers_of(algorithm, data, 3)
    assert numbers.dtype == jnp.bfloat16 and state.params["~"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(numbers, np.float32), 5.0)


@pytest.mark.parametrize("name", ["D2", "GradientTracking"])
def test_sums_over_rounds_need_parameters_of_float32(name):
    algorithm, data = mean_of_numbers(name, np.arange(6), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{name} needs parameters of at least float32, got bfloat16: it keeps sums over"):
        algorithm.apply(algorithm.init(jax.random.key(0)), everyone(0, data))


def test_the_order_of_the_cohort_does_not_matter():
    algorithm = make("DPSGD")
    start = algorithm.init(jax.random.key(1))
    forward, _ = algorithm.apply(start, everyone(0))
    order = np.array([3, 5, 0, 1, 4, 2])
    backward, _ = algorithm.apply(start, fedsim.Cohort(DATA, order, 0, fedsim.rng.root(0)))
    federation.assert_trees_close(forward.models, backward.models)


def test_nodes_that_do_not_train_mix_nevertheless():
    algorithm = make("DFedAvg")
    start = algorithm.init(jax.random.key(1))
    only, _ = algorithm.apply(start, fedsim.Cohort(DATA, np.array([2]), 0, fedsim.rng.root(0)))
    x = thetas(start.models)
    moved = x - RATE * np.where(np.arange(6)[:, None, None] == 2, gradients(x), 0)
    np.testing.assert_allclose(thetas(only.models), mixed(algorithm.matrices[0], moved), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["GradientTracking", "DFedAvg", "D2", "QuasiGlobalMomentum", "DecentralizedDiLoCo", "ChocoSGD"]
)
def test_devices_and_debug_give_the_same_answer(name):
    results = [
        run(make(name, execution=execution), 3)[0] for execution in (fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Debug())
    ]
    for other in results[1:]:
        federation.assert_trees_close(results[0].models, other.models, rtol=1e-4, atol=1e-5)


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="has 5 nodes, and the population has 6 clients"):
        run(make("DPSGD", topology=decentralized.ring(5)), 1)
    with pytest.raises(ValueError, match="DPSGD needs mixing matrices whose rows and columns sum to 1"):
        make("DPSGD", topology=DIRECTED)
    with pytest.raises(ValueError, match="columns sum to 1: use weights='column_stochastic'"):
        make("StochasticGradientPush", topology=decentralized.star(6), weights="uniform")
    with pytest.raises(ValueError, match="eigenvalues of at least -1/3.*lazy"):
        make("D2", weights=[nx.to_numpy_array(nx.cycle_graph(6)) / 2])
    with pytest.raises(ValueError, match="one symmetric mixing matrix"):
        make("D2", topology=decentralized.exponential(6))
    with pytest.raises(ValueError, match="ADPSGD needs one undirected graph"):
        make("ADPSGD", topology=DIRECTED)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("DPSGD", {"update_norms": True}, "has no server, got update_norms=True"),
        ("DPSGD", {"nonfinite": "raise"}, "has no server, got nonfinite='raise'"),
        ("DPSGD", {"downlink": fedsim.compressors.QSGD(levels=4)}, "has no server, got downlink="),
        ("DPSGD", {"aggregator": fedsim.aggregators.Clipped(1.0)}, "has no server, got aggregator=Clipped"),
        ("RelaySGD", {"topology": decentralized.line(6), "weights": "lazy"}, "weights to be 'auto', got weights='lazy'"),
        ("ADPSGD", {"weights": "lazy"}, "weights to be 'auto', got weights='lazy'"),
    ],
)
def test_what_would_have_no_effect_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


def test_nodes_mix_no_running_statistics_without_noise():
    noise = decentralized.LocalNoise(1.0, norm=1.0)
    make("DPSGD", model=normalized("client"), local_noise=noise).check(DATA)
    with pytest.raises(ValueError, match="without running statistics with local_noise, got one with them in DPSGD.*GroupNorm"):
        make("DPSGD", model=normalized("average"), local_noise=noise).check(DATA)


def test_bits_of_large_messages_are_counted():
    neighbours = decentralized.Neighbours(None, jnp.int32(0), jax.random.key(0))
    neighbours.count(2**40)
    assert float(neighbours.bits) == 2**40


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ({"latency": 0.5}, "latency"),
        ({"upload_rate": fedsim.systems.LogNormal(median=1e6)}, "upload_rate"),
        ({"availability": fedsim.systems.Traces({each: {"download_rate": 1e6} for each in DATA.client_ids})}, "download_rate"),
    ],
)
def test_devices_whose_messages_take_time_are_refused_by_nodes_that_do_not_wait(devices, name):
    with pytest.raises(ValueError, match=f"messages take no time.*got {name}="):
        make("ADPSGD").sampler(DATA, clients=2, devices=fedsim.systems.Devices(**devices))


def test_nodes_whose_steps_take_no_time_are_refused():
    speeds = {each: {} if each == "client3" else {"seconds_per_step": 1.0} for each in DATA.client_ids}
    devices = fedsim.systems.Devices(seconds_per_step=0.0, availability=fedsim.systems.Traces(speeds))
    with pytest.raises(ValueError, match="steps take time, got seconds_per_step=0 of node 3: .* give a number above 0"):
        decentralized.FinishingNodes(DATA, fedsim.Batches(size=1), devices)


def test_nodes_that_are_all_offline_for_good_end_the_run():
    online = {each: {"online": [(0, 2.5)]} for each in DATA.client_ids}
    devices = fedsim.systems.Devices(seconds_per_step=1.0, availability=fedsim.systems.Traces(online))
    nodes = make("ADPSGD").sampler(DATA, clients=5, devices=devices)
    found = [(cohort.clients.tolist(), cohort.measures["simulated_seconds"]) for cohort in nodes.rounds(3)]
    assert found == [([0, 1, 2, 3, 4], 1.0), ([5, 0, 1, 2, 3], 2.0), ([4, 5], 2.0)]
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot go on after 3 rounds, because all nodes have gone offline for good"):
            nodes.cohort(3)


def test_few_nodes_or_none_with_data_that_do_not_wait():
    sampler = make("ADPSGD").sampler(DATA, clients=20)
    assert sampler.clients == 6 and len(sampler.cohort(0).clients) <= 6
    with pytest.raises(ValueError, match="No node takes a step"):
        make("ADPSGD").sampler(federation.data((0, 0)), clients=2)
    with pytest.raises(ValueError, match="No node takes a step"):
        decentralized.FinishingNodes(DATA, fedsim.Batches(size=1000, drop_remainder=True))


def test_no_sampler_for_devices_of_nodes_that_wait_for_each_other():
    with pytest.raises(ValueError, match="wait for each other"):
        make("DPSGD").sampler(DATA, clients=6, devices=fedsim.systems.Devices())


@pytest.mark.parametrize("name", ["DFedAvg", "ADPSGD"])
def test_a_node_whose_training_is_not_finite_does_not_disturb_the_others(name):
    columns = {key: np.array(column) for key, column in DATA.columns.items()}
    columns["x"][: SIZES[0]] = 1e30  # the squared error overflows
    broken = fedsim.FederatedData(columns, DATA.offsets, DATA.client_ids)
    state, info = run(make(name), 3, broken)
    assert int(info["dropped"]) == 1 and np.isfinite(thetas(state.models)).all() and np.isfinite(info["loss"])
    assert not np.allclose(thetas(state.models)[0], thetas(make(name).init(jax.random.key(1)).models)[0])  # it mixes


@pytest.mark.first(1)
@pytest.mark.parametrize("name", sorted(decentralized.ALGORITHMS))
def test_frozen_parameters_are_constants_of_the_model(name):
    """Nodes that train with a frozen layer are nodes that train a network in which this layer is a constant."""

    def model(first=None):
        def network(examples):
            layer = hk.Linear(5, name="first") if first is None else lambda x: x @ first["w"] + first["b"][None]
            return hk.Linear(federation.NUM_CLASSES, name="second")(jax.nn.tanh(layer(examples["x"])))

        return fedsim.Model.from_haiku(hk.transform(network), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)

    whole = model()
    drawn = whole.init(jax.random.key(1))
    constant = dataclasses.replace(model(drawn["first"]), init=lambda key: {"second": whole.init(key)["second"]})
    cls = decentralized.ALGORITHMS[name]
    settings = {"client_optimizer": optax.sgd(RATE), "batches": linear_models.ONE_STEP, "execution": fedsim.Jit()}
    settings |= {"topology": decentralized.line(6)} if cls is decentralized.RelaySGD else {"topology": RING}
    frozen, expected = (run(cls(model=each, **settings), 2)[0] for each in (whole.with_parts(frozen="first/*"), constant))
    federation.assert_trees_close(frozen.params["second"], expected.params["second"])
    federation.assert_trees_equal(jax.device_get(frozen.params["first"]), jax.device_get(drawn["first"]))


def normalized(statistics):
    def network(examples, is_training):
        hidden = fedsim.models.BatchNorm(name="norm")(hk.Linear(5, name="body")(examples["x"]), is_training)
        return hk.Linear(federation.NUM_CLASSES, name="head")(jax.nn.tanh(hidden))

    return fedsim.Model.from_haiku(
        hk.transform_with_state(network),
        features=federation.FEATURES,
        num_classes=federation.NUM_CLASSES,
        statistics=statistics,
        train_kwargs={"is_training": True},
        eval_kwargs={"is_training": False},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPSGD", "StochasticGradientPush", "RelaySGD", "ADPSGD", "ChocoSGD", "D2", "DFedAvg",
                                  "GradientTracking", "QuasiGlobalMomentum"])  # fmt: skip
def test_running_statistics_are_mixed_with_the_models(name):
    """Parameters are the same whether or not nodes mix statistics, and mixed ones are the means of those that nodes have."""
    options = {"topology": decentralized.line(6)} if name == "RelaySGD" else {}
    own, info = run(make(name, model=normalized("client"), **options), 1)
    trained = np.asarray(own.statistics.own_statistics["norm"]["mean"], np.float64)
    assert trained.shape == (6, 5) and np.ptp(trained, axis=0).min() > 1e-4
    mixing = make(name, model=normalized("average"), **options)
    if "statistics" in mixing.capabilities.refused_parts:
        with pytest.raises(ValueError, match="takes no model with running statistics: it has no mixing weights"):
            run(mixing, 1)
        return
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Debug())[: 3 if name == "DPSGD" else 1]:
        state, mixed_info = run(dataclasses.replace(mixing, execution=execution), 1)
        federation.assert_trees_close(state.models, own.models)
        matrix = mixing.matrices[0]
        expected = mixed(matrix, trained) / mixed(matrix, np.ones((6, 1)))
        np.testing.assert_allclose(state.statistics.statistics["norm"]["mean"], expected, atol=1e-6)
        messages = np.count_nonzero(matrix.toarray() - np.diag(matrix.diagonal()))
        assert float(mixed_info["bits_up"]) - float(info["bits_up"]) == 32 * 10 * messages


def test_nodes_whose_time_is_multiplied_by_zero_are_refused():
    with pytest.raises(ValueError, match="steps take time, got variation=0.*leave it out"):
        decentralized.FinishingNodes(DATA, fedsim.Batches(size=1), fedsim.systems.Devices(variation=0.0))


def test_nodes_that_keep_their_optimizer_lose_no_gradients():
    optimizer = optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()
    options = {"client_optimizer": optimizer, "batches": fedsim.Batches(size=1, steps=2)}
    with jax.numpy_dtype_promotion("standard"):  # required by optax.MultiSteps
        make("DecentralizedDiLoCo", **options).check(DATA)  # warnings are errors
        with pytest.warns(UserWarning, match="moves after every 3 steps"):
            make("DFedAvg", **options).check(DATA)


def test_nodes_that_do_not_wait_keep_what_their_steps_keep():
    class Counting(decentralized.ADPSGD):
        def training_memory(self, models):
            return jnp.zeros(self.topology.nodes, jnp.int32)

        def train_node(self, shared, client, kept):
            return super().train_node(shared, client, kept)[0], kept + 1

    settings = {"model": federation.model(), "batches": linear_models.ONE_STEP, "topology": RING}
    algorithm = Counting(client_optimizer=optax.sgd(RATE), execution=fedsim.Jit(), **settings)
    assert run(algorithm, 2)[0].training.tolist() == [2] * 6
