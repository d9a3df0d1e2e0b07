"""Nodes that are divided over devices: the same rounds, a block of models on each, and the messages that the graph needs."""

import dataclasses
import re

import federation
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fedsim
from fedsim import decentralized
from fedsim.attacks import SignFlip
from fedsim.decentralized._mixer import Mixer
from fedsim.execution._layout import Layout, plan_round

DATA = federation.data()  # eight clients
DEVICES = fedsim.Pmap(devices=4)
DIRECTED = decentralized.Topology([nx.DiGraph([(i, (i + 1) % 8) for i in range(8)] + [(0, 3), (2, 7)])])


def make(name="DPSGD", **changes):
    settings = {
        "model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4, steps=2),
        "topology": decentralized.ring(8), "execution": DEVICES,
    }  # fmt: skip
    return getattr(decentralized, name)(**settings | changes)


def cohorts(rounds, clients=6, attack=None):
    sampler = fedsim.UniformSampler(DATA, clients=clients, seed=0)
    return list((fedsim.samplers.Attacked(sampler, attack, fraction=0.3, seed=0) if attack else sampler).rounds(rounds))


def run(algorithm, rounds=3, **options):
    state, infos = algorithm.init(jax.random.key(1)), []
    for cohort in cohorts(rounds, **options):
        state, info = algorithm.apply(state, cohort)
        infos.append(info)
    return state, infos


@dataclasses.dataclass(frozen=True)
class Sum(decentralized.RobustMixing):
    """The weighted sum of the biases only, by a loop that starts with zeros."""

    def __call__(self, own, received, weights):
        def add(total, each):
            value, weight = each
            return total + weight * (value - own["linear"]["b"]), None

        steps, _ = jax.lax.scan(add, jnp.zeros(4), (received["linear"]["b"], weights))
        return {"linear": {"b": own["linear"]["b"] + steps, "w": own["linear"]["w"]}}


def is_divided(x):
    return isinstance(x.sharding, NamedSharding) and x.sharding.spec == P("devices") and len(x.addressable_shards) == 4


ALGORITHMS = [
    ("DPSGD", {}, {}),
    ("StochasticGradientPush", {"topology": decentralized.one_peer_exponential(8), "message_loss": 0.3}, {}),
    ("ChocoSGD", {}, {}),
    (
        "DPSGD",
        {
            "topology": decentralized.complete(8), "robust_mixing": decentralized.TrimmedMixing(1), "averaging": 0.5,
            "local_noise": decentralized.LocalNoise(0.1, norm=0.1), "personal": lambda module, name: name == "b",
        },
        {"attack": SignFlip(3.0)},
    ),
    ("DPSGD", {"topology": decentralized.star(8)}, {}),  # rows of unequal lengths
    ("DFedAvg", {"topology": decentralized.star(8), "message_loss": 0.3, "link_failures": 0.2}, {"attack": SignFlip(3.0)}),
    ("DFedAvg", {"topology": decentralized.torus(8), "message_loss": 0.3}, {"attack": SignFlip(3.0)}),
    ("StochasticGradientPush", {"topology": DIRECTED, "message_loss": 0.3}, {}),
    ("DFedAvg", {"topology": decentralized.equi_dynamic(8, period=3), "robust_mixing": decentralized.ClippedMixing(0.1)}, {}),
    ("DPSGD", {"topology": decentralized.star(8), "robust_mixing": Sum()}, {}),
]  # fmt: skip


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "settings", "options"), ALGORITHMS)
def test_rounds_are_those_of_one_device(name, settings, options):
    state, infos = run(make(name, **settings), **options)
    expected, expected_infos = run(make(name, **settings, execution=fedsim.Jit()), **options)
    federation.assert_trees_close((state, infos), (expected, expected_infos), rtol=1e-4, atol=1e-5)
    nodes = fedsim.rounds.server_state(state)
    assert all(map(is_divided, jax.tree.leaves((nodes.models, nodes.personal))))
    assert nodes.round.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["stream", "resident"])
def test_many_rounds_in_a_program_are_those_of_one_device(memory):
    results = []
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=4, memory=memory)):
        algorithm = make("DFedAvg", execution=execution)
        results.append(execution.run(algorithm, algorithm.init(jax.random.key(1)), cohorts(3), max_rounds=4))
    federation.assert_trees_close(*results, rtol=1e-4, atol=1e-5)
    assert is_divided(jax.tree.leaves(results[1][0].models)[0])


@pytest.mark.slow
def test_a_long_round_runs_as_several_programs():
    batches = fedsim.Batches(size=1, epochs=400)
    results = [run(make(execution=execution, batches=batches), rounds=1) for execution in (fedsim.Jit(), DEVICES)]
    federation.assert_trees_close(*results, rtol=1e-4, atol=1e-5)
    assert is_divided(jax.tree.leaves(results[1][0].models)[0])


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "settings"), [("RelaySGD", {"topology": decentralized.line(8)}), ("ADPSGD", {})])
def test_algorithms_that_are_not_divided_have_all_models_on_every_device(name, settings):
    results = [run(make(name, execution=execution, message_loss=0.3, **settings)) for execution in (fedsim.Jit(), DEVICES)]
    federation.assert_trees_close(*results, rtol=1e-4, atol=1e-5)
    assert jax.tree.leaves(results[1][0].models)[0].sharding.is_fully_replicated


