"""Deployment: the server's and the clients' part of a round, messages, memories of nodes, refusals; two nodes over Flower."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import deployment
from fedsim.configuration import Experiment
from fedsim.deployment import Deployed, Node, NodeError, Nodes, Replies
from fedsim.experiment import RunConfig, Settings, build


class NearNodes(Nodes):
    """Nodes in this process. Those in ``dead`` do not answer; those in ``unheard`` work, and their answers get lost."""

    def __init__(self, make, folder, count):
        self.count, self.make, self.folder = count, make, folder
        self.dead, self.unheard, self.last, self.asked = set(), set(), None, 0
        self.start()

    def start(self):
        folders = [self.folder / "nodes" / f"{number}" for number in range(self.count)]
        self.nodes = [Node(*self.make(), number, self.count, folder) for number, folder in enumerate(folders)]

    def ask(self, requests):
        self.asked += 1
        if self.last is not None and self.asked > self.last:
            return Replies({}, dict.fromkeys(requests, "it is away"))
        answers = {number: self.nodes[number].answer(blobs) for number, blobs in requests.items() if number not in self.dead}
        lost = {number: "it is away" for number in requests if number in self.dead | self.unheard}
        return Replies({number: reply for number, reply in answers.items() if number not in lost}, lost)


def federation(algorithm: str, **options):
    """Returns an algorithm on the digits, and a sampler of six of its clients."""
    data = fedsim.datasets.load("digits(clients=12)").train
    options |= {"server_learning_rate": 0.01} if algorithm == "FedAdam" else {}
    made = getattr(fedsim.algorithms, algorithm)(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
        execution=fedsim.Jit(), **options,
    )  # fmt: skip
    return made, fedsim.UniformSampler(data, clients=6, seed=0)


def deployed(algorithm, folder, nodes):
    return dataclasses.replace(algorithm, execution=Deployed(nodes=nodes, folder=folder))


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedAdam", "FedAvg"])
def test_a_deployed_run_ends_as_a_simulated_one(name, tmp_path):
    algorithm, sampler = federation(name)
    nodes = NearNodes(lambda: federation(name), tmp_path, 2)
    apart = deployed(algorithm, tmp_path, nodes)
    apart.execution.check(sampler.cohort(0))
    state = other = algorithm.init(jax.random.key(0))
    for round in range(4):
        state, info = algorithm.apply(state, sampler.cohort(round))
        if round == 2:
            nodes.start()  # What clients keep survives a restart of the nodes.
        other, got = apart.apply(other, sampler.cohort(round))
        assert jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, atol=1e-5), info, got))
    assert largest_difference(state.params, other.params) < 1e-6
    lines = [json.loads(line) for line in (tmp_path / "deliveries.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all(line["answered"] == [0, 1] and not line["lost"] for line in lines)


@pytest.mark.slow
def test_with_one_node_the_bits_are_those_of_one_device(tmp_path):
    algorithm, sampler = federation("FedAvg")
    apart = deployed(algorithm, tmp_path, NearNodes(lambda: federation("FedAvg"), tmp_path, 1))
    state = other = algorithm.init(jax.random.key(0))
    for round in range(3):
        state, _ = algorithm.apply(state, sampler.cohort(round))
        other, _ = apart.apply(other, sampler.cohort(round))
    assert largest_difference(state.params, other.params) == 0


@pytest.mark.slow
def test_clients_of_a_lost_node_take_no_step(tmp_path):
    """In round 2 the answer of node 1 is lost: the result is that of a round with the other clients alone."""
    algorithm, sampler = federation("SCAFFOLD")
    nodes = NearNodes(lambda: federation("SCAFFOLD"), tmp_path, 2)
    apart = deployed(algorithm, tmp_path, nodes)
    state = other = algorithm.init(jax.random.key(0))
    for round in range(4):
        cohort, nodes.unheard = sampler.cohort(round), {1} if round == 1 else set()
        work = np.where((round == 1) & (cohort.clients % 2 == 1), 0, 1).astype(np.float32)
        state, info = algorithm.apply(state, dataclasses.replace(cohort, work=work))
        if nodes.unheard:
            with pytest.warns(UserWarning, match="Node 1 did not answer in round 2, because it is away: the updates of its"):
                other, got = apart.apply(other, cohort)
        else:
            other, got = apart.apply(other, cohort)
        assert int(got.num_aggregated) == int(info.num_aggregated)
        assert got.clients["num_steps"].tolist() == info.clients["num_steps"].tolist()
    assert largest_difference(state.params, other.params) < 1e-6
    nodes.dead = {0, 1}
    with (
        pytest.warns(UserWarning, match="did not answer"),
        pytest.raises(NodeError, match="No node has answered in round 5: it is away"),
    ):
        apart.apply(other, sampler.cohort(4))


@pytest.mark.slow
def test_rounds_that_run_again_have_the_memories_of_before(tmp_path):
    """As after a resume from an earlier checkpoint."""
    algorithm, sampler = federation("SCAFFOLD")
    apart = deployed(algorithm, tmp_path, NearNodes(lambda: federation("SCAFFOLD"), tmp_path, 2))
    state, states = algorithm.init(jax.random.key(0)), []
    for round in range(4):
        states.append(state)
        state, _ = apart.apply(state, sampler.cohort(round))
    again = states[2]
    for round in (2, 3):
        again, _ = apart.apply(again, sampler.cohort(round))
    assert largest_difference(state.params, again.params) == 0


@pytest.mark.slow
def test_two_runs_on_the_same_nodes_keep_their_memories_apart(tmp_path):
    """As of an app that is started for another folder between two parts of a run. Lost memories are named.

    The memories of two runs in one process would be taken for each other, so a node refuses a second run.
    """
    algorithm, sampler = federation("SCAFFOLD")
    nodes = NearNodes(lambda: federation("SCAFFOLD"), tmp_path, 2)
    whole = algorithm.init(jax.random.key(0))
    for round in range(4):
        whole, _ = algorithm.apply(whole, sampler.cohort(round))

    def trained(state, name, rounds, *, again=True):
        (tmp_path / name).mkdir(exist_ok=True)
        if again:
            nodes.start()
        apart = dataclasses.replace(algorithm, execution=Deployed(nodes=nodes, folder=tmp_path / name, name=name))
        for round in rounds:
            state, _ = apart.apply(state, sampler.cohort(round))
        return state

    one = trained(algorithm.init(jax.random.key(0)), "one", range(2))
    with pytest.raises(
        NodeError, match="Node 0: ValueError: Expected rounds of the run 'one', got one of the run 'other': start"
    ):
        trained(algorithm.init(jax.random.key(1)), "other", range(1), again=False)
    trained(algorithm.init(jax.random.key(1)), "other", range(2))
    assert largest_difference(trained(one, "one", range(2, 4)).params, whole.params) < 1e-6
    shutil.rmtree(tmp_path / "nodes" / "1" / "other")
    with pytest.raises(NodeError, match=r"Node 1: ValueError: Expected .*other.2 with what clients keep .*, got none: restore"):
        trained(whole, "other", range(2, 3))


def test_a_name_of_a_run_that_is_a_path_is_refused(tmp_path):
    algorithm, sampler = federation("SCAFFOLD")
    nodes = NearNodes(lambda: federation("SCAFFOLD"), tmp_path, 2)
    apart = dataclasses.replace(algorithm, execution=Deployed(nodes=nodes, folder=tmp_path, name="../other"))
    with pytest.raises(NodeError, match=r"Expected a name of letters and digits for a run, got '\.\./other'"):
        apart.apply(algorithm.init(jax.random.key(0)), sampler.cohort(0))


@pytest.mark.slow
def test_a_run_whose_nodes_were_lost_is_continued(tmp_path):
    algorithm, sampler = federation("SCAFFOLD")
    states = []
    for name in ("whole", "in two parts"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "deployment.json").write_text('{"nodes": 2}')
        nodes = NearNodes(lambda: federation("SCAFFOLD"), folder, 2)
        run = functools.partial(
            fedsim.experiment.run, deployed(algorithm, folder, nodes), sampler, rounds=5, folder=folder, checkpoint_every=1,
            progress=False,
        )  # fmt: skip
        if name != "whole":
            nodes.last = 3
            with pytest.warns(UserWarning, match="did not answer in round 4"), pytest.raises(NodeError, match="round 4"):
                run()
            nodes.last = None
            nodes.start()
        states.append(run().state)
    assert largest_difference(states[0].params, states[1].params) == 0
    with pytest.raises(ValueError, match="keep between rounds is at its nodes: continue it with `fedsim resume`"):
        fedsim.experiment.restore(folder, algorithm, data=sampler.data)


@pytest.mark.slow
def test_the_model_is_taken_out_while_a_run_goes_on_and_starts_another_one(tmp_path):
    """In round 3, when an earlier one is on the disk."""
    algorithm, sampler = federation("FedAvg")
    exported, rounds = tmp_path / "model.npz", []

    class Exporting(NearNodes):
        def ask(self, requests):
            replies = super().ask(requests)
            if self.asked == 3:
                rounds.append(fedsim.experiment.saved_round(tmp_path / "run", "last"))
                assert fedsim.commands.main(["export", str(tmp_path / "run"), str(exported)]) == 0
            return replies

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "deployment.json").write_text('{"nodes": 2}')
    apart = deployed(algorithm, tmp_path / "run", Exporting(lambda: federation("FedAvg"), tmp_path / "run", 2))
    fedsim.experiment.run(apart, sampler, rounds=3, folder=tmp_path / "run", checkpoint_every=1, progress=False)
    (round,) = rounds
    assert round == 2  # The results of a round are saved before the next one begins.
    params = fedsim.experiment.run(algorithm, sampler, rounds=round, progress=False).state.params
    expected = {f"{module}/{name}": each for module, named in params.items() for name, each in named.items()}
    taken_out = fedsim.read_params(exported)
    assert taken_out.keys() == expected.keys()
    for name, each in taken_out.items():
        np.testing.assert_allclose(each, expected[name], atol=1e-6)
    config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", init_from=str(exported))
    first = build(config, Settings()).algorithm.init(jax.random.key(1))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(jnp.all(a == b)), list(taken_out.values()), jax.tree.leaves(first.params))
    )


@pytest.mark.slow
def test_a_deployed_round_is_repeated_with_the_clients_that_answered(tmp_path):
    """In round 2 the answer of node 1 is lost: the state before round 3, and a simulation by the record, are without it."""
    algorithm, sampler = federation("FedAvg")
    (tmp_path / "deployment.json").write_text('{"nodes": 2}')
    nodes = NearNodes(lambda: federation("FedAvg"), tmp_path, 2)
    apart = deployed(algorithm, tmp_path, nodes)
    state = apart.init(jax.random.key(0))
    for round in range(3):
        nodes.unheard = {1} if round == 1 else set()
        with contextlib.nullcontext() if round != 1 else pytest.warns(UserWarning, match="Node 1 did not answer in round 2"):
            state, _ = apart.apply(state, sampler.cohort(round))
    record = fedsim.systems.Deliveries.read(tmp_path / "deliveries.jsonl")
    other, again = algorithm.init(jax.random.key(0)), record.sampler(sampler, 3)
    for round in range(3):
        other, _ = algorithm.apply(other, again.cohort(round))
    assert largest_difference(state.params, other.params) < 1e-6
    assert largest_difference(other.params, _simulated(algorithm, sampler, 3).params) > 1e-4
    with pytest.raises(ValueError, match="Expected rounds <= 3, the rounds in .*, got rounds=4"):
        record.sampler(sampler, 4)


def _simulated(algorithm, sampler, rounds):
    state = algorithm.init(jax.random.key(0))
    for round in range(rounds):
        state, _ = algorithm.apply(state, sampler.cohort(round))
    return state


def test_a_node_reports_its_errors_and_other_data(tmp_path):
    algorithm, sampler = federation("FedAvg")
    other = fedsim.datasets.load("digits(clients=13)").train
    nodes = NearNodes(lambda: (algorithm, fedsim.UniformSampler(other, clients=6, seed=0)), tmp_path, 2)
    apart = deployed(algorithm, tmp_path, nodes)
    with pytest.raises(NodeError, match=r"Expected clients=12 at node 0, as at the server, got 13: use the same versions"):
        apart.execution.check(sampler.cohort(0))
    with pytest.raises(NodeError, match="Node 0: ValueError: Expected the clients of node 0, with as many examples"):
        apart.apply(algorithm.init(jax.random.key(0)), sampler.cohort(0))


def test_messages_keep_every_dtype():
    arrays = [
        jnp.array([1.5, -2.0], jnp.bfloat16), jnp.array([0.5], jnp.float8_e4m3fn), np.array([[True, False]]), np.zeros([0, 3]),
        np.float32(3), np.arange(4, dtype=np.uint32), jax.random.split(jax.random.key(1), 3),
    ]  # fmt: skip
    message = deployment.encode(arrays, {"round": 3})
    decoded, facts = deployment.decode(message)
    assert facts == {"round": 3}
    for one, other in zip(arrays, decoded, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bool(jnp.all(one == other))
    for damaged in (message[:-1], message + b"x", b"", b"other" + message):
        with pytest.raises(ValueError, match="Expected a message of fedsim, got"):
            deployment.decode(damaged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attack": "sign_flip"}, "got attack='sign_flip': simulate it"),
        ({"message_loss": 0.1}, "got message_loss=0.1: simulate it"),
        ({"stop_when": "spent(seconds=9)"}, "which has no virtual clock, got stop_when='spent"),
        ({"algorithm": "dpsgd"}, "DPSGD cannot be deployed, because it has no server"),
        ({"algorithm": "fedper"}, "FedPer cannot be deployed, because clients have models of their own"),
        ({"algorithm": "mime"}, "a round with a single clients.aggregate, got Mime with the calls gradient, update"),
        ({"aggregator": "coordinate_median"}, "CoordinateMedian cannot be deployed, because it needs every single update"),
    ],
)
def test_what_cannot_be_deployed_is_refused(options, message):
    config, settings = RunConfig(**options), Settings(folder="no folder")
    with pytest.raises(ValueError, match=message):  # noqa: PT012 (either may refuse)
        deployment.check_options(config, settings)
        deployment.check_deployable(build(config, settings), 2)


@pytest.mark.parametrize(
    ("aggregator", "message"),
    [
        (fedsim.aggregators.GaussianMechanism(0.5, clip=1.0, denominator=4), "nodes would send sums without its noise"),
        (fedsim.aggregators.DistributedMechanism(0.5, clip=1.0, clients=6), "the server sends the keys of the clients' noise"),
    ],
    ids=["noise of the server", "noise of the clients"],
)
def test_noise_that_would_not_protect_is_refused(aggregator, message):
    algorithm, sampler = federation("FedAvg", aggregator=aggregator, weighting="uniform")
    with pytest.raises(ValueError, match=f"{type(aggregator).__name__} cannot be deployed, because {message}"):
        deployment.check_deployable(Experiment(algorithm, sampler, sampler.data), 2)


def test_rounds_with_several_calls_are_refused(tmp_path):
    data = fedsim.datasets.load("digits(clients=12)").train
    algorithm = fedsim.algorithms.Mime(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10)
    )
    apart = deployed(algorithm, tmp_path, NearNodes(lambda: federation("FedAvg"), tmp_path, 2))
    with pytest.raises(ValueError, match="Expected a round with a single clients.aggregate, got Mime with the calls"):
        apart.apply(algorithm.init(jax.random.key(0)), fedsim.UniformSampler(data, clients=6, seed=0).cohort(0))


def test_cohorts_of_which_nodes_know_too_little_are_refused(tmp_path):
    algorithm, sampler = federation("FedAvg")
    apart = deployed(algorithm, tmp_path, NearNodes(lambda: federation("FedAvg"), tmp_path, 2))
    arriving = fedsim.samplers.Arriving(sampler, np.zeros(sampler.data.num_examples, int))
    with pytest.raises(ValueError, match="without arriving examples, got one with them: nodes have none"):
        apart.apply(algorithm.init(jax.random.key(0)), arriving.cohort(0))
