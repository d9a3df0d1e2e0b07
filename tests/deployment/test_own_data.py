"""Nodes with data of their own: the result is that of a simulation on all of them, and data that do not fit are named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types

import numpy as np
import pytest
from deployment.test_deployment import NearNodes, deployed, federation, largest_difference

import fedsim
from fedsim.commands import _deploy as command
from fedsim.deployment import Node, NodeError
from fedsim.deployment import _deploy as deploying
from fedsim.deployment._deploy import for_nodes, run_on
from fedsim.deployment._flower import FlowerNodes
from fedsim.deployment._node import _built
from fedsim.deployment._own_data import describe_data, described_population, load_own_data
from fedsim.experiment import RunConfig, Settings


def halves():
    """Returns two populations, of five and of seven clients of the digits."""
    data = fedsim.datasets.load("digits(clients=12)").train
    return [data.select(data.client_ids[:5]), data.select(data.client_ids[5:])]


class OwnNodes(NearNodes):
    """Nodes in this process, each with clients of its own."""

    def start(self):
        made = [self.make(own) for own in halves()]
        folders = [self.folder / "nodes" / f"{number}" for number in range(2)]
        self.nodes = [Node(*each, number, 2, folders[number], own=True) for number, each in enumerate(made)]


def on_own_data(algorithm, own):
    return algorithm, fedsim.UniformSampler(own, clients=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedAvg"])
def test_nodes_with_their_own_data_train_as_a_simulation_of_all(name, tmp_path):
    algorithm, sampler = federation(name)
    nodes = OwnNodes(functools.partial(on_own_data, algorithm), tmp_path, 2)
    told = {number: facts["data"] for number, facts in nodes.introductions().items()}
    population, nodes.first = described_population(told, sampler.data)
    assert nodes.first == [0, 5]
    assert not any(column.any() for column in population.columns.values())  # The server has no examples.
    apart = deployed(algorithm, tmp_path, nodes)
    far = fedsim.UniformSampler(population, clients=6, seed=0)
    apart.execution.check(far.cohort(0))
    state = other = algorithm.init(fedsim.rng.root(0))
    for round in range(3):
        state, _ = algorithm.apply(state, sampler.cohort(round))
        other, _ = apart.apply(other, far.cohort(round))
    assert largest_difference(state.params, other.params) < 1e-6


def test_features_of_a_node_that_differ_and_clients_of_two_nodes_are_named():
    one, other = halves()
    told = {0: describe_data(one), 1: describe_data(other)}
    x = other.columns["x"]
    wider = dataclasses.replace(other, columns=dict(other.columns) | {"x": np.concatenate([x, x], axis=-1)})
    with pytest.raises(NodeError, match=r"Expected the feature 'x' of shape \[.*\] and dtype .* at node 1, .* got it of shape"):
        described_population(told | {1: describe_data(wider)}, one)
    without = dataclasses.replace(other, columns={"x": x})
    with pytest.raises(NodeError, match=r"Expected the feature 'y' .* at node 1, .* got it missing: convert"):
        described_population(told | {1: describe_data(without)}, one)
    with pytest.raises(NodeError, match=f"Nodes 0 and 1 both have a client '{one.client_ids[0]}': rename one of them"):
        described_population(told | {1: describe_data(one)}, one)


def test_labels_of_a_node_that_no_class_has_are_refused_there(tmp_path):
    algorithm, _ = federation("FedAvg")
    own = halves()[0]
    wrong = dataclasses.replace(own, columns=dict(own.columns) | {"y": np.full_like(own.columns["y"], 10)})
    with pytest.raises(ValueError, match="10"):
        Node(*on_own_data(algorithm, wrong), 0, 2, tmp_path, own=True)


def test_a_packed_file_of_a_node_is_read_and_a_missing_one_is_named(tmp_path):
    place = str(tmp_path / "of-{node}.h5")
    halves()[1].save(tmp_path / "of-1.h5")
    assert load_own_data(RunConfig(), place, 1).client_ids == halves()[1].client_ids
    with pytest.raises(FileNotFoundError, match=r"Node 0 has no data, because there is no .*of-0\.h5: put a packed file there"):
        load_own_data(RunConfig(), place, 0)


def test_the_place_of_the_nodes_data_is_absolute_and_may_be_in_the_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    places = []

    def deploy(*_, node_data, **__):
        places.append(node_data)
        return types.SimpleNamespace(interrupted=0)

    monkeypatch.setattr(command, "deploy", deploy)
    for place in ("of-{node}.h5", "~/of-{node}.h5"):
        assert command.main(["--model", "digits_logistic", "--folder", "run", "--node-data", place]) == 0
    assert places == [f"{tmp_path}/of-{{node}}.h5"] * 2
    halves()[1].save(tmp_path / "of-1.h5")
    assert load_own_data(RunConfig(), "~/of-{node}.h5", 1).num_clients == 7


class Network(OwnNodes):
    """Nodes in this process for `run_on`, which starts and ends them."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("change", ["labels", "clients"])
