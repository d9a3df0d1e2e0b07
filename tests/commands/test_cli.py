"""The command line: its output, its errors, and how it repeats and resumes the run in a folder."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import fedsim
from fedsim import commands
from fedsim.commands import _run, main
from fedsim.experiment import RunConfig, Settings, build, published, read_config, read_metrics, restore
from fedsim.experiment._trust import named_code, signature
from fedsim.names import make

SMALL = [
    "--model",
    "digits_logistic",
    "--rounds",
    "4",
    "--clients",
    "3",
    "--epochs",
    "1",
    "--evaluate-every",
    "2",
    "--execution",
    "jit",
]


def _parameters(folder):
    stored = read_config(folder)
    algorithm = build(RunConfig.from_json(stored["config"]), Settings(**stored["settings"])).algorithm
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restore(folder, algorithm)[0].params)]


def _assert_same(a, b):
    for ours, theirs in zip(_parameters(a), _parameters(b), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Creates a folder with a finished run of FedProx."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["run", *SMALL, "--algorithm", "fedprox", "--mu", "0.5", "--folder", str(folder), "--no-progress"]) == 0
    return folder


def test_run_writes_its_folder(finished):
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["round"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["round"] for line in lines if "test_accuracy" in line] == [2, 4]
    stored = read_config(finished)
    assert stored["config"]["algorithm"] == "fedprox" and stored["config"]["hyperparameters"]["mu"] == 0.5
    assert stored["config"]["batch_size"] == published("digits", "fedprox").values["batch_size"]
    assert stored["settings"]["execution"] == "jit" and stored["versions"]["fedsim"] == fedsim.__version__
    assert {path.name for path in finished.iterdir()} >= {"checkpoints", "tensorboard", "learning_curve.png"}


def test_run_from_a_folder_gives_the_same_bits(finished, tmp_path):
    assert main(["run", "--from", str(finished), "--folder", str(tmp_path / "again"), "--no-progress"]) == 0
    assert read_config(tmp_path / "again")["config"] == read_config(finished)["config"]
    _assert_same(tmp_path / "again", finished)


def test_run_from_a_folder_with_another_algorithm_keeps_the_rest(finished, tmp_path):
    changed = ["--algorithm", "fedavgm", "--momentum", "0.5", "--seed", "4"]
    assert main(["run", "--from", str(finished), *changed, "--folder", str(tmp_path / "r"), "--no-progress"]) == 0
    config = read_config(tmp_path / "r")["config"]
    assert config["rounds"] == 4 and config["model"] == "digits_logistic" and config["seed"] == 4
    assert config["hyperparameters"] == {
        "averaging": None,
        "momentum": 0.5,
        "server_learning_rate": published("digits", "fedavgm").values["server_learning_rate"],
    }


def test_the_table_is_printed_and_resuming_a_finished_run_prints_it_again(finished, capsys):
    assert main(["resume", str(finished), "--progress"]) == 0
    out = capsys.readouterr().out
    assert "after round 4 of 4" in out and "worst 10%" in out and "metrics.jsonl" in out


def test_without_progress_only_the_bar_is_missing(finished, capsys):
    assert main(["resume", str(finished), "--no-progress"]) == 0
    hidden = capsys.readouterr()
    assert main(["resume", str(finished)]) == 0
    shown = capsys.readouterr()
    assert "after round 4 of 4" in hidden.out and f"{finished}/" in hidden.out and "clients.csv" in hidden.out
    assert [line for line in hidden.out.splitlines() if "wall time" not in line] == [
        line for line in shown.out.splitlines() if "wall time" not in line
    ]
    assert "4/4" not in hidden.err


def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_not_lost(monkeypatch, capsys):
    """Python ignores exceptions of such callbacks, and JAX has one."""
    sent = []

    def interrupt(phase, info):
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)

    def command(_):
        gc.callbacks.append(interrupt)
        try:
            gc.collect()
            time.sleep(5)
        finally:
            gc.callbacks.remove(interrupt)
        return 0

    monkeypatch.setattr(_run, "main", command)
    before = sys.unraisablehook
    assert main(["run"]) == 130 and sent and sys.unraisablehook is before
    assert "aborted" in capsys.readouterr().err


_INTERRUPTED_IMPORT = """
import gc, signal, sys
sent = []
def interrupt(phase, info):
    if "jax._src.api" in sys.modules and not sent:
        sent.append(phase)
        signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.callbacks.append(interrupt)
