"""The run loop: rounds, dispatches, metrics and output, for every sampler and several algorithms."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import rng
from fedsim.experiment import read_metrics, run
from fedsim.experiment.driving import round_lines
from fedsim.rounds import RoundInfo
from fedsim.run_files import scalar_metrics


def test_run_equals_apply_round_by_round(algorithm, sampler, data, bits):
    result = run(algorithm, sampler, rounds=17, test_data=data, evaluate_every=5, progress=False)
    state = algorithm.init(rng.stream(rng.root(7), "init"))
    for cohort in sampler.rounds(17):
        state, _ = algorithm.apply(state, cohort)
    for ours, theirs in zip(jax.tree.leaves(result.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    expected = fedsim.evaluate(algorithm.model, state.params, data)
    assert result.evaluation.overall["accuracy"] == pytest.approx(expected.overall["accuracy"])


def test_one_program_is_compiled_whatever_the_lengths_of_dispatches(make_algorithm, sampler, data):
    algorithm, traces = make_algorithm(), []

    class Counting(fedsim.algorithms.FedAvg):
        def client_update(self, shared: Any, client: fedsim.Client) -> fedsim.ClientUpdate:
            traces.append(1)
            return super().client_update(shared, client)

    counting = Counting(**{f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
    run(counting, sampler, rounds=2, progress=False, rounds_per_dispatch=2)
    first = len(traces)
    run(counting, sampler, rounds=23, test_data=data, evaluate_every=7, checkpoint_every=4, progress=False)
    assert len(traces) == first <= 2


def test_no_dispatch_extends_past_an_evaluation(algorithm, sampler, data):
    evaluated = []
    result = run(
        algorithm, sampler, rounds=13, progress=False, evaluate_every=5,
        evaluate=lambda state: evaluated.append(int(state.round)) or {"accuracy": 0.5},
    )  # fmt: skip
    assert evaluated == [5, 10, 13] and result.evaluation == {"accuracy": 0.5}


def test_metric_lines_of_a_run(algorithm, sampler, data, tmp_path):
    result = run(algorithm, sampler, rounds=12, folder=tmp_path / "r", test_data=data, evaluate_every=5, progress=False)
    lines = [json.loads(text) for text in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert lines == result.history == read_metrics(tmp_path / "r/metrics.jsonl")
    train = [line for line in lines if "loss" in line]
    test = [line for line in lines if "test_accuracy" in line]
    assert [line["round"] for line in train] == list(range(1, 13)) and [line["round"] for line in test] == [5, 10, 12]
    assert set(train[0]) == {"round", "loss", "num_examples", "dropped", "seconds", "bits_up", "bits_down"}
    assert train[3]["num_examples"] == sampler.cohort(3).sizes.sum()
    over = result.evaluation.over_clients("accuracy")
    assert test[-1]["test_accuracy_clients_worst10"] == pytest.approx(over["worst 10%"])
    assert test[-1]["test_accuracy_clients_std"] == pytest.approx(over["std"])
    worst = result.evaluation.over_clients("loss", lower_is_better=True)["worst 10%"]
    assert test[-1]["test_loss_clients_worst10"] == pytest.approx(worst) and worst > result.evaluation.overall["loss"]
    assert (tmp_path / "r/learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "r/tensorboard").iterdir())


def test_the_results_of_clients_are_a_file_of_the_folder(algorithm, sampler, data, tmp_path):
    few = fedsim.FederatedData.from_arrays(
        {name: column[:9] for name, column in data.columns.items()}, sizes=[4, 0, 5], client_ids=["a", "b,c", "d"]
    )
    arguments = dict(rounds=3, folder=tmp_path / "r", test_data=few, evaluate_every=2, progress=False)
    result = run(algorithm, sampler, **arguments)
    text = (tmp_path / "r/clients.csv").read_text()
    names, first, empty, last = csv.reader(text.splitlines())
    assert names == ["id", "num_examples", "loss", "accuracy"] and empty == ["b,c", "0", "", ""]
    (layer,) = result.state.params.values()
    for row, name, rows in ((first, "a", slice(0, 4)), (last, "d", slice(4, 9))):
        logits = few.columns["x"][rows].astype(np.float64) @ np.asarray(layer["w"]) + np.asarray(layer["b"])
        y = few.columns["y"][rows]
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        assert row[:2] == [name, str(len(y))]
        assert [float(cell) for cell in row[2:]] == pytest.approx([losses.mean(), (logits.argmax(1) == y).mean()], rel=1e-5)
    (tmp_path / "r/clients.csv").unlink()  # killed before it was written
    run(algorithm, sampler, **arguments)
    assert (tmp_path / "r/clients.csv").read_text() == text
    (tmp_path / "r/clients.csv").write_text("id,num_examples\na,4\n")  # that of an earlier round
    run(algorithm, sampler, **arguments)
    assert (tmp_path / "r/clients.csv").read_text() == text


def test_the_bits_of_a_round_do_not_overflow():
    zeros, count = np.zeros((1, 1000), np.float32), np.zeros((1, 1000), np.int32)
    clients = dict.fromkeys(("num_examples", "num_steps"), count) | {"weight": zeros, "dropped": zeros > 0}
    clients |= {
        "bits_up": zeros + 2**40,
        "entropy_bits_up": zeros + 2**39,
        "bits_down": np.full((1, 1000), 2**32 - 1, np.uint32),
    }
    (line,) = round_lines(RoundInfo(clients, *np.zeros((5, 1), np.int32)), first_round=0, rounds=1, seconds=1.0)
    assert line["bits_up"] == 1000 * 2**40 and line["bits_down"] == 1000 * (2**32 - 1)
    assert line["entropy_bits_up"] == 1000 * 2**39


@pytest.mark.parametrize("name", ["round", "seconds", "validation_loss", "test_accuracy"])
def test_what_clients_report_has_no_name_of_the_run(name, algorithm, sampler):
    class Reporting(type(algorithm)):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(info={**result.info, name: result.info["loss"]})

    own = Reporting(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init})
    with pytest.raises(ValueError, match=f"Expected other names in the info of clients or of rounds, got '{name}'"):
        run(own, sampler, rounds=1, progress=False)
    with pytest.raises(ValueError, match=f"got '{name}'"):  # of an algorithm that overrides apply
        round_lines({name: np.zeros(2)}, first_round=0, rounds=2, seconds=1.0)


def test_loss_is_the_example_weighted_mean_over_clients(algorithm, sampler):
    result = run(algorithm, sampler, rounds=1, progress=False)
    _, info = algorithm.apply(algorithm.init(rng.stream(rng.root(7), "init")), sampler.cohort(0))
    expected = np.average(info.clients["loss"], weights=sampler.cohort(0).sizes)
    assert result.history[0]["loss"] == pytest.approx(expected, rel=1e-5)


class EveryFourth:
    """A user's sampler, with cohorts of different sizes and their own keys."""

    def __init__(self, data):
        self.data = data

    def cohort(self, round):
        return fedsim.Cohort.of(self.data, [str(round % 4), str(4 + round % 4), "11"][: 2 + round % 2], round=round, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["EveryFourth", *sorted({*federation.SAMPLERS} - {"ClusteredSampling"})]
)  # its cohorts are stale
def test_every_sampler_works_with_the_runner(name, algorithm, data):
    sampler = EveryFourth(data) if name == "EveryFourth" else federation.SAMPLERS[name](data, 4)
    result = run(algorithm, sampler, rounds=6, test_data=data, progress=False)
    assert result.round == 6
    examples = [line["num_examples"] for line in result.history if "num_examples" in line]
    assert examples == [int(sampler.cohort(round).sizes.sum()) for round in range(6)]


