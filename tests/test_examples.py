"""The examples train, give the same result under every execution, and run from the command line."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import commands
from fedsim.datasets import _registry

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
CLASSES = {"fedprox": "FedProx", "custom_algorithm": "FedNova", "python_loop": "WeightTransfer"}
COMPILED = ["fedprox", "custom_algorithm"]  # these do not override `apply`, so their execution can be chosen


@pytest.fixture(autouse=True)
def registry_of_this_test(monkeypatch):
    monkeypatch.setattr(_registry, "_LOADERS", dict(_registry._LOADERS))


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(name, **fields):
    cls = getattr(load(name), CLASSES[name])
    given = dict(model=fedsim.models.digits_dense(), batches=fedsim.Batches(size=10), **fields)
    if "client_optimizer" in {field.name for field in dataclasses.fields(cls)}:
        given["client_optimizer"] = optax.sgd(0.2)
    return cls(**given)


def train(algorithm, rounds=2, clients=3):
    data = fedsim.datasets.load("digits").train
    state = algorithm.init(jax.random.key(3))
    for cohort in fedsim.UniformSampler(data, clients=clients, seed=3).rounds(rounds):
        state, info = algorithm.apply(state, cohort)
    return state.params, info


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("name", CLASSES)
def test_example_trains_and_prints_its_name(name, capsys):
    accuracy = load(name).main(rounds=20)
    assert accuracy > 0.8
    assert f"{CLASSES[name]}" in capsys.readouterr().out


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *CLASSES,
        "own_dataset",
        "differentiate",
        "tune_rates",
        "hierarchical",
        "custom_synchronization",
        "traces",
        "custom_gossip",
        "moon",
    }


@pytest.mark.parametrize("name", COMPILED)
def test_example_gives_the_same_under_every_execution(name):
    expected, info = train(make(name, execution=fedsim.Jit()))
    for execution in (fedsim.Pmap(devices=2, lanes=2), fedsim.Debug()):
        params, other = train(make(name, execution=execution))
        assert_close(params, expected)
        np.testing.assert_allclose(other.clients["loss"], info.clients["loss"], rtol=1e-5)


def test_fedprox_example_equals_the_library_s_fedprox():
    """The results are equal, and differ from FedAvg, so ``mu`` has an effect."""
    data = dict(model=fedsim.models.digits_dense(), batches=fedsim.Batches(size=10), client_optimizer=optax.sgd(0.2))
    example = train(make("fedprox", mu=0.5))[0]
    assert_close(example, train(fedsim.algorithms.FedProx(**data, mu=0.5))[0])
    difference = fedsim.tree.subtract(example, train(fedsim.algorithms.FedAvg(**data))[0])
    assert fedsim.tree.squared_norm(difference) > 1e-6


def test_fednova_example_against_numpy():
    """One round in NumPy, client by client: x + (Σ p_i τ_i) Σ p_i (x_i - x) / τ_i."""
    algorithm = make("custom_algorithm")
    cohort = fedsim.UniformSampler(fedsim.datasets.load("digits").train, clients=5, seed=3).cohort(0)
    start = algorithm.init(jax.random.key(3))
    state, _ = algorithm.apply(start, cohort)
    directions, steps, sizes = [], [], []
    for _client_id, dataset, key in cohort:
        params = start.params
        batches = list(dataset.batches(algorithm.batches, key))
        for batch in batches:
            gradient = jax.grad(algorithm.model.train_loss)(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.2 * g, params, gradient)
        directions.append(fedsim.tree.scale(fedsim.tree.subtract(params, start.params), 1 / len(batches)))
        steps.append(len(batches))
        sizes.append(len(dataset))
    assert len(set(steps)) > 1
    share = np.array(sizes) / np.sum(sizes)

    def server_step(x, *directions):
        return np.asarray(x) + share @ steps * np.tensordot(share, np.stack(directions), 1)

    expected = jax.tree.map(server_step, start.params, *directions)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), state.params, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_example_runs_from_the_command_line_by_import_path(name, tmp_path, capsys):
    reference = f"{EXAMPLES / name}.py:{CLASSES[name]}"
    jax.devices()  # starts JAX, so that the command line does not change the devices of other tests
    options = ["--rounds", "2", "--clients", "4", "--client-learning-rate", "0.05", "--folder", str(tmp_path / "run")]
    assert commands.main(["run", "--algorithm", reference, *options]) == 0
    assert "after round 2 of 2" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["algorithm"], config["client_learning_rate"]) == (reference, 0.05)


def test_the_derivative_agrees_with_the_finite_difference(capsys):
    derivative, difference = load("differentiate").main(steps=2)
    assert derivative == pytest.approx(difference, rel=5e-3) and abs(derivative) > 0.1
    losses = [float(line.split("loss ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert losses[1] < losses[0]


def test_tuned_rates_are_better_than_a_grid_of_few_runs(capsys):
    tuned, best = load("tune_rates").main(rounds=10, steps=4, grid=(0.01, 0.1), picture=None)
    assert tuned < best
    assert "grid: loss" in capsys.readouterr().out


def test_moon_trains_and_is_fedavg_without_its_contrast(capsys):
    moon = load("moon")
    assert moon.main(rounds=10) > 0.6 and "MOON, 10 rounds" in capsys.readouterr().out
    data = dict(model=moon.MODEL, batches=fedsim.Batches(size=10), client_optimizer=optax.sgd(0.1))
    train = fedsim.datasets.load("digits").train
    cohorts = [fedsim.Cohort.of(train, train.client_ids[:3], round=round, seed=3) for round in range(2)]

    def params(algorithm):
        state = algorithm.init(jax.random.key(3))
        for cohort in cohorts:
            state, _ = algorithm.apply(state, cohort)
        return fedsim.rounds.server_state(state).params

    fedavg = params(fedsim.algorithms.FedAvg(**data))
    assert_close(params(moon.MOON(**data, mu=0.0)), fedavg)
    assert fedsim.tree.squared_norm(fedsim.tree.subtract(params(moon.MOON(**data)), fedavg)) > 1e-6


def test_the_loss_of_moon_against_numpy():
    """Equation 3 of the paper, as it is written there, over the real examples of a batch."""
    moon = load("moon")
    algorithm = moon.MOON(
        model=moon.MODEL, batches=fedsim.Batches(size=10), client_optimizer=optax.sgd(0.1), mu=5.0, temperature=0.5
    )
    own, server, last = (jax.device_get(moon.MODEL.init(jax.random.key(seed))) for seed in range(3))
    draw, mask = np.random.default_rng(0), np.arange(6) < 4
    examples = {"x": draw.integers(0, 17, (6, 8, 8)).astype(np.uint8), "y": np.arange(6, dtype=np.int32)}
    loss = algorithm.client_loss(moon.SharedAndLast(server, 0, last), own, fedsim.Batch(examples, mask, jax.random.key(0), 0))

    x = examples["x"].reshape(6, 64) / 16
    z, z_server, z_last = (
        np.maximum(x @ p["linear"]["w"] + p["linear"]["b"], 0) @ p["linear_1"]["w"] + p["linear_1"]["b"]
        for p in (own, server, last)
    )
    a, b = (np.exp(np.sum(z * o, 1) / np.linalg.norm(z, axis=1) / np.linalg.norm(o, axis=1) / 0.5) for o in (z_server, z_last))
    logits = z @ own["linear_2"]["w"] + own["linear_2"]["b"]
    cross_entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), examples["y"]]
    assert loss == pytest.approx((cross_entropy - 5 * np.log(a / (a + b)))[mask].mean(), rel=1e-5)


def test_hierarchical_example_against_numpy(capsys):
    """A server's round with one round per silo is FedAvg over all clients, here in NumPy; more rounds per silo train faster."""
    example = load("hierarchical")
    once, often = example.main(rounds=5)
    assert 0.6 < once < often
    assert "4 round(s) in each silo" in capsys.readouterr().out

    data = fedsim.datasets.load("digits", clients=20).train
    start = example.MODEL.init(jax.random.key(0))
    trained = example.train(start, example.stacked(data), 0.2, rounds=1, silo_rounds=1)["linear"]
    models = []
    for client in data:
        x, labels = client["x"].reshape(len(client), -1) / 16, np.eye(10)[client["y"]]
        w, b = (np.asarray(start["linear"][name], np.float64) for name in ("w", "b"))
        for _ in range(5):
            exponentials = np.exp(x @ w + b)
            error = (exponentials / exponentials.sum(1, keepdims=True) - labels) / len(client)
            w, b = w - 0.2 * x.T @ error, b - 0.2 * error.sum(0)
        models.append((w, b))
    for name, rows in zip(("w", "b"), zip(*models, strict=True), strict=True):
        np.testing.assert_allclose(trained[name], np.average(rows, axis=0, weights=data.sizes), rtol=1e-4, atol=1e-5)


