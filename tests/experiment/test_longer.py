"""`fedsim resume FOLDER --rounds N`: the result is that of a run that had N rounds from the start."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import systems
from fedsim.commands import main
from fedsim.experiment import RunConfig, Settings, build, read_config, read_metrics, restore
from fedsim.experiment._checkpoint import _with_rounds
from fedsim.experiment._longer import _check_events

SMALL = ["--model", "digits_logistic", "--clients", "3", "--evaluate-every", "4", "--checkpoint-every", "2"]
SMALL += ["--execution", "jit", "--no-progress"]
BUFFERED = ["--synchronization", "buffered(size=2, concurrency=6)", "--step-seconds", "log_normal(sigma=1.5)"]


def run(folder, rounds, *options):
    assert main(["run", *SMALL, "--rounds", str(rounds), "--folder", str(folder), *options]) == 0


def assert_equal(some, other):
    """Compares configurations, rows without times, and the bits of the parameters of two run folders."""
    assert read_config(some)["config"] == read_config(other)["config"]
    rows = [[{**line, "seconds": None} for line in read_metrics(folder / "metrics.jsonl")] for folder in (some, other)]
    assert rows[0] == rows[1]
    states = []
    for folder in (some, other):
        stored = read_config(folder)
        algorithm, sampler, *_ = build(RunConfig.from_json(stored["config"]), Settings(**stored["settings"]))
        state, round = restore(folder, algorithm, data=sampler.data)
        assert round == stored["config"]["rounds"]
        states.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)])
    assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        (["--server-learning-rate", "0.5", "--client-schedule", "exponential(every=3)"], 6, 11),
        (BUFFERED, 6, 14),
        (["--synchronization", "asynchronous(concurrency=5)", "--step-seconds", "exponential(mean=2)"], 5, 12),
        (["--algorithm", "scaffold"], 5, 8),
        (["--algorithm", "dpsgd", "--dataset", "digits(clients=8)", "--message-loss", "0.1"], 5, 9),
    ],
)
def test_a_longer_run_equals_one_from_the_start(options, before, after, tmp_path):
    run(tmp_path / "long", after, *options)
    run(tmp_path / "short", before, *options)
    assert main(["resume", str(tmp_path / "short"), "--rounds", str(after)]) == 0
    assert_equal(tmp_path / "short", tmp_path / "long")


@pytest.mark.slow
def test_an_unfinished_run_gets_more_or_fewer_rounds(tmp_path, capsys):
    """Also as many as it has finished: then only the last evaluation is added."""
    for rounds in (6, 9):
        run(tmp_path / f"{rounds}", rounds)
        run(tmp_path / "r", 6)
        stored = read_config(tmp_path / "r")
        stored["config"]["rounds"] = 20  # as after a signal
        (tmp_path / "r/config.json").write_text(json.dumps(stored))
        (tmp_path / "r/metrics.jsonl").write_text("".join((tmp_path / "r/metrics.jsonl").read_text().splitlines(True)[:-1]))
        assert main(["resume", str(tmp_path / "r"), "--rounds", "5"]) == 2
        assert "Expected rounds >= 6, the finished rounds of" in capsys.readouterr().err
        assert main(["resume", str(tmp_path / "r"), "--rounds", str(rounds)]) == 0
        assert_equal(tmp_path / "r", tmp_path / f"{rounds}")
        (tmp_path / "r").rename(tmp_path / f"old{rounds}")


@pytest.mark.parametrize("how", ["sequential", "devices"])
@pytest.mark.slow
def test_a_longer_sweep_equals_one_from_the_start(how, tmp_path):
    options = ["--client-learning-rate", "0.05,0.1", "--sweep-mode", how]
    run(tmp_path / "long", 7, *options)
    run(tmp_path / "short", 5, *options)
    assert main(["resume", str(tmp_path / "short"), "--rounds", "7"]) == 0
    members = sorted(path.parent.name for path in (tmp_path / "long").glob("*/config.json"))
    assert len(members) == 2
    for member in members:
        assert_equal(tmp_path / "short" / member, tmp_path / "long" / member)
    assert (tmp_path / "short/table.txt").read_text() == (tmp_path / "long/table.txt").read_text()
    assert json.loads((tmp_path / "short/sweep.json").read_text())["config"]["rounds"] == 7
    # One member has finished more rounds: nothing is changed.
    files = {path: path.read_bytes() for path in (tmp_path / "short").rglob("*.json") if path.name != "files.json"}
    assert main(["resume", str(tmp_path / "short"), "--rounds", "6"]) == 2
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.first(1)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_that_depend_on_the_number_of_rounds_are_refused(schedule, tmp_path, capsys):
    run(tmp_path / "r", 4, "--client-schedule", schedule)
    before = (tmp_path / "r/config.json").read_bytes()
    assert main(["resume", str(tmp_path / "r"), "--rounds", "6"]) == 2
    error = capsys.readouterr().err
    assert f"client_schedule='{schedule}' depends on the number of rounds" in error
    assert f"fedsim run --from {tmp_path / 'r'} --rounds 6" in error
    assert (tmp_path / "r/config.json").read_bytes() == before
    assert main(["resume", str(tmp_path / "r"), "--rounds", "4"]) == 0


def test_an_algorithm_with_a_field_rounds_is_refused(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import dataclasses, fedsim\n"
        "@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)\n"
        "class Mine(fedsim.algorithms.FedAvg):\n"
        "    rounds: int = 5\n"
    )
    run(tmp_path / "r", 4, "--algorithm", f"{tmp_path / 'mine.py'}:Mine")
    assert main(["resume", str(tmp_path / "r"), "--rounds", "6"]) == 2
    assert "has a field rounds" in capsys.readouterr().err


def test_models_that_clients_start_from_are_kept_as_by_a_run_with_a_larger_bound():
    for rounds in range(1, 12):
        kept = []
        for bound in (2, 5):
            staleness = fedsim.rounds.Staleness(bound=bound)
            past = staleness.first({"w": jnp.zeros(2)})
            for round in range(rounds):
                past = staleness.kept(past, {"w": jnp.array([round, 1.0])}, jnp.int32(round))
            kept.append(np.asarray(past["w"]))
        wider = _with_rounds(kept[0], 6, rounds)
        for round in range(max(0, rounds - 3), rounds):
            assert wider[round % 6].tolist() == kept[1][round % 6].tolist() == [round, 1.0]
        assert np.count_nonzero(wider[:, 1]) == min(rounds, 3)
        assert _with_rounds(kept[1], 3, rounds).tolist() == kept[0].tolist()


def test_other_events_and_models_that_were_not_saved_are_refused():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(40)}, sizes=[1] * 40)

    def events(rounds, sigma=1.0):
        sampler = fedsim.UniformSampler(data, clients=5, seed=0)
        devices = systems.Devices(seconds_per_step=systems.LogNormal(sigma=sigma))
        policy = systems.Buffered(size=2, concurrency=8)
        return systems.schedule(sampler, rounds, steps=np.ones(40, int), synchronization=policy, devices=devices)

    old, new = events(6), events(20)
    late = new.updates.version[(new.updates.step >= 6) & (new.updates.version < 6)]
    assert len(late)
    past = np.ones([6, 3], np.float32)
    _check_events(old, new, 6, {".past['w']": past}, "start anew")
    past[late.min() % 6] = 0
    with pytest.raises(ValueError, match=f"started from the model after {late.min()} rounds.*start anew"):
        _check_events(old, new, 6, {".past['w']": past}, "start anew")
    _check_events(old, new, 6, {".past['w']": past, ".past['round']": np.arange(6) + 1}, "start anew")
    with pytest.raises(ValueError, match="The events of the 6 finished rounds depend on the number of rounds: start anew"):
        _check_events(old, events(20, sigma=2.0), 6, {".past['w']": past}, "start anew")
