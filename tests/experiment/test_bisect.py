"""`bisect`: the round, client and array in which two runs differ first, and the client of a run that is out of line."""

import json
import shutil

import numpy as np
import pytest

from fedsim.commands import main
from fedsim.experiment import bisect, load
from fedsim.experiment._bisect import _differing_state, _first_difference
from fedsim.rounds import FederatedState

DATA = """
import numpy as np, fedsim

def people(data=None, cache=None, *, changed=-1, factor=1.0):
    loaded = fedsim.datasets.load("digits", clients=8)
    x = np.array(loaded.train.columns["x"], np.float32)
    if changed >= 0:
        x[slice(*loaded.train.offsets[changed:changed + 2])] *= factor
    train = fedsim.FederatedData.from_arrays({"x": x, "y": np.array(loaded.train.columns["y"])}, sizes=loaded.train.sizes)
    test = fedsim.FederatedData.from_arrays(
        {"x": np.array(loaded.test.columns["x"], np.float32), "y": np.array(loaded.test.columns["y"])}, sizes=loaded.test.sizes)
    return {"train": train, "test": test}

def model():
    return fedsim.models.logistic([8, 8, 1], 10, scale=16)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that trains a small run with further options, and returns its folder."""
    base = tmp_path_factory.mktemp("runs")
    (base / "own.py").write_text(DATA)

    def make(name, *options, dataset="", rounds=4):
        folder = base / name
        given = ["--dataset", f"{base / 'own.py'}:people{dataset}", "--model", f"{base / 'own.py'}:model"]
        given += [
            "--clients",
            "3",
            "--rounds",
            str(rounds),
            "--checkpoint-every",
            "1",
            "--evaluate-every",
            "2",
            "--no-progress",
        ]
        assert main(["run", *given, *options, "--folder", str(folder)]) == 0
        return folder

    return make


@pytest.fixture(scope="module")
def plain(run):
    return run("plain")


@pytest.fixture(scope="module")
def second(plain):
    """Returns the position of a client that takes part in round 2 and not in round 1."""
    sampler = load(plain).sampler
    return min(set(sampler.cohort(1).clients.tolist()) - set(sampler.cohort(0).clients.tolist()))


def test_runs_that_agree(run, plain, capsys):
    again = run("again")
    assert str(bisect(plain, again)).startswith("The runs agree in all 4 rounds")
    assert main(["bisect", str(plain), str(again)]) == 0 and "The runs agree" in capsys.readouterr().out


def test_lines_are_compared_by_round():
    one = [{"round": 1, "loss": 0.5, "seconds": 1.0}, {"round": 2, "loss": 0.4, "seconds": 1.0}, {"round": 2, "test_loss": 0.3}]
    other = [*one[:2], {"round": 3, "loss": 0.3, "seconds": 1.0}]
    assert _first_difference(one, other, evaluations=False) == (None, [])
    changed = [one[0], {**one[1], "loss": 0.41}, {"round": 2, "test_loss": 0.31}]
    assert _first_difference(one, changed, evaluations=False) == (2, ["loss"])
    assert _first_difference(one, changed, evaluations=True) == (2, ["test_loss"])
    more = [*one[:2], {**one[2], "test_f1": 0.5, "epsilon": 1.0}]
    assert _first_difference(one, more, evaluations=True) == (None, [])


def test_states_are_compared_without_the_models_of_earlier_rounds():
    states = [FederatedState({"w": np.ones(2)}, past={"w": np.zeros([kept, 2])}) for kept in (3, 5)]
    assert _differing_state(*states) is None
    assert _differing_state(states[0], states[1]._replace(server={"w": np.zeros(2)})) == "server/w"


@pytest.mark.slow
def test_runs_on_a_virtual_clock_that_have_other_numbers_of_rounds(run):
    options = ["--step-seconds", "log_normal(sigma=1.5)", "--synchronization", "buffered(size=2, concurrency=8)"]
    found = bisect(run("clock", *options, rounds=2), run("longer_clock", *options, rounds=30))
    assert "agree in all 2 rounds that both have" in str(found)


@pytest.mark.slow
def test_runs_whose_evaluations_alone_differ(run, plain):
    """A metric that one run lacks is no difference. Without a checkpoint, the machine may be the reason, too."""
    other = run("evaluated")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("test_loss_clients_std", None)
    write_lines(other, lines)
    assert bisect(plain, other).round is None
    next(line for line in lines if "test_loss" in line)["test_loss"] += 1.0
    write_lines(other, lines)
    found = bisect(plain, other)
    assert found.round == 2 and "agree in all 4 rounds" in str(found) and "where they ran" not in str(found)
    assert "Only evaluations differ, first that after round 2, in test_loss." in str(found)
    shutil.rmtree(other / "checkpoints")
    found = bisect(plain, other)
    assert found.round == 2 and "agree in all 4 rounds" not in str(found) and "give the same state up to" in str(found)
    assert str(found).startswith("Only evaluations differ, first that after round 2, in test_loss, and") and "ran." in str(
        found
    )


def write_lines(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_one_client_with_other_examples(run, plain, second):
    found = bisect(plain, run("changed", dataset=f"(changed={second}, factor=1.001)"))
    assert (found.round, found.client) == (2, str(second))
    assert f"examples of client {second}: x differs" in str(found)


@pytest.mark.slow
def test_another_server_step_and_another_client_step(run, plain):
    server = bisect(plain, run("server", "--server-learning-rate", "0.5"))
    assert (server.round, server.client) == (1, None) and "what the server makes of equal updates of all 3 clients" in str(
        server
    )
    client = bisect(plain, run("client", "--client-learning-rate", "0.11"))
    assert client.round == 1 and client.client is not None and "in the update of client" in str(client) and client.leaf


@pytest.mark.slow
def test_another_seed_and_a_longer_run(run, plain):
    other = bisect(plain, run("seed", "--seed", "1"))
    assert other.round == 0 and "The initial states differ" in str(other)
    longer = bisect(plain, run("longer", rounds=6))
    assert "agree in all 4 rounds that both have" in str(longer)


@pytest.mark.slow
def test_a_difference_that_does_not_come_back_is_one_of_the_machine(run, plain):
    other = run("elsewhere")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    changed = next(line for line in lines if line["round"] == 2 and "loss" in line)
    changed["loss"] += 1e-6
    write_lines(other, lines)
    stored = json.loads((other / "config.json").read_text())
    stored["versions"]["jax"] = "0.9.0"
    (other / "config.json").write_text(json.dumps(stored))
    found = bisect(plain, other)
    assert found.round == 2 and "comes from where they ran" in str(found) and "jax 0." in str(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The test loss is")
def test_the_client_that_made_a_run_diverge(run, second):
    folder = run("diverged", "--client-learning-rate", "0.05", dataset=f"(changed={second}, factor=1000.0)")
    found = bisect(folder)
    assert (found.round, found.client) == (2, str(second)) and "out of line" in str(found)
    assert "No round has" in str(bisect(run("calm", "--client-learning-rate", "0.001")))