def test_changed_data_of_a_node_are_refused_when_a_run_goes_on(change, tmp_path, monkeypatch):
    """Other labels of as many examples, and a client less; unchanged data are accepted."""
    algorithm, _ = federation("FedAvg")
    config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", rounds=1, clients=6)
    settings = Settings(folder=str(tmp_path), progress=False)

    def go_on():
        network = Network(functools.partial(on_own_data, algorithm), tmp_path, 2)
        return run_on(network, config, settings, node_data="{node}.h5", table=False)

    monkeypatch.setattr(deploying, "run_experiment", lambda *_, **__: "it goes on")
    assert [go_on(), go_on()] == ["it goes on"] * 2
    one, other = halves()
    if change == "labels":
        other = dataclasses.replace(other, columns=dict(other.columns) | {"y": (other.columns["y"] + 1) % 10})
        what = r"examples \(hash\): '\w+', now '\w+'"
    else:
        other, what = other.select(other.client_ids[1:]), "clients: 7, now 6"
    monkeypatch.setattr(sys.modules[__name__], "halves", lambda: [one, other])
    with pytest.raises(NodeError, match=rf"Node 1 has other data than when the run in .* began \({what}\): restore them"):
        go_on()


def test_a_node_with_other_versions_is_named(tmp_path, monkeypatch):
    from fedsim.deployment import _node

    algorithm, sampler = federation("FedAvg")
    monkeypatch.setattr(_node, "versions", lambda: {"fedsim": fedsim.__version__, "jax": "0.0.1"})
    nodes = NearNodes(lambda: (algorithm, sampler), tmp_path, 2)
    with pytest.raises(NodeError, match=r"Expected jax='.*' at node 0, as at the server, got '0\.0\.1': use the same versions"):
        deployed(algorithm, tmp_path, nodes).execution.check(sampler.cohort(0))


class _Named(FlowerNodes):
    """Two nodes in this process, and the names by which Flower knows them and others.

    A name has a node, or the error that Flower reports when the heartbeat of a node whose process has ended is missed.
    """

    def __init__(self, nodes):
        class Processes(contextlib.nullcontext):
            count = 2

            def wait_until(self, condition, otherwise):
                assert condition()

        super().__init__(Processes())
        self.nodes, self.frames, self.late = nodes, [], []

    def _of_relay(self, facts, blobs=None):
        if facts["do"] == "nodes":
            return {"nodes": list(self.nodes)}
        if facts["do"] == "pull":
            if not self.frames:
                self.frames, self.late = self.late, []
            return {"replies": len(self.frames)}
        name, node = {"message": f"to {facts['node']}"}, self.nodes[facts["node"]]
        if isinstance(node, str):
            self.late.append((name | {"error": node}, {}))
        else:
            self.frames.append((name, {"reply": node.answer(blobs)}))
        return name

    def _frame(self):
        return self.frames.pop(0)


def two_nodes(folder, numbers=(0, 1)):
    algorithm, _ = federation("FedAvg")
    return [
        Node(*on_own_data(algorithm, own), number, 2, folder / str(at), own=True)
        for at, (number, own) in enumerate(zip(numbers, halves(), strict=True))
    ]


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_each_node_has_a_number_of_its_own(numbers, tmp_path):
    """Otherwise the clients of one node would be left out."""
    made = dict(zip(["11", "22"], two_nodes(tmp_path, numbers), strict=True))
    if numbers[0] == numbers[1]:
        with pytest.raises(NodeError, match=rf"numbers from 0 to 1, each once, got \[{numbers[0]}, {numbers[0]}\]"):
            _Named(made).__enter__()
    else:
        with _Named(made) as nodes:
            assert sorted(nodes.introductions()) == [0, 1]


def test_a_node_that_was_started_again_before_the_run_is_met_by_its_new_name(tmp_path):
    """Flower knows its former name, too, for some time. A node that has none but that is missing."""
    zero, one = two_nodes(tmp_path)
    with _Named({"former": "node unavailable", "11": one, "22": zero}) as nodes:
        assert nodes._ids == {0: "22", 1: "11"}
    with pytest.raises(NodeError, match="A node did not answer: node unavailable"):
        _Named({"former": "node unavailable", "11": one}).__enter__()


def test_a_node_beyond_those_of_the_run_is_noticed_though_the_others_answer_first(tmp_path):
    zero, one = two_nodes(tmp_path)
    _, another = two_nodes(tmp_path / "more")

    class Later(_Named):
        def _of_relay(self, facts, blobs=None):
            reply = super()._of_relay(facts, blobs)
            if facts["do"] == "send" and facts["node"] == "33":
                self.late.append(self.frames.pop())
            return reply

    with pytest.raises(NodeError, match=r"numbers from 0 to 1, each once, got \[0, 1, 1\]"):
        Later({"11": zero, "22": one, "33": another}).__enter__()


def test_a_node_needs_no_file_of_first_parameters(tmp_path):
    """They come from the server; the options that say how it reads them have no effect at a node."""
    file = tmp_path / "first.npz"
    np.savez(file, a=np.zeros(1))
    config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", init_from=str(file), init_partly=True)
    given = for_nodes(config, Settings(), 2, None)
    file.unlink()
    assert _built(given, 1, tmp_path).number == 1


@pytest.mark.parametrize("sampler", ["power_of_choice(candidates=8)", "cyclic_poisson(cycle=2)", "importance_by_norm"])
def test_a_sampler_need_not_fit_the_clients_of_a_node(sampler, tmp_path):
    """It is one of all clients. A node with less than 8 of them, or than 6 in each group, sends what it observes."""
    for number, own in enumerate(halves()):
        own.save(tmp_path / f"{number}.h5")
    config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", clients=6, sampler=sampler, weighting="uniform")
    given = for_nodes(config, Settings(), 2, f"{tmp_path}/{{node}}.h5")
    node = _built(given, 0, tmp_path)
    assert node.data.num_clients == 5 and node._algorithm.update_norms == (sampler == "importance_by_norm")
