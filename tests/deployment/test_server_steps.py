"""Server steps of synchronization models on nodes in this process, which answer as late as a test says."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import systems
from fedsim.configuration import RunConfig, Settings, build, following, prepared
from fedsim.deployment import DeployedSteps, Node, Nodes, Outcome, RealServer, Received
from fedsim.experiment.driving import Checkpoints
from fedsim.systems import Deliveries


class LateNodes(Nodes):
    """Nodes whose clock advances by a second with every call of `receive`; a message takes the seconds that ``delay`` says."""

    def __init__(self, make, folder, count, delay=lambda number, node: 1 + (7 * number + 3 * node) % 5):
        self.count, self.make, self.folder, self.delay = count, make, folder, delay
        self.now, self.sent, self.dead, self.waiting = 0.0, 0, set(), []
        self.start()

    def start(self):
        folders = [self.folder / "nodes" / f"{number}" for number in range(self.count)]
        self.nodes = [Node(*self.make(), number, self.count, folder) for number, folder in enumerate(folders)]

    def clock(self):
        return self.now

    def is_there(self, number):
        return number not in self.dead

    def send(self, number, blobs):
        self.sent += 1
        message = f"{self.sent}"
        self.waiting.append((self.now + self.delay(self.sent, number), message, number, blobs))
        return message

    def receive(self):
        self.now += 1
        due = [each for each in self.waiting if each[0] <= self.now or each[2] in self.dead]
        self.waiting = [each for each in self.waiting if each not in due]
        return [
            Received(message, number, None, "its worker has ended") if number in self.dead
            else Received(message, number, self.nodes[number].answer(blobs))
            for _, message, number, blobs in due
        ]  # fmt: skip


class EverySecond(systems.Synchronization):
    """A model of a user: a server step every four seconds with what has arrived."""

    def begin(self, server):
        server.dispatch(4)
        server.call_at(server.now + 4, "step")

    def received(self, server, update):
        server.dispatch(1)

    def timer(self, server, name):
        if server.buffer:
            server.aggregate(weights=1 / (1 + server.staleness()))
        server.call_at(server.now + 4, "step")


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(systems.Law):
    """The seconds per step of each client."""

    seconds: np.ndarray

    def draw(self, generator, n):
        return self.seconds


def federation(name="FedAvg", **options):
    data = fedsim.datasets.load("digits(clients=12)").train
    options |= {"server_learning_rate": 0.01} if name == "FedAdam" else {}
    made = getattr(fedsim.algorithms, name)(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
        execution=fedsim.Jit(), **options,
    )  # fmt: skip
    return made, fedsim.UniformSampler(data, clients=6, seed=0)


def ready(model, name="FedAvg", **options):
    """Returns an algorithm whose server steps may be deployed, and its sampler."""
    algorithm, sampler = federation(name, **options)
    made = prepared(algorithm, sampler, model)
    return dataclasses.replace(made.algorithm, staleness=fedsim.Staleness(bound=0, mixing=made.mixing)), sampler


def deployed(model, folder, count=2, policy=None, delay=None, name="FedAvg", **options):
    algorithm, sampler = ready(model, name, **options)
    delay = {} if delay is None else {"delay": delay}
    nodes = LateNodes(lambda: ready(model, name, **options), folder, count, **delay)
    execution = DeployedSteps(
        nodes=nodes, folder=folder, sampler=sampler, synchronization=model, policy=policy or systems.Policy(), clock=nodes.clock
    )
    return dataclasses.replace(algorithm, execution=execution), sampler, nodes


def trained(algorithm, sampler, steps, state=None, start=0):
    state = algorithm.with_memory(algorithm.init(jax.random.key(0)), sampler.data) if state is None else state
    for step in range(start, steps):
        state, info = algorithm.apply(state, sampler.cohort(step))
    return state, info


def simulated(folder, steps, model, name="FedAvg", **options):
    """Returns the state after the recorded steps, in a simulation that has only the record."""
    algorithm, sampler = federation(name, **options)
    made = prepared(algorithm, sampler, model)
    made = following(made.algorithm, sampler, Deliveries.read(folder / "deliveries.jsonl").schedule(steps), mixing=made.mixing)
    return trained(made.algorithm, made.sampler, steps)


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def lines(folder):
    return [json.loads(line) for line in (folder / "deliveries.jsonl").read_text().splitlines()]


MODELS = {
    "buffered": systems.Buffered(size=3, concurrency=5),
    "stale": systems.StaleSynchronous(bound=1),
    "synchronous": systems.Synchronous(over_selection=1.5, deadline=6.0),
    "asynchronous": systems.Asynchronous(concurrency=4),
    "own": EverySecond(),
    "fedbuff": systems.FedBuff(size=2, concurrency=4),
}
TOP = {"aggregator": fedsim.aggregators.Compressed(fedsim.compressors.ErrorFeedback(fedsim.compressors.TopK(fraction=0.1)))}


@pytest.mark.parametrize("model", [MODELS[name] for name in MODELS], ids=list(MODELS))
def test_a_model_does_on_a_real_server_what_it_does_in_a_simulation(model):
    """Each client needs a number of seconds that no other needs, on both."""
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(9)}, sizes=[1] * 9)
    sampler, seconds = fedsim.UniformSampler(data, clients=6, seed=0), np.array([1.0, 2.3, 3.1, 1.7, 4.9, 2.9, 1.3, 5.3, 3.7])
    expected = systems.schedule(
        sampler, 12, steps=np.ones(9, int), synchronization=model,
        devices=systems.Devices(_Given(seconds), availability=None),
    )  # fmt: skip
    now = [0.0]

    def outcomes():
        pending = [each for each in (*server.in_flight.values(), *server._given_up.values()) if np.isinf(each.stop)]
        times = [each.start + seconds[each.client] for each in pending] + [time for time, *_ in server._events[:1]]
        now[0] = max(now[0], min(times))
        return [Outcome(each.number, True) for each in pending if each.start + seconds[each.client] <= now[0]]

    server = RealServer(
        sampler, np.ones(9, int), systems.Policy(), outcomes=outcomes, reachable=lambda: np.ones(9, bool), clock=lambda: now[0]
    )
    model.begin(server)
    while server.version < 12:
        server.next_event(model)
    got = systems.Schedule.joined(list(server.taken)[:12])
    for name in ("client", "round", "version", "weight", "scale"):
        np.testing.assert_array_equal(getattr(got.updates, name), getattr(expected.updates, name))
    np.testing.assert_allclose(got.steps.time, expected.steps.time)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        *(head := [
            ("buffered", "SCAFFOLD", {}), ("asynchronous", "FedAvg", {}), ("stale", "FedAdam", {}),
            ("synchronous", "FedAvg", TOP), ("own", "FedAvg", {}),
        ]),
        *[case for case in itertools.product(
            ["synchronous", "stale", "buffered"], ["FedAvg", "FedAdam", "SCAFFOLD"], [{}, TOP]) if case not in head],
        ("fedbuff", "FedAvg", {}),
    ],
)  # fmt: skip
def test_the_simulator_ends_as_the_deployment_with_its_record(model, name, options, tmp_path):
    model = MODELS[model]
    if name == "SCAFFOLD" and isinstance(model, systems.Buffered):  # Its updates must not be scaled.
        model = dataclasses.replace(model, staleness_weight="constant")
    algorithm, sampler, _ = deployed(model, tmp_path, name=name, **options)
    state, info = trained(algorithm, sampler, 6)
    other, expected = simulated(tmp_path, 6, model, name, **options)
    # In FedAdam's server step, XLA rounds other products in the program of a whole round.
    assert largest_difference(state.params, other.params) <= (1e-6 if name == "FedAdam" else 0)
    assert {line["synchronization"] for line in lines(tmp_path)} == {type(model).__name__}
    size = len(lines(tmp_path)[-1]["updates"]["client"])
    for key in ("weight", "num_steps", "bits_up", "staleness"):
        assert info.clients[key][:size].tolist() == expected.clients[key][:size].tolist()
    stale = [version < line["round"] - 1 for line in lines(tmp_path) for version in line["updates"]["version"]]
    assert any(stale) == (type(model) is not systems.Synchronous)


def test_a_record_is_repeated_by_the_model_that_has_made_it_and_by_no_other(tmp_path):
    """Updates of FedAsync are mixed into the model, which the updates themselves do not say."""
    updates = {name: [0] for name in systems.Updates._fields} | {"weight": [1.0], "scale": [0.6]}
    steps = dict.fromkeys(systems.ServerSteps._fields, 1)
    line = {"round": 1, "synchronization": "Asynchronous", "updates": updates, "steps": steps}
    (tmp_path / "deliveries.jsonl").write_text(json.dumps(line) + "\n")
    config = RunConfig(
        dataset="digits(clients=12)", model="digits_logistic", rounds=1, deliveries=f"{tmp_path / 'deliveries.jsonl'}"
    )
    same = dataclasses.replace(config, synchronization="asynchronous(concurrency=2)")
    assert build(same, Settings()).algorithm.staleness.mixing
    for other, name in ((None, "Synchronous"), ("buffered(size=1, concurrency=4)", "Buffered")):
        with pytest.raises(ValueError, match=f"Expected the synchronization model of .*, Asynchronous, .* got {name}: "):
            build(dataclasses.replace(config, synchronization=other), Settings())


@pytest.mark.parametrize(
    "option", [{"synchronization": "buffered(size=2, concurrency=4)"}, {"response_timeout": 5.0}, {"late_updates": "use"}]
)
def test_a_record_of_whole_rounds_is_repeated_without_a_model(option, tmp_path):
    (tmp_path / "deliveries.jsonl").write_text('{"round": 1, "nodes": 2, "answered": [0, 1]}\n')
    config = RunConfig(dataset="digits(clients=12)", rounds=1, deliveries=f"{tmp_path / 'deliveries.jsonl'}", **option)
    with pytest.raises(ValueError, match=f"Expected no synchronization model .* got {next(iter(option))}=.*: leave it out"):
        build(config, Settings())


@pytest.mark.parametrize("line", [{"nodes": 2, "answered": [0, 1]}, {"updates": {}, "synchronization": "Synchronous"}])
def test_a_record_of_nodes_with_data_of_their_own_is_not_repeated_with_the_dataset(line, tmp_path):
    (tmp_path / "deliveries.jsonl").write_text(json.dumps({"round": 1, "first": [0, 5], **line}) + "\n")
    config = RunConfig(dataset="digits(clients=12)", rounds=1, deliveries=f"{tmp_path / 'deliveries.jsonl'}")
    with pytest.raises(ValueError, match=r"got deliveries=.*, of nodes with data of their own \(--node-data\): repeat it in"):
        build(config, Settings())


class _LosesOne(Nodes):
    """Four nodes with a client each, in this process: one client answers last, and its updates are lost."""

    count = 4

    def __init__(self, last):
        self.last, self.sent, self.nodes = last, [], []

    def send(self, number, blobs):
        self.sent.append((f"{number} {len(self.sent)}", number, blobs))
        return self.sent[-1][0]

    def receive(self):
        assert self.sent, "the server waits for an answer to a message that it has not sent"
        first = min(self.sent, key=lambda each: each[1] == self.last)
        self.sent.remove(first)
        message, number, blobs = first
        lost = number == self.last
        return [Received(message, number, None if lost else self.nodes[number].answer(blobs), "lost" if lost else "")]


@pytest.mark.filterwarnings("ignore:Node . did not answer")
def test_a_client_that_a_model_dispatches_before_it_aggregates_is_sent_its_model(tmp_path):
    """A lost worker is replaced from the current version, and the others, which waited for it, let the server aggregate."""
    data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.3, 0.6, 0.9], np.float32)}, sizes=[1] * 4)
    sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    nodes = _LosesOne(last=int(sampler.cohort(0).clients[1]))
    execution = DeployedSteps(
        nodes=nodes, folder=tmp_path, sampler=sampler, synchronization=systems.StaleSynchronous(bound=2, versions=1)
    )
    algorithm = fedsim.algorithms.Histogram(bins=2, staleness=fedsim.Staleness(bound=0), execution=execution)
    nodes.nodes = [Node(algorithm, sampler, number, 4, tmp_path / f"{number}") for number in range(4)]
    trained(algorithm, sampler, 4)
    assert {each["client"] for line in lines(tmp_path) for each in line["lost"]} == {nodes.last}
    assert len(lines(tmp_path)) == 4


@pytest.mark.slow
def test_after_a_restart_the_run_ends_as_recorded_and_nothing_counts_twice(tmp_path):
    """Server and nodes end after step 3 with clients in flight; the run goes on from the saved state of step 2."""
    model = dataclasses.replace(MODELS["buffered"], staleness_weight="constant")
    algorithm, sampler, _ = deployed(model, tmp_path, name="SCAFFOLD")
    states = [algorithm.with_memory(algorithm.init(jax.random.key(0)), sampler.data)]
    for step in range(3):
        states.append(algorithm.apply(states[-1], sampler.cohort(step))[0])
    first = lines(tmp_path)
    Checkpoints(tmp_path / "checkpoints").save(2, {"w": np.ones(1)})  # What clients kept then stays at the nodes.
    algorithm, sampler, _ = deployed(model, tmp_path, name="SCAFFOLD")
    state, _ = trained(algorithm, sampler, 6, states[2], start=2)
    assert lines(tmp_path)[:2] == first[:2]
    numbers = [number for line in lines(tmp_path) for number in line["updates"]["number"]]
    assert len(set(numbers)) == len(numbers)
    other, _ = simulated(tmp_path, 6, model, "SCAFFOLD")
    assert largest_difference(state.params, other.params) == 0


@pytest.mark.slow
def test_a_restart_of_synchronous_rounds_changes_nothing(tmp_path):
    """All clients of a round start from the model of the checkpoint, so that they are sent it again."""
    ends = []
    for name in ("whole", "in two parts"):
        folder = tmp_path / name
        folder.mkdir()
        algorithm, sampler, _ = deployed(systems.Synchronous(), folder, name="SCAFFOLD")
        state, _ = trained(algorithm, sampler, 3)
        if name != "whole":
            algorithm, sampler, _ = deployed(systems.Synchronous(), folder, name="SCAFFOLD")
        state, _ = trained(algorithm, sampler, 5, state, start=3)
        ends.append(state)
    assert largest_difference(ends[0].params, ends[1].params) == 0


@pytest.mark.slow
def test_a_node_that_is_away_for_a_time(tmp_path):
    """Node 1 is lost with clients in flight, and comes back; its late answers do not exist, and the others go on."""
    algorithm, sampler, nodes = deployed(MODELS["buffered"], tmp_path)
    state, _ = trained(algorithm, sampler, 2)
    nodes.dead = {1}
    with pytest.warns(UserWarning, match=r"Node 1 did not answer, because its worker has ended: the updates of its \d clients"):
        state, _ = trained(algorithm, sampler, 5, state, start=2)
    nodes.dead = set()
    state, _ = trained(algorithm, sampler, 9, state, start=5)
    recorded = lines(tmp_path)
    away = [client % 2 for line in recorded[3:5] for client in line["updates"]["client"]]
    assert 1 in [client % 2 for line in recorded[6:] for client in line["updates"]["client"]]
    assert any(lost["node"] == 1 for line in recorded for lost in line["lost"])
    assert 0 in away
    other, _ = simulated(tmp_path, 9, MODELS["buffered"])
    assert largest_difference(state.params, other.params) == 0


@pytest.mark.slow
def test_an_answer_after_the_timeout_is_late(tmp_path):
    """Each second message takes 30 seconds; the server waits for 5, and another client takes over."""
    policy = systems.Policy(timeout=5.0)
    delay = lambda number, node: 30 if number % 2 else 1  # noqa: E731
    algorithm, sampler, _ = deployed(systems.Synchronous(), tmp_path, policy=policy, delay=delay)
    state, _ = trained(algorithm, sampler, 4)
    recorded = lines(tmp_path)
    assert sum(line["steps"]["late"] for line in recorded) > 0
    assert all(np.all(np.subtract(line["updates"]["stop"], line["updates"]["start"]) < 6) for line in recorded)
    other, _ = simulated(tmp_path, 4, systems.Synchronous())
    assert largest_difference(state.params, other.params) == 0


class _AtOnce(Nodes):
    """A node in this process whose answers are there at once, one for each call of `receive`."""

    count, sent = 1, 0

    def __init__(self):
        self.node, self.replies = None, []

    def send(self, number, blobs):
        self.sent += 1
        self.replies.append(Received(f"{self.sent}", number, self.node.answer(blobs)))
        return f"{self.sent}"

    def receive(self):
        return [self.replies.pop(0)] if self.replies else []


def test_the_work_of_the_server_itself_counts_against_no_client(tmp_path):
    """An evaluation takes six times as long as the server waits for a client, and all answers are there at once."""
    data, now = fedsim.FederatedData.from_arrays({"x": np.linspace(0, 1, 4, dtype=np.float32)}, sizes=[1] * 4), [0.0]
    sampler, nodes = fedsim.UniformSampler(data, clients=2, seed=0), _AtOnce()
    execution = DeployedSteps(
        nodes=nodes, folder=tmp_path, sampler=sampler, synchronization=systems.Synchronous(deadline=10.0),
        policy=systems.Policy(timeout=10.0), clock=lambda: now[0],
    )  # fmt: skip
    algorithm = fedsim.algorithms.Histogram(bins=2, staleness=fedsim.Staleness(bound=0), execution=execution)
    nodes.node = Node(algorithm, sampler, 0, 1, tmp_path / "node")
    state = algorithm.with_memory(algorithm.init(jax.random.key(0)), data)
    for step in range(3):
        state, _ = algorithm.apply(state, sampler.cohort(step))
        now[0] += 60
    assert [len(line["updates"]["client"]) for line in lines(tmp_path)] == [2, 2, 2]
    assert [(line["steps"]["late"], line["steps"]["time"]) for line in lines(tmp_path)] == [(0, 0.0)] * 3


@pytest.mark.parametrize(
    ("model", "policy"),
    [(systems.Synchronous(), systems.Policy(timeout=10.0)), (systems.Synchronous(deadline=10.0), systems.Policy())],
    ids=["timeout", "deadline"],
)
def test_what_has_come_before_a_deadline_is_in_time_although_the_server_sees_it_afterwards(model, policy):
    """The server looks at 0, 9 and 18 seconds, and finds at 18 what has come after 9."""
    data, now = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4), [0.0]

    def outcomes():
        found = [Outcome(number, True) for number in server.in_flight] if now[0] > 9 else []
        now[0] += 9
        return found

    server = RealServer(
        fedsim.UniformSampler(data, clients=2, seed=0), np.ones(4, int), policy, outcomes=outcomes,
        reachable=lambda: np.ones(4, bool), clock=lambda: now[0],
    )  # fmt: skip
    model.begin(server)
    while not server.taken:
        server.next_event(model)
    (taken,) = server.taken
    assert (len(taken.updates.client), int(taken.steps.late[0]), float(taken.steps.time[0])) == (2, 0, 10.0)
    assert server.time == server.now  # The next deadlines begin now.


def test_what_synchronization_models_cannot_deploy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Mime cannot run with staleness, or on a virtual clock: its round has other calls"):
        prepared(*federation("Mime"), MODELS["buffered"])
    with pytest.raises(ValueError, match="The updates of SCAFFOLD cannot have scales other than 1"):
        prepared(*federation("SCAFFOLD"), MODELS["asynchronous"])
    algorithm, sampler, _ = deployed(MODELS["buffered"], tmp_path, aggregator=fedsim.aggregators.CentredClipping(1.0))
    with pytest.raises(ValueError, match="Buffered cannot be deployed with CentredClipping, because what clients send depends"):
        trained(algorithm, sampler, 1)
