"""The command `fedsim run`: its options and their help, its errors, the folder that it writes, and runs from a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import SMALL

import fedsim
from fedsim.commands import main
from fedsim.commands._configuration import configured
from fedsim.commands._run import with_folder
from fedsim.configuration._client_optimizer import OPTIMIZERS
from fedsim.experiment import RunConfig, Settings, build, published, read_config, read_metrics, restore
from fedsim.names import make


def _parameters(folder):
    stored = read_config(folder)
    algorithm = build(RunConfig.from_json(stored["config"]), Settings(**stored["settings"])).algorithm
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restore(folder, algorithm)[0].params)]


def _assert_same(a, b):
    for ours, theirs in zip(_parameters(a), _parameters(b), strict=True):
        np.testing.assert_array_equal(ours, theirs)


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
        "update_norms": False,
        "momentum": 0.5,
        "server_learning_rate": published("digits", "fedavgm").values["server_learning_rate"],
    }


@pytest.mark.parametrize(
    ("dataset", "model"), [("digits", "digits_logistic"), ("digits(clients=12)", "digits_logistic"), ("toy_regression", None)]
)
def test_from_a_folder_another_dataset_keeps_the_hyperparameters_and_other_options_of_it_the_model(dataset, model, tmp_path):
    config = RunConfig(dataset="digits", algorithm="fedprox", model="digits_logistic", hyperparameters={"mu": 0.5})
    (tmp_path / "config.json").write_text(json.dumps({"config": dataclasses.asdict(config), "settings": {}}))
    found = configured(["--from", str(tmp_path), "--dataset", dataset], "fedsim run", "", {}).config
    assert found.hyperparameters["mu"] == 0.5 and found.model == model


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


@pytest.mark.slow
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
        main(["run", "--dataset", "emnist62", "--algorithm", "fedadam", "--help", "all"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "Reddi et al. 2021" in text
    options = """dataset data model algorithm rounds clients batch-size epochs steps max-steps weighting nonfinite seed
        evaluate-every client-learning-rate client-momentum client-schedule server-learning-rate b1 b2 tau folder from
        sampler dp-epsilon dp-noise dp-delta dp-clip checkpoint-every writers execution devices lanes example-storage
        rounds-per-dispatch"""
    for option in options.split():
        assert f"--{option} " in text, option
    for default in ("1500", "0.03162", "0.003162", "0.99", "0.0001"):
        assert f"(default: {default})" in text
    assert "--mu" not in text


def options_of_help(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    return set(re.findall(r"^\W --(?!no-)([\w-]+)", text, re.MULTILINE)), text


def test_help_lists_the_main_options_and_says_how_to_list_others(capsys):
    options, text = options_of_help(capsys, "--help")
    assert {"dataset", "algorithm", "rounds", "clients", "client-learning-rate", "seeds", "folder"} <= options
    assert len(options) <= 17 and "fedsim run --help all" in text and "virtual clock" in text
    scaffold, _ = options_of_help(capsys, "--algorithm", "scaffold", "--help")
    assert {"control-variate", "server-learning-rate"} <= scaffold - options


def test_help_lists_the_options_under_a_heading(capsys):
    options, _ = options_of_help(capsys, "--help", "attacks")
    assert options == {"attack", "attackers", "stragglers", "drop-stragglers"}
    assert {"synchronization", "step-seconds", "message-loss"} <= options_of_help(capsys, "--help", "clock")[0]
    assert main(["run", "--help", "clok"]) == 2
    assert "There is no word in a heading 'clok'. Did you mean 'clock'?" in capsys.readouterr().err


_FACTORIES = {
    "aggregator": fedsim.aggregators.AGGREGATORS,
    "compressor": fedsim.compressors.COMPRESSORS,
    "attack": fedsim.attacks.ATTACKS,
    "topology": fedsim.decentralized.TOPOLOGIES,
    "synchronization": fedsim.systems.SYNCHRONIZATIONS,
    "step_seconds": fedsim.systems.LAWS,
    "client_optimizer": OPTIMIZERS,
    "sampler": fedsim.samplers.SAMPLERS,
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
            options |= {"learning_rate": 0.1} if field.name == "client_optimizer" else {}
            if field.name == "sampler":
                options = {"data": fedsim.datasets.load(RunConfig().dataset).train, "clients": 10, "seed": 0}
            made = make(field.name, example, _FACTORIES[field.name], object, **options)
            RunConfig(**{field.name: example})
            if field.name == "aggregator":  # an example may need a larger cohort than the default
                made.check(np.zeros(2, np.float32), RunConfig().clients)
            if field.name == "attack":
                made.check(fedsim.datasets.load(RunConfig().dataset).train)


def test_an_algorithm_without_client_optimizer_has_no_such_options(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--algorithm", "fedsgd", "--help", "all"])
    text = capsys.readouterr().out
    assert "--client-learning-rate" not in text and "--server-learning-rate" in text
    assert "--step-seconds" in text and "--client-failures" in text


def test_the_weighting_is_no_option_of_algorithms_that_determine_it(capsys):
    for algorithm in ("fedavg", "ifca", "reptile", "dssgd", "agnosticfedavg"):
        with pytest.raises(SystemExit):
            main(["run", "--algorithm", algorithm, "--help", "all"])
        assert ("--weighting {" in capsys.readouterr().out) == (algorithm == "fedavg")
    config = configured(["--algorithm", "reptile"], "fedsim run", "", {}).config
    assert config.weighting == "uniform"  # so that the folder says what the run does


def test_an_option_that_means_different_things_in_several_algorithms_is_refused():
    for given in ["--clip", "0.1"], ["--clip=0.1"]:
        with pytest.raises(ValueError, match="--clip means different things in these algorithms"):
            configured(["--algorithm", "fedavg,dssgd", *given], "fedsim run", "", {})


def test_a_general_option_counts_for_the_algorithms_that_take_it():
    algorithms = "fedavg,agnosticfedavg", "agnosticfedavg,fedavg"
    several = [
        configured(["--algorithm", each, "--num-domains", "2", "--weighting", "uniform"], "", "", {}) for each in algorithms
    ]
    assert [each.config.weighting for each in several] == [
        "uniform",
        "examples",
    ]  # the first algorithm's, which has the option or not
    assert [[fields.get("weighting") for _, fields in each.differing] for each in several] == [
        [None, "examples"],
        [None, "uniform"],
    ]


def test_the_help_says_what_an_option_means_in_the_algorithm(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--algorithm", "dssgd", "--help", "communication"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Changes are clipped to [-clip, clip]." in text and "Largest Euclidean norm" not in text


@pytest.mark.first(21)
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


def test_another_configuration_in_the_folder_is_refused(finished, capsys):
    assert main(["run", "--from", str(finished), "--mu", "0.25", "--folder", str(finished)]) == 2
    error = capsys.readouterr().err
    assert '"mu": 0.25' in error and '"mu": 0.5' in error


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


@pytest.mark.slow
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

    algorithm, sampler, *_ = build(RunConfig.from_json(read_config(clock / "r")["config"]), Settings())
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


@pytest.mark.first(1)
@pytest.mark.parametrize("schedule", ["linear", "cosine(end=0.1)", "exponential(every=2, staircase=True)"])
def test_learning_rate_schedules_run(schedule, tmp_path):
    arguments = ["--client-schedule", schedule]
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


def test_a_description_is_that_of_the_nearest_class_that_has_one():
    from fedsim.commands._configuration import _documentation

    algorithm = fedsim.algorithms.FedProx
    assert _documentation(algorithm, "mu") != f"The field mu of {algorithm.__name__}."
    assert _documentation(algorithm, "server_learning_rate") == "Learning rate of the server."
    assert _documentation(algorithm, "nowhere") == "The field nowhere of FedProx."


@pytest.mark.parametrize("command", [["plan"], ["privacy", "--dp-noise", "1", "--dp-delta", "1e-5", "--dp-clip", "1"]])
@pytest.mark.parametrize("several", [["--clients", "10,20"], ["--seeds", "2"]])
def test_commands_about_one_run_refuse_several(command, several, capsys):
    assert main([*command, "--model", "digits_logistic", *several]) == 2
    assert "Expected the options of a single run" in capsys.readouterr().err


def test_a_folder_with_former_names_of_options_gives_the_defaults(tmp_path):
    config = dataclasses.asdict(RunConfig(algorithm="scaffold", client_schedule="cosine", hyperparameters={"option": "I"}))
    config |= {"client_schedule_end": 0.25, "client_devices": "2"}
    del config["step_seconds"]
    (tmp_path / "config.json").write_text(json.dumps({"config": config, "settings": {"memory": "stream"}}))
    found = configured(["--from", str(tmp_path)], "fedsim run", "", {})
    assert found.config.client_schedule == "cosine(end=0.25)" and found.config.step_seconds == "2"
    assert found.config.hyperparameters["control_variate"] == "I" and found.settings.example_storage == "stream"


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    names = []
    for _ in range(3):
        folder = Path(with_folder(RunConfig(), Settings()).folder)
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert names == [f"digits-fedavg-20260101-000000{suffix}" for suffix in ("", "-2", "-3")]