def test_own_dataset_trains_in_python_and_from_the_command_line(tmp_path, capsys):
    """Both give the same accuracy, so the command line used the option in parentheses and the dataset's default model."""
    accuracy = load("own_dataset").main(rounds=3)
    assert accuracy > 0.9 and "tumours, 3 rounds" in capsys.readouterr().out
    options = {"rounds": 3, "clients": 10, "batch-size": 10, "epochs": 1, "client-learning-rate": 0.1, "folder": tmp_path}
    options = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    reference = f"{EXAMPLES / 'own_dataset'}.py:tumours(hospitals=30)"
    jax.devices()
    assert commands.main(["run", "--dataset", reference, *options]) == 0
    last = fedsim.experiment.read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["test_accuracy"] == pytest.approx(accuracy)


def test_own_dataset_has_every_tumor_once():
    splits = load("own_dataset").tumours(None, None, hospitals=30)
    assert [data.num_clients for data in splits.values()] == [30, 30]
    both = np.concatenate([data.columns["x"] for data in splits.values()])
    assert len(np.unique(both, axis=0)) == len(both) == 569
    assert splits["train"].sizes.min() >= 4 and splits["test"].sizes.min() >= 1


def test_custom_synchronization_takes_a_server_step_every_ten_seconds(capsys):
    load("custom_synchronization").main(steps=12)
    rounds, periodic = capsys.readouterr().out.splitlines()
    assert rounds.startswith("Synchronous: ") and int(rounds.split()[1]) > 240
    assert periodic.startswith("Periodic: 120 s, ")