from fedsim.commands import main
sys.exit(main(["models"]))
"""


def test_an_interrupt_is_not_lost_while_the_command_imports_its_modules():
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 130 and "aborted" in done.stderr and "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_second_run_uses_the_compiled_programs_of_the_first(tmp_path):
    """The runs are processes that do not use the compilation cache that these tests share."""
    hidden = ("JAX_COMPILATION_CACHE_DIR", "FEDSIM_TEST_PROGRAMS")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"FEDSIM_CACHE": str(tmp_path / "cache")}

    def programs(folder):
        command = [sys.executable, "-m", "fedsim", "run", *SMALL, "--folder", str(tmp_path / folder), "--no-progress"]
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=600)
        return {path.name for path in (tmp_path / "cache" / "compiled").glob("jit_run_rounds-*-cache")}

    first = programs("first")
    assert first and programs("second") == first


def test_the_default_folder_is_named_after_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL, "--rounds", "1", "--no-progress"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-fedavg-20")


def test_steps_and_epochs_replace_each_other(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"  # The default of the dataset `digits` is 5 epochs.
    small = ["--model", "digits_logistic", "--rounds", "1", "--clients", "2", "--no-progress"]
    assert main(["run", *small, "--steps", "2", "--folder", str(first)]) == 0
    assert main(["run", "--from", str(first), "--epochs", "2", "--folder", str(second), "--no-progress"]) == 0
    configs = [fedsim.experiment.read_config(folder)["config"] for folder in (first, second)]
    assert [(config["epochs"], config["steps"]) for config in configs] == [(1, 2), (2, None)]


def test_help_lists_every_option_with_the_published_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        main(["run", "--dataset", "emnist62", "--algorithm", "fedadam", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "Reddi et al. 2021" in text
    options = """dataset data model algorithm rounds clients batch-size epochs steps max-steps weighting nonfinite seed
        evaluate-every client-learning-rate client-momentum client-schedule server-learning-rate b1 b2 tau folder from
        checkpoint-every execution devices lanes memory rounds-per-dispatch"""
    for option in options.split():
        assert f"--{option} " in text, option
    for default in ("1500", "0.03162", "0.003162", "0.99", "0.0001"):
        assert f"(default: {default})" in text
    assert "--mu" not in text


_FACTORIES = {
    "aggregator": fedsim.aggregators.AGGREGATORS,
    "compressor": fedsim.compressors.COMPRESSORS,
    "attack": fedsim.attacks.ATTACKS,
    "topology": fedsim.decentralized.TOPOLOGIES,
    "synchronization": fedsim.systems.SYNCHRONIZATIONS,
    "client_devices": fedsim.systems.LAWS,
}


def test_every_example_of_the_help_is_accepted():
    for field in dataclasses.fields(RunConfig):
        examples = re.search(r": (.*), \.\.\.", field.metadata.get("help", ""))
        assert (examples is not None) == (field.name in _FACTORIES), field.name
        if examples is None:
            continue
        named = [example.strip("'") for example in re.split(r", (?![^(]*\))", examples[1])]
        assert len(named) == 3, named
        for example in named:
            options = {"nodes": 16} if field.name == "topology" else {}
            made = make(field.name, example, _FACTORIES[field.name], object, **options)
            RunConfig(**{field.name: example})
            if field.name == "aggregator":  # an example may need a larger cohort than the default
                made.check(np.zeros(2, np.float32), RunConfig().clients)
            if field.name == "attack":
                made.check(fedsim.datasets.load(RunConfig().dataset).train)


def test_an_algorithm_without_client_optimizer_has_no_such_options(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--algorithm", "fedsgd", "--help"])
    text = capsys.readouterr().out
    assert "--client-learning-rate" not in text and "--server-learning-rate" in text
    assert "--client-devices" in text and "--client-failures" in text


@pytest.mark.parametrize("command", ["datasets", "models", "algorithms"])
def test_lists_of_registered_names(command, capsys):
    assert main([command]) == 0
    names = {"datasets": "digits", "models": "emnist_cnn", "algorithms": "fedyogi"}
    assert any(line.startswith(names[command]) for line in capsys.readouterr().out.splitlines())


def test_commands_are_listed(capsys):
    assert main([]) == 0 and "resume FOLDER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset", "digit"], "There is no dataset 'digit'. Did you mean 'digits'?"),
        (["--dataset", "digits(alhpa=1)"], "The partition 'dirichlet' has no option 'alhpa'. Did you mean 'alpha'?"),
        (["--dataset", "nowhere.py:load"], "nowhere.py:load': there is no file"),
        (["--model", "digits_dense(hiden=(3,))"], "The model 'digits_dense' has no option 'hiden'. Did you mean 'hidden'?"),
        (["--model", "digits_dens"], "There is no model 'digits_dens'. Did you mean 'digits_dense'"),
        (["--model", "dense"], "The model 'dense' needs the option num_classes"),
        (["--algorithm", "fedporx"], "There is no algorithm 'fedporx'. Did you mean 'fedprox' or 'fedper'?"),
        (["--algorithm", "nowhere.py:Mine"], "nowhere.py:Mine': there is no file"),
        (["--algorithm", "no.such.module:Mine"], "Cannot import 'no.such.module:Mine'"),
        (["--algorithm", "fedsim.algorithms:FedPox"], "has no 'FedPox'. Did you mean 'FedProx'"),
        (["--algorithm", "fedsim:Batches"], "is not a subclass of fedsim.Algorithm"),
        (["--rounds", "0"], "Expected rounds >= 1, got rounds=0: give"),
        (["--batch-size", "-5"], "Expected batch_size >= 1, got batch_size=-5: give"),
        (["--epochs", "0"], "Expected epochs >= 1, got epochs=0: give"),
        (["--epochs", "2", "--steps", "3"], "Expected epochs or steps, got epochs=2 and steps=3: leave out steps"),
        (["--clients", "0"], "Expected clients >= 1, got clients=0: give"),
        (["--clients", "101"], "A cohort of clients=101 is larger than the population of 100. Give at most clients=100."),
        (["--client-learning-rate", "0"], "Expected client_learning_rate > 0 and finite, got client_learning_rate=0.0: give"),
        (["--server-learning-rate", "-1"], "Expected server_learning_rate > 0 and finite, got server_learning_rate=-1.0: give"),
        (["--seed", "-1"], "Expected seed >= 0, got seed=-1"),
        (["--clip", "nan"], "Expected clip > 0 and finite, or None, got clip=nan: None does not clip updates."),
        (["--aggregator", "krum(attackers=1.5)"], "Expected attackers >= 0, got attackers=1.5: give a whole number."),
        (["--compressor", "top_k(fraction=2.0)"], "Expected 0 < fraction <= 1, got fraction=2.0."),
        (["--attack", "label_flip(num_classes=5)"], "Expected labels 'y' from 0 to 4, got 0 to 9. Set num_classes=5 to"),
        (["--algorithm", "fedprox", "--mu", "-1"], "Expected mu >= 0 and finite, got mu=-1.0"),
        (["--data", "/nowhere"], "No folder /nowhere to read 'digits' from"),
        (["--model", "emnist_dense"], "Feature 'x' has shape [8, 8, 1] per example, and the model expects [28, 28, 1]"),
        (["--execution", "jit", "--devices", "2"], "execution='jit' uses one device, got devices=2"),
        (["--from", "/nowhere"], "There is no run in /nowhere"),
        (["--faults", "/nowhere.json"], "There is no file /nowhere.json, which the configuration of the run names"),
        (["--faults", "f.json", "--client-failures", "0.1"], "got faults='f.json' and client_failures=0.1: leave one out"),
        (["--client-traces-period", "60"], "Expected client_traces with client_traces_period=60.0, got none"),
        (["--upload-rate", "fast"], "There is no law of upload_rate 'fast'. There are constant"),
        (["--download-rate", "0"], "Expected download_rate > 0 bytes per second, got download_rate=0.0"),
        (
            ["--response-timeout", "0"],
            "Expected response_timeout > 0 and finite, or None, got response_timeout=0.0: give seconds",
        ),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_status_2(arguments, expected, capsys, tmp_path):
    assert main(["run", *arguments, "--folder", str(tmp_path / "r"), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedsim: error: ") and error.count("\n") == 1 and expected in error and "Traceback" not in error


def test_the_error_for_an_unwritable_folder_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["run", *SMALL, "--folder", str(tmp_path / "file"), "--no-progress"]) != 0
    error = capsys.readouterr().err
    assert "Cannot write to the run folder" in error and error.count("\n") == 1


def test_a_traceback_is_printed_on_request(capsys):
    assert main(["run", "--rounds", "0", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_unknown_option_and_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--roundz", "3"])
    assert stop.value.code == 2 and "--rounds" in capsys.readouterr().err
    assert main(["rum"]) == 2 and "Did you mean 'run'" in capsys.readouterr().err


def test_another_configuration_in_the_folder_is_refused(finished, capsys):
    assert main(["run", "--from", str(finished), "--mu", "0.25", "--folder", str(finished)]) == 2
    error = capsys.readouterr().err
    assert '"mu": 0.25' in error and '"mu": 0.5' in error


_CUSTOM = '''
import dataclasses
from typing import Literal
import jax.numpy as jnp
from fedsim import Algorithm, ClientUpdate
from fedsim.algorithms import FedAvg

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Shrinking(FedAvg):
    """FedAvg with a penalty.

    Attributes:
      penalty: how much large
        parameters cost.
    """
    penalty: float = 0.25
    norm: Literal["l1", "l2"] = "l2"
    def client_loss(self, shared, params, batch):
        squares = [jnp.sum(jnp.square(w)) for layer in params.values() for w in layer.values()]
        return super().client_loss(shared, params, batch) + self.penalty * sum(squares)

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Counting(Algorithm):
    """No model, no optimizer, and a Python loop."""
    step: int = 1
    client_learning_rate: float = 0.0625
    def init(self, key): return jnp.zeros((), jnp.int32)
    def apply(self, state, cohort): return state + self.step * sum(1 for _ in cohort), {"clients": jnp.int32(len(cohort))}
'''


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "custom.py").write_text(_CUSTOM)
    return tmp_path / "custom.py"


def test_custom_algorithm_by_import_path(custom, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["run", *SMALL, "--algorithm", "custom.py:Shrinking"]
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--penalty FLOAT How much large parameters cost. (default: 0.25)" in text and "--norm {l1,l2}" in text
    assert main([*arguments, "--penalty", "0.5", "--folder", "r", "--no-progress"]) == 0
    monkeypatch.chdir("/")
    assert main(["resume", str(tmp_path / "r"), "--no-progress"]) == 0
    config = read_config(tmp_path / "r")["config"]
    assert config["algorithm"] == f"{custom}:Shrinking" and config["hyperparameters"]["penalty"] == 0.5


def test_custom_algorithm_without_model_or_optimizer(custom, tmp_path):
    arguments = ["run", "--algorithm", f"{custom}:Counting", "--step", "2", "--rounds", "3", "--clients", "4"]
    assert main([*arguments, "--folder", str(tmp_path / "r"), "--no-progress"]) == 0
    assert read_config(tmp_path / "r")["config"]["client_learning_rate"] == 0.0625
    assert [line["clients"] for line in read_metrics(tmp_path / "r/metrics.jsonl")] == [4, 4, 4]


@pytest.mark.slow
def test_paths_of_code_in_options_become_absolute(tmp_path, monkeypatch, capsys):
    """So that the run can be continued in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def weight(a):\n    return lambda staleness: a / (1 + staleness)\n")
    buffered = "buffered(size=2, concurrency=3, staleness_weight='{}mine.py:weight(a=0.5)')"
    arguments = ["run", *SMALL, "--synchronization", buffered.format(""), "--folder", "r", "--no-progress"]
    assert main(arguments) == 0
    stored = read_config(tmp_path / "r")
    assert stored["config"]["synchronization"] == buffered.format(f"{tmp_path.resolve()}/")
    assert list(stored["code"]) == [str(tmp_path.resolve() / "mine.py")]
    monkeypatch.chdir("/")
    assert main(["resume", str(tmp_path / "r"), "--no-progress"]) == 0