@pytest.mark.slow
def test_a_state_moves_between_devices():
    state, _ = run(make(execution=fedsim.Jit()), rounds=1)
    (cohort,) = cohorts(1)
    results = []
    for execution in (DEVICES, fedsim.Pmap(devices=2), fedsim.Jit()):
        state, _ = make(execution=execution).apply(state, cohort)
        results.append(state)
    alone = make(execution=fedsim.Jit())
    expected, _ = run(alone, rounds=1)
    for state in results:
        expected, _ = alone.apply(expected, cohort)
        federation.assert_trees_close(state, expected, rtol=1e-4, atol=1e-5)


def test_nodes_that_are_no_multiple_of_the_devices_are_on_every_device():
    data = federation.data(sizes=(3, 4, 2, 5, 1, 6))
    cohort = fedsim.UniformSampler(data, clients=6, seed=0).cohort(0)
    states = []
    for execution in (fedsim.Jit(), DEVICES):
        algorithm = make(topology=decentralized.ring(6), execution=execution)
        states.append(algorithm.apply(algorithm.init(jax.random.key(1)), cohort)[0])
    federation.assert_trees_close(*states, rtol=1e-4, atol=1e-5)
    assert jax.tree.leaves(states[1].models)[0].sharding.is_fully_replicated


def test_each_device_runs_its_own_clients():
    cohort = fedsim.Cohort(DATA, np.array([6, 1, 0, 7, 3]), 0, fedsim.rng.root(0))
    plan = plan_round(cohort, Layout(slots=5, devices=4, block=2), make().batches)
    clients = [plan.client[queue[:length]] for queue, length in zip(plan.queue, plan.length, strict=True)]
    assert [sorted(own.tolist()) for own in clients] == [[0, 1], [3], [], [6, 7]]


@pytest.mark.slow
def test_evaluation_reads_the_nodes_of_all_devices():
    states = [run(make(execution=execution))[0] for execution in (fedsim.Jit(), DEVICES)]
    own = [fedsim.evaluate_personalized(make(), state, DATA, DATA) for state in states]
    assert own[0].overall["loss"] == pytest.approx(own[1].overall["loss"], rel=1e-4)
    mean = [fedsim.evaluate(make().model, state.params, DATA) for state in states]
    assert mean[0].overall["loss"] == pytest.approx(mean[1].overall["loss"], rel=1e-4) != own[0].overall["loss"]


def compiled(**settings):
    algorithm = make(**settings)
    return DEVICES.lower(algorithm, cohorts(1, clients=8)[0]).compile().as_text()


def permuted_bytes(text):
    """Returns the bytes of all messages of ``collective-permute``, each once per pair of devices."""
    lines = [line for line in text.splitlines() if re.search(r" collective-permute(-start)?\(", line)]
    rows = [[int(n) for n in re.search(r"f32\[([\d,]+)\]", line)[1].split(",")] for line in lines]
    pairs = [len(re.findall(r"\{\d+,\d+\}", re.search(r"source_target_pairs=\{(.*?)\}\}", line)[0])) for line in lines]
    return sum(4 * int(np.prod(shape)) * count for shape, count in zip(rows, pairs, strict=True))


def test_devices_send_each_other_only_what_the_graph_needs():
    node = 4 * (3 * 4 + 4)  # bytes of a model
    ring = compiled()
    assert "all-gather" not in ring and permuted_bytes(ring) == 4 * 2 * node  # each device sends a model to both sides
    star = compiled(topology=decentralized.star(8))
    # Six nodes send to the center, which is beside a seventh. To the other devices the center sends as many rows, because what
    # devices send at the same time has one shape.
    assert "all-gather" not in star and permuted_bytes(star) == 3 * (2 + 2) * node


@pytest.mark.first(13)
@pytest.mark.parametrize("topology", [
    decentralized.ring(12), decentralized.star(12), decentralized.scale_free(12), decentralized.hypercube(16),
    decentralized.base_graph(12), decentralized.equi_dynamic(8, period=5), decentralized.erdos_renyi(40, probability=0.1),
], ids=lambda topology: topology.name)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_mixing_on_devices_is_the_product_with_the_matrix(topology, padded):
    matrices = topology.matrices()
    mesh = Mesh(np.array(jax.devices()[:4]), ("devices",))
    mixer = jax.jit(Mixer.of(matrices, padded=padded, mesh=mesh))
    x = np.random.default_rng(0).normal(size=(topology.nodes, 2)).astype(np.float32)
    values = jax.device_put(x, NamedSharding(mesh, P("devices")))
    for round in range(topology.period + 1):
        mixed = mixer(values, jnp.int32(round))
        np.testing.assert_allclose(mixed, matrices[round % topology.period].toarray() @ x, rtol=1e-4, atol=1e-5)