def test_a_schedule_that_is_too_short_is_refused_before_training(algorithm, data, tmp_path):
    sampler = fedsim.samplers.ScheduleSampler(data, [["0"]] * 7, seed=7)
    with pytest.raises(ValueError, match="has 7 rounds, counted from 0, so there is no round 19"):
        run(algorithm, sampler, rounds=20, folder=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_rounds_before_an_error_of_the_sampler_are_written(algorithm, data, tmp_path):
    class Broken(fedsim.UniformSampler):
        def cohort(self, round):
            if round == 6:
                raise RuntimeError("no client is available")
            return super().cohort(round)

    sampler = Broken(data, clients=3, seed=7)
    with pytest.raises(RuntimeError, match="no client is available"):
        run(algorithm, sampler, rounds=20, folder=tmp_path, progress=False, rounds_per_dispatch=2)
    assert [line["round"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["PoissonSampler", "ShuffledSampler", "DiurnalSampler", "ScheduleSampler"])
def test_cohorts_of_a_sampler_share_one_program_whatever_their_size(name, make_algorithm, data):
    class Unshared(fedsim.algorithms.FedAvg):
        """Shares no programs with algorithms of other tests."""

    given = make_algorithm()
    algorithm = Unshared(**{f.name: getattr(given, f.name) for f in dataclasses.fields(given)})
    sampler = federation.SAMPLERS[name](data, 4)
    assert len({len(cohort) for cohort in sampler.rounds(6)}) > 1
    run(algorithm, sampler, rounds=6, progress=False)
    (compiled,) = federation.compiled_rounds(algorithm)
    assert compiled.rounds.num_executables == 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LargestExample(fedsim.Algorithm):
    """Overrides `apply` with a Python loop. It has no model and no parameters, and its info is a mapping."""

    def init(self, key):
        return {"largest": jnp.zeros(()), "key": key}

    def apply(self, state, cohort):
        largest = max([float(dataset["x"].max()) for _, dataset, _ in cohort], default=0.0)
        return state | {"largest": jnp.maximum(state["largest"], largest)}, {"largest": jnp.float32(largest)}


def test_an_algorithm_that_overrides_apply(sampler, data, tmp_path):
    algorithm = LargestExample(batches=fedsim.Batches(size=4))
    evaluate = lambda state: {"largest": float(state["largest"])}  # noqa: E731
    for rounds in (7, 7):
        result = run(
            algorithm,
            sampler,
            rounds=rounds,
            folder=tmp_path / "r",
            evaluate=evaluate,
            evaluate_every=3,
            progress=False,
        )
    assert result.history[0].keys() == {"round", "largest", "seconds"}
    clients = {client for cohort in sampler.rounds(7) for client in cohort.client_ids}
    assert result.evaluation["largest"] == pytest.approx(max(data[client]["x"].max() for client in clients))
    assert jax.random.key_data(result.state["key"]).tolist() == jax.random.key_data(rng.stream(rng.root(7), "init")).tolist()


def test_test_data_without_a_model_is_refused(sampler, data):
    with pytest.raises(ValueError, match="LargestExample cannot be evaluated on test_data"):
        run(LargestExample(batches=fedsim.Batches(size=4)), sampler, rounds=1, test_data=data, progress=False)


def test_an_algorithm_may_define_its_own_evaluation(sampler, data):
    class Itself(LargestExample):
        def evaluate(self, state, test):
            return {"accuracy": float(state["largest"] > 0) * test.num_clients}

    algorithm = Itself(batches=fedsim.Batches(size=4))
    assert run(algorithm, sampler, rounds=1, test_data=data, progress=False).evaluation == {"accuracy": 12.0}


@pytest.mark.slow
def test_debug_execution_runs(make_algorithm, sampler, algorithm):
    debug = run(make_algorithm(execution=fedsim.Debug()), sampler, rounds=2, progress=False)
    fast = run(algorithm, sampler, rounds=2, progress=False)
    for a, b in zip(jax.tree.leaves(debug.state), jax.tree.leaves(fast.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_callbacks_get_every_line_and_the_state_if_it_is_available(algorithm, sampler, data):
    received = []
    result = run(
        algorithm, sampler, rounds=6, test_data=data, evaluate_every=3, progress=False,
        callbacks=[lambda line, state: received.append((line, state))],
    )  # fmt: skip
    assert [line for line, _ in received] == result.history
    evaluations = [(line["round"], int(state.round)) for line, state in received if "test_accuracy" in line]
    assert evaluations == [(3, 3), (6, 6)]
    assert all(int(state.round) == line["round"] for line, state in received if state is not None)


def _with_infinite_rate(make_algorithm, **fields):
    """An algorithm with an infinite client learning rate from round 2 on."""
    return make_algorithm(client_optimizer=lambda r: optax.sgd(jnp.where(r < 2, 0.1, jnp.inf)), **fields)


@pytest.mark.filterwarnings("ignore:The training loss")
def test_dropped_updates_are_counted_and_warned_about_once(make_algorithm, sampler, tmp_path):
    with pytest.warns(UserWarning, match=r"3 client update\(s\) held a NaN .* client '\d+' in round 2") as caught:
        result = run(
            _with_infinite_rate(make_algorithm), sampler, rounds=5, folder=tmp_path / "r", progress=False, rounds_per_dispatch=1
        )
    assert len([w for w in caught if "client update" in str(w.message)]) == 1
    assert [line["dropped"] for line in result.history] == [0, 0, 3, 3, 3]
    assert result.history[-1]["loss"] is None
    assert "NaN" not in (tmp_path / "r/metrics.jsonl").read_text()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state))


def test_nonfinite_raise_raises(make_algorithm, sampler):
    with pytest.raises(FloatingPointError, match=r"in round 2"):
        run(_with_infinite_rate(make_algorithm, nonfinite="raise"), sampler, rounds=5, progress=False)


@pytest.mark.parametrize("name", ["rounds", "evaluate_every", "checkpoint_every", "rounds_per_dispatch"])
def test_numbers_must_be_positive(algorithm, sampler, name):
    with pytest.raises(ValueError, match=f"Expected {name} >= 1.*, got {name}=0"):
        run(algorithm, sampler, **{"rounds": 3, "progress": False, name: 0})


@pytest.mark.parametrize("where", ["a_file", "/proc/fedsim"])
def test_unwritable_folder_is_an_error_before_anything_is_compiled(make_algorithm, sampler, tmp_path, monkeypatch, where):
    (tmp_path / "a_file").write_text("")
    algorithm, init = make_algorithm(), fedsim.algorithms.FedAvg.init

    def traced_only(self, key):
        assert isinstance(key, jax.core.Tracer), "compiled before the folder was checked"
        return init(self, key)

    monkeypatch.setattr(fedsim.algorithms.FedAvg, "init", traced_only)
    with pytest.raises(OSError, match="Cannot write to the run folder"):
        run(algorithm, sampler, rounds=1, folder=tmp_path / where, progress=False)


def test_progress_bar_and_table(algorithm, sampler, data, tmp_path, capsys):
    run(algorithm, sampler, rounds=6, folder=tmp_path / "r", test_data=data, evaluate_every=3)
    out, err = capsys.readouterr()
    assert "6/6" in err and "loss=" in err and "accuracy=" in err
    for word in (
        "after round 6 of 6",
        "accuracy",
        "mean",
        "std",
        "worst 10%",
        "wall time",
        "rounds/s",
        "metrics.jsonl",
        str(tmp_path),
    ):
        assert word in out


_BARE = """
import sys, warnings
for name in ("orbax", "orbax.checkpoint", "tensorboardX", "matplotlib", "tyro", "sklearn"):
    sys.modules[name] = None
import numpy as np, optax, fedsim
assert {"networkx", "scipy.sparse"} & {*sys.modules} == set()  # `fedsim.decentralized` imports them where it is used
import fedsim.commands
from fedsim.experiment import run
data = fedsim.FederatedData.from_arrays({"x": np.zeros([6, 8, 8, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
algorithm = fedsim.algorithms.FedAvg(
    model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    result = run(algorithm, sampler, rounds=3, folder=sys.argv[1], test_data=data)
assert result.round == 3 and len(result.history) == 4
print([str(w.message) for w in caught])
print(fedsim.commands.main(["run"]))
"""


@pytest.mark.slow
def test_import_and_train_without_optional_dependencies(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(fedsim.__file__).parents[1])}
    command = [sys.executable, "-c", _BARE, str(tmp_path / "r")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "No checkpoints will be written: orbax-checkpoint is not installed" in done.stdout
    assert "The command line needs tyro" in done.stderr
    assert {path.name for path in Path(tmp_path / "r").iterdir()} == {".lock", "clients.csv", "config.json", "metrics.jsonl"}


def test_a_run_causes_no_warnings(algorithm, sampler, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(algorithm, sampler, rounds=2, folder=tmp_path / "r", test_data=data, progress=False)


def test_metrics_that_are_arrays(make_algorithm, model, data, tmp_path):
    metrics = {
        **model.metrics,
        "confusion": fedsim.metrics.ConfusionMatrix(),
        "f1_per_class": fedsim.metrics.F1(average=None),
        "auc": fedsim.metrics.AUC(),
    }
    algorithm = make_algorithm(model=dataclasses.replace(model, metrics=metrics))
    sampler = fedsim.UniformSampler(data, clients=4, seed=0)
    folder = tmp_path / "r"
    result = run(algorithm, sampler, rounds=2, folder=folder, test_data=data, evaluate_every=1, progress=False)
    line = read_metrics(folder / "metrics.jsonl")[-1]
    assert line["test_confusion"] == result.evaluation.overall["confusion"].tolist()
    assert np.sum(line["test_confusion"]) == data.num_examples
    assert line["test_f1_per_class"] == pytest.approx(result.evaluation.overall["f1_per_class"])
    over = {name for name in line if "_clients_" in name}
    assert over == {f"test_{name}_clients_{key}" for name in ("loss", "accuracy", "auc") for key in ("mean", "std", "worst10")}
    assert (folder / "learning_curve.png").exists() and "test_confusion" not in scalar_metrics(line)
    written = b"".join(path.read_bytes() for path in (folder / "tensorboard").rglob("events.*"))
    assert all(tag in written for tag in (b"test/auc", b"test/f1_per_class/0", b"test/f1_per_class/2"))
    assert b"confusion" not in written


@pytest.mark.parametrize("replaced", [True, False])
def test_seconds_are_those_of_the_rounds_without_evaluations(algorithm, sampler, data, replaced, monkeypatch):
    def slow(*arguments: Any, **options: Any) -> dict[str, float]:
        time.sleep(0.2)
        return {"loss": 1.0}

    monkeypatch.setattr("fedsim.experiment._run.default_evaluation", lambda *given, **_: slow if given[2] else None)
    evaluation = {"evaluate": slow} if replaced else {"test_data": data}
    result = run(algorithm, sampler, rounds=4, evaluate_every=1, progress=False, **evaluation)
    assert [line["round"] for line in result.history] == [r for r in range(1, 5) for _ in range(2)]
    assert sum(sorted(line["seconds"] for line in result.history if "seconds" in line)[:2]) < 0.2


@pytest.mark.parametrize("by", ["evaluate", "callback"])
def test_no_rounds_run_beside_code_that_may_run_programs(algorithm, sampler, data, by):
    """Two programs with collectives at a time may end the process on a CPU. The state of every round comes late."""
    sent, ready = [], []

    @jax.jit
    def late(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, lambda _, power: power @ matrix, matrix)[0, 0]

    class Own(fedsim.algorithms.FedAvg):
        def apply_rounds(self, *arguments: Any, **options: Any) -> Any:
            state, infos = super().apply_rounds(*arguments, **options)
            zero = late(jnp.zeros([300, 300]))
            sent.append(jax.tree.map(lambda x: x + zero.astype(x.dtype), state))
            return sent[-1], infos

        def evaluate(self, state: Any, data: Any) -> dict[str, float]:
            return note() or {"loss": 1.0}

    def note(line: Any = None, state: Any = None) -> None:
        ready.append(all(leaf.is_ready() for leaf in jax.tree.leaves(sent[-1])))

    fields = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    own = Own(**fields | dict(execution=fedsim.Jit()))
    given: dict[str, Any] = {"evaluate": {"test_data": data, "evaluate_every": 1}, "callback": {"callbacks": [note]}}[by]
    run(own, sampler, rounds=3, rounds_per_dispatch=1, progress=False, **given)
    assert len(sent) == 3 and ready == [True] * 3