def test_dataset_and_model_with_options_by_import_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from fedsim import datasets\n"
        "def load(data, cache, *, clients=100):\n"
        "    digits = datasets.load('digits')\n"
        "    ids = digits.train.client_ids[:clients]\n"
        "    return {'train': digits.train.select(ids), 'test': digits.test.select(ids)}\n"
    )
    arguments = ["run", *SMALL[2:], "--dataset", "mine.py:load(clients=7)", "--model", "digits_dense(hidden=(5,))"]
    assert main([*arguments, "--no-progress"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("load-fedavg-20")
    config = read_config(folder)["config"]
    assert config["dataset"] == f"{tmp_path}/mine.py:load(clients=7)"
    monkeypatch.chdir("/")
    assert main(["resume", str(folder), "--no-progress"]) == 0
    assert build(RunConfig.from_json(config), Settings()).test_data.num_clients == 7


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Creates files of faults and of traces for the clients of digits, and a run with them."""
    path = tmp_path_factory.mktemp("clock")
    faults = {0: fedsim.systems.Fault(failure=0.5, recovery=30.0), 3: fedsim.systems.Fault(lost_up=2)}
    fedsim.systems.FaultSchedule(faults, outages=[(20.0, 25.0)]).write(path / "faults.json")
    rows = [f"{i},0-60 90-120,{1 + i % 3}" for i in range(100)]
    (path / "traces.csv").write_text("\n".join(["client,online,seconds_per_step", *rows]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        files = ["--faults", "faults.json", "--client-traces", "traces.csv", "--client-traces-period", "120"]
        network = ["--retries", "1", "--upload-rate", "260", "--download-rate", "log_normal(sigma=1, median=1e4)"]
        policy = ["--response-timeout", "50", "--late-updates", "use", "--synchronization", "buffered(size=2, concurrency=4)"]
        assert main(["run", *SMALL, *files, *network, *policy, "--folder", "r", "--no-progress"]) == 0
    return path


def test_faults_traces_and_policy_are_those_of_the_files_and_options(clock):
    from fedsim import systems

    algorithm, sampler, _ = build(RunConfig.from_json(read_config(clock / "r")["config"]), Settings())
    expected = systems.schedule(
        fedsim.UniformSampler(sampler.data, clients=3, seed=0),
        4,
        steps=algorithm.batches.num_steps(sampler.data.sizes),
        synchronization=systems.Buffered(size=2, concurrency=4),
        devices=systems.Devices(
            download_rate=systems.LogNormal(sigma=1.0, median=1e4),
            upload_rate=260.0,
            availability=systems.Traces.read(clock / "traces.csv", period=120.0),
        ),
        faults=systems.FaultSchedule.read(clock / "faults.json"),
        policy=systems.Policy(timeout=50.0, retries=1, late="use"),
        bytes_down=2600 + 4,  # 650 parameters, and the number of the round
        bytes_up=2600,
    )
    times = [line["simulated_seconds"] for line in read_metrics(clock / "r/metrics.jsonl") if "simulated_seconds" in line]
    assert times == expected.steps.time.tolist() and times[0] > 10  # an upload takes 10 seconds
    np.testing.assert_array_equal(sampler.schedule.updates.client, expected.updates.client)
    assert expected.totals.lost > 0


def test_a_run_does_not_go_on_with_a_changed_file(clock, capsys):
    path = clock / "faults.json"
    content = path.read_text()
    path.write_text(content.replace("0.5", "0.25"))
    try:
        for arguments in (["resume"], ["run", "--from"], ["plan", "--from"]):
            assert main([*arguments, str(clock / "r"), "--no-progress"]) == 2
            assert f"{path} has changed since the run was configured" in capsys.readouterr().err
    finally:
        path.write_text(content)


@pytest.mark.slow
def test_a_run_with_files_is_repeated_or_gets_other_files(clock, tmp_path, capsys):
    assert main(["run", "--from", str(clock / "r"), "--folder", str(tmp_path / "again"), "--no-progress"]) == 0
    _assert_same(clock / "r", tmp_path / "again")
    fedsim.systems.FaultSchedule().write(tmp_path / "none.json")
    options = ["--from", str(clock / "r"), "--faults", str(tmp_path / "none.json"), "--no-progress", "--folder"]
    assert main(["run", *options, str(clock / "r")]) == 2
    assert 'faults: "' in capsys.readouterr().err
    assert main(["run", *options, str(tmp_path / "changed")]) == 0
    assert main(["plan", "--from", str(clock / "r")]) == 0


@pytest.mark.slow
def test_a_sweep_has_faults_and_policy(clock, tmp_path):
    options = ["--faults", str(clock / "faults.json"), "--retries", "0,2", "--rounds", "2"]
    assert main(["run", *SMALL, *options, "--folder", str(tmp_path / "s"), "--no-progress"]) == 0
    assert sorted(path.name for path in (tmp_path / "s").glob("retries=*")) == ["retries=0,seed=0", "retries=2,seed=0"]
    assert main(["resume", str(tmp_path / "s"), "--no-progress"]) == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "exponential"])
def test_learning_rate_schedules_run(schedule, tmp_path):
    arguments = ["--client-schedule", schedule, "--client-schedule-every", "2", "--client-schedule-staircase"]
    assert main(["run", *SMALL, *arguments, "--folder", str(tmp_path / "r"), "--no-progress"]) == 0
    assert read_metrics(tmp_path / "r/metrics.jsonl")[-1]["test_loss"] < 2.5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_that_the_printed_command_resumes(number, status, tmp_path):
    folder, environment = tmp_path / "r", {**os.environ, "PYTHONPATH": str(Path(fedsim.__file__).parents[1])}
    command = [
        sys.executable,
        "-m",
        "fedsim",
        "run",
        *SMALL,
        "--rounds",
        "200000",
        "--evaluate-every",
        "100000",
        "--folder",
        str(folder),
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == status, error
    assert "Traceback" not in error and f"To continue: fedsim resume {folder}" in error
    rounds = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["round"]
    assert f"stopped after round {rounds} of 200000" in error
    assert int(max(path.name for path in (folder / "checkpoints").iterdir())) == rounds


@pytest.fixture
def custom_run(custom, tmp_path):
    """Creates a run folder whose configuration names a Python file, which writes the file ``ran`` when it is executed."""
    custom.write_text(_CUSTOM + f"\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    arguments = ["run", *SMALL, "--rounds", "1", "--algorithm", f"{custom}:Shrinking", "--no-progress"]
    assert main([*arguments, "--folder", str(tmp_path / "r")]) == 0
    (tmp_path / "ran").unlink()
    return tmp_path / "r"


def test_the_user_s_own_folder_needs_no_trust_at_any_path(custom_run, tmp_path):
    moved = custom_run.rename(tmp_path / "moved")
    assert main(["resume", str(moved), "--no-progress"]) == 0
    assert main(["resume", str(moved), "--no-progress", "--rounds", "2"]) == 0
    assert main(["run", "--from", str(moved), "--folder", str(tmp_path / "again"), "--no-progress"]) == 0


def test_replay_needs_trust_for_the_code_of_another_user(custom_run, custom, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache of another user"))
    assert main(["replay", str(custom_run), "--round", "1"]) == 2
    assert f"{custom}:Shrinking" in capsys.readouterr().err and not (tmp_path / "ran").exists()
    assert main(["replay", str(custom_run), "--round", "1", "--trust"]) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("arguments", [["resume"], ["run", "--from"]])
def test_code_of_another_user_is_named_and_not_run_without_trust(arguments, custom_run, custom, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache of another user"))
    assert main([*arguments, str(custom_run), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert f"{custom}:Shrinking" in error and "with --trust" in error and error.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    where = [] if arguments == ["resume"] else ["--folder", str(tmp_path / "r2")]
    assert main([*arguments, str(custom_run), *where, "--no-progress", "--trust"]) == 0
    assert (tmp_path / "ran").exists()
    folder = custom_run if arguments == ["resume"] else tmp_path / "r2"
    assert main(["resume", str(folder), "--no-progress"]) == 0  # the folder is now signed by this user


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"config": 3}', '{"config": {"dataset": 3}, "settings": {}}', '{"config": {}, "config": {}}', "\xe9"],
)
@pytest.mark.parametrize("command", [["resume"], ["replay"], ["run", "--from"]])
def test_a_damaged_configuration_is_one_line(command, content, tmp_path, capsys):
    for name in ("config.json",) if command != ["resume"] else ("config.json", "sweep.json"):
        (tmp_path / name).write_text(content, encoding="latin-1")
        assert main([*command, str(tmp_path), *(["--round", "1"] if command == ["replay"] else [])]) == 2
        error = capsys.readouterr().err
        assert error.startswith("fedsim: error: ") and error.count("\n") == 1 and str(tmp_path) in error


EVIL = [
    "{evil}:touch(path={mark!r})",
    "os:system(command='touch {mark}')",
    "tfds:{evil}:touch",
    "tfds:x/../../{evil}:touch(path={mark!r})",
    "buffered(size=1, concurrency=1, staleness_weight=\"{evil}:touch(path='{mark}')\")",
]
PLACES = [
    *(field.name for field in dataclasses.fields(RunConfig) if field.name not in ("data", "faults", "client_traces")),
    *(f"hyperparameters, {name}" for name in ("mu", "unknown")),
    *(f"varied, {name}" for name in ("client_learning_rate", "robust_mixing", "unknown")),
]


def _with_text(place, text, folder):
    """Returns the content of ``config.json`` and ``sweep.json`` with a text in a field or among the varied values."""
    part, _, name = place.rpartition(", ")
    config = dataclasses.asdict(RunConfig(dataset="digits", algorithm="fedprox", rounds=1))
    varied = {name: [text]} if part == "varied" else {}
    if not varied:
        (config["hyperparameters"] if part else config)[name] = text
    stored = {"config": config, "settings": {"folder": folder}, "population": {}, "signature": "0" * 64}
    return stored, {**stored, "varied": varied, "seeds": [0]}


@pytest.mark.parametrize("text", EVIL)
def test_code_in_any_field_is_found(text):
    text = text.format(evil="/a/evil.py", mark="x")
    for place in PLACES:
        stored, sweep = _with_text(place, text, "runs/a:b")
        is_data = place == "dataset" and text.startswith("tfds:")
        assert bool(named_code(sweep)) != is_data, place
        if not place.startswith("varied"):
            assert bool(named_code(stored)) != is_data, place


@pytest.mark.parametrize("command", [["resume"], ["replay", "--round", "1"], ["run", "--from"], ["plan", "--from"]])
def test_no_text_of_another_user_s_folder_runs_code(command, tmp_path, capsys):
    evil, mark, folder = tmp_path / "evil.py", tmp_path / "ran", tmp_path / "run"
    evil.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ntouch = lambda path: open(path, 'w').close()\n")
    folder.mkdir()
    for text in EVIL:
        for place in ("model", "robust_mixing", "topology", "mixing", "hyperparameters, mu", "varied, robust_mixing"):
            stored, sweep = _with_text(place, text.format(evil=evil, mark=str(mark)), str(folder))
            (folder / "config.json").write_text(json.dumps(stored))
            if command[0] == "resume":
                (folder / "sweep.json").write_text(json.dumps(sweep))
            elif place.startswith("varied"):
                continue
            arguments = [*command, str(folder)] if "--from" in command else [command[0], str(folder), *command[1:]]
            assert main(arguments) == 2, place
            assert "--trust" in capsys.readouterr().err and not mark.exists(), place


@pytest.mark.parametrize("name", ["{evil}:", "{evil}:x-y", "{evil}:a.b(c=1)", "evil_of_a_stranger:x-y", "evil_of_a_stranger:"])
def test_a_text_that_is_no_name_of_code_imports_nothing(name, tmp_path, monkeypatch, capsys):
    mark, evil, folder = tmp_path / "ran", tmp_path / "evil_of_a_stranger.py", tmp_path / "run"
    monkeypatch.syspath_prepend(tmp_path)
    evil.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    folder.mkdir()
    for field in ("model", "dataset", "algorithm", "aggregator"):
        stored, _ = _with_text(field, name.format(evil=evil), str(folder))
        (folder / "config.json").write_text(json.dumps(stored))
        assert main(["plan", "--from", str(folder)]) == 2 and not mark.exists()
        error = capsys.readouterr().err
        assert "give FILE.py:NAME or MODULE:NAME" in error or "takes no" in error


@pytest.mark.parametrize("change", [{"rounds": 2}, {"hyperparameters": {"penalty": 0.5}}, {"data": "/tmp"}])
def test_a_signature_is_of_the_whole_content(change, custom_run, tmp_path, capsys):
    stored = read_config(custom_run)
    stored["config"] |= change
    (custom_run / "config.json").write_text(json.dumps(stored))
    assert main(["resume", str(custom_run), "--no-progress"]) == 2
    assert "with --trust" in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_any_text_may_be_in_the_config_of_a_run_in_python():
    for text in ("lr: 0.1 (warm up", "a: b)", "x:{[]: 1}", "n(a={[]: 1}) : c"):
        assert signature({"config": {"note": text}}) is None


_NAMED = """
from __future__ import annotations
import fedsim, functools, typing
from os import system
from shutil import rmtree
if typing.TYPE_CHECKING:
    from nowhere import Nothing
def net(): return fedsim.models.digits_logistic()
def annotated(a: Nothing = 0) -> fedsim.Model: return net()
def unknown() -> Nothing: return net()
part = functools.partial(net)
of_system = functools.partial(system, "false")
"""


def test_only_functions_of_the_user_s_file_need_no_annotation(tmp_path, monkeypatch):
    file = tmp_path / "named_by_a_user.py"
    file.write_text(_NAMED)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{file}:net", f"{file}:part", f"{file}:annotated", f"{file}:unknown", "named_by_a_user:annotated"):
        assert fedsim.models.get(name).num_classes == 10
    there = tmp_path / "stays"
    there.mkdir()
    for name in (
        f"{file}:of_system", f"{file}:system(command='false')", f"{file}:rmtree(path={str(there)!r})", "named_by_a_user:net",
        "named_by_a_user:unknown", f"{shutil.__file__}:rmtree(path={str(there)!r})", f"{os.__file__}:system(command='false')",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no function that is annotated to return one"):
            fedsim.models.get(name)
    assert there.exists()


@pytest.mark.parametrize("option", ["robust-mixing", "topology", "aggregator", "model", "dataset", "client-devices", "attack"])
def test_a_name_of_a_module_gets_only_objects_that_the_field_expects(option, tmp_path, capsys):
    mark = tmp_path / "ran"
    arguments = ["--algorithm", "dpsgd"] if option in ("robust-mixing", "topology") else []
    for text in (f"os:system(command='touch {mark}')", f"shutil:copy(src={__file__!r}, dst={str(mark)!r})"):
        command = ["run", *arguments, f"--{option}", text, "--rounds", "1", "--folder", str(tmp_path / "r"), "--no-progress"]
        assert main(command) == 2 and not mark.exists()
        assert "that is annotated to return one" in capsys.readouterr().err


def test_a_function_of_a_module_with_an_annotation_is_called(tmp_path):
    arguments = ["run", *SMALL, "--rounds", "1", "--no-progress", "--folder", str(tmp_path / "r")]
    assert (
        main([*arguments, "--model", "fedsim.models:digits_logistic", "--dataset", "fedsim.datasets._digits:load_digits"]) == 0
    )


@pytest.mark.filterwarnings("always")
def test_a_run_does_not_continue_with_other_code(custom, tmp_path, capsys):
    """Neither with another algorithm file, nor with another module that this imports; replay and a new run only say so."""
    module, folder = tmp_path / "rates_of_a_user.py", tmp_path / "r"
    module.write_text("FACTOR = 1.0\n")
    source = custom.read_text()
    custom.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport rates_of_a_user\n{source}")
    arguments = ["run", *SMALL, "--algorithm", f"{custom}:Shrinking", "--no-progress", "--folder"]
    assert main([*arguments, str(folder)]) == 0
    code = read_config(folder)["code"]
    assert list(code) == sorted(map(str, (custom.resolve(), module.resolve())))
    assert main(["resume", str(folder), "--no-progress"]) == 0

    for file in (custom, module):
        original = file.read_text()
        file.write_text(original + "\nmore = 1\n")
        capsys.readouterr()
        assert main(["resume", str(folder), "--no-progress"]) == 2
        error = capsys.readouterr().err
        assert "has changed since the run began" in error and str(file.resolve()) in error and "Restore it" in error
        assert main(["replay", str(folder), "--round", "1"]) == 0
        assert f"{file.resolve()}. The present code is used." in capsys.readouterr().err
        assert main(["run", "--from", str(folder), "--folder", str(tmp_path / file.stem), "--no-progress"]) == 0
        assert f"{file.resolve()}. The present code is used." in capsys.readouterr().err
        file.write_text(original)
    assert main(["resume", str(folder), "--no-progress"]) == 0
    sys.modules.pop("rates_of_a_user")
    sys.path.remove(str(tmp_path))


@pytest.mark.filterwarnings("always")
def test_other_versions_are_said_and_kept(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "r")
    stored = read_config(folder)
    assert {"fedsim", "python", "jax", "jaxlib", "numpy", "optax", "dm-haiku"} <= stored["versions"].keys()
    stored["versions"]["optax"] = "0.0.1"
    (folder / "config.json").write_text(json.dumps(stored))
    assert main(["resume", str(folder), "--no-progress"]) == 0
    assert "ran with optax 0.0.1 (now " in capsys.readouterr().err
    assert [earlier["versions"]["optax"] for earlier in read_config(folder)["earlier"]] == ["0.0.1"]
    assert main(["resume", str(folder), "--no-progress"]) == 0
    assert "optax" not in capsys.readouterr().err and len(read_config(folder)["earlier"]) == 1


def test_a_configuration_that_names_no_code_needs_no_trust(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    assert main(["resume", str(finished), "--no-progress"]) == 0
    assert "signature" not in read_config(finished)


def test_a_key_that_others_can_read_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    config = {"config": {"algorithm": "mine.py:Mine"}}
    signed = signature(config)
    assert signed and signed == signature(config) != signature({"config": {"algorithm": "yours.py:Mine"}})
    (key,) = tmp_path.glob("run-key-*")
    key.chmod(0o644)
    assert signature(config) is None


def test_the_help_says_whose_code_is_run(finished, capsys):
    assert main(["resume", "--help"]) == 0
    for arguments in (["resume", str(finished), "--help"], ["run", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        text = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "--trust" in text and "Python code that the configuration of the folder names" in text


def test_every_command_is_a_module_and_in_the_help(capsys):
    modules = {path.stem for path in Path(commands.__file__).parent.glob("_*.py")}
    assert {f"_{command}" for command in commands.COMMANDS} <= modules
    assert main(["--help"]) == 0
    assert re.findall(r"^  ([a-z]+)", capsys.readouterr().out, re.MULTILINE) == list(commands.COMMANDS)


def test_a_description_is_that_of_the_nearest_class_that_has_one():
    from fedsim.commands._configuration import _documentation

    algorithm = fedsim.algorithms.FedProx
    assert _documentation(algorithm, "mu") != f"The field mu of {algorithm.__name__}."
    assert _documentation(algorithm, "server_learning_rate") == "Learning rate of the server."
    assert _documentation(algorithm, "nowhere") == "The field nowhere of FedProx."