def test_traces_keep_clients_to_the_hours_of_the_file(tmp_path, capsys):
    """With the written file, updates end while their client is online; with another file, steps take as long as it says."""
    example, day = load("traces"), 86400.0
    data = fedsim.datasets.load("digits").train
    example.write(tmp_path / "traces.csv", data.client_ids)
    rows = [line.split(",") for line in (tmp_path / "traces.csv").read_text().splitlines()[1:]]
    online = {row[0]: [tuple(map(float, pair.split("-"))) for pair in row[1].split()] for row in rows}
    updates = example.main(steps=20).schedule.updates
    assert "20 server steps take" in capsys.readouterr().out
    for client, stop in zip(updates.client, updates.stop % day, strict=True):
        assert any(start <= stop <= end for start, end in online[data.client_ids[client]])

    path = tmp_path / "always.csv"
    path.write_text("client,seconds_per_step\n" + "".join(f"{client},100\n" for client in data.client_ids))
    updates = example.main(path, steps=2).schedule.updates
    steps = fedsim.Batches(size=10, epochs=5).num_steps(data.sizes)[updates.client]
    np.testing.assert_allclose(updates.stop - updates.start, 100.0 * steps)


def test_extra_keeps_nodes_together_that_dpsgd_keeps_apart(capsys):
    example = load("custom_gossip")
    example.main(rounds=150)
    distances = [float(line.split("distance ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert 0 < 5 * distances[1] < distances[0]
    graph = example.clusters(12, size=5).graphs[0]
    assert graph.number_of_edges() == 10 + 10 + 1 + 3 and graph.has_edge(0, 10)


def test_examples_are_short():
    lines = (EXAMPLES / "fedprox.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("@dataclasses"))
    last = next(i for i, line in enumerate(lines) if line.startswith("def main"))
    assert len([line for line in lines[first:last] if line.strip()]) <= 15
    assert len((EXAMPLES / "custom_algorithm.py").read_text().splitlines()) <= 60
    gossip = (EXAMPLES / "custom_gossip.py").read_text()
    algorithm, topology = gossip[gossip.index("class EXTRA") : gossip.index("def main")].split("def clusters")
    assert len(algorithm.strip().splitlines()) <= 40 and len(topology.strip().splitlines()) <= 10
    for name in ("own_dataset", "custom_synchronization"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
