"""Sweeps: a run folder for each combination of values and seed, with the content of a separate run."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import time
from pathlib import Path

import federation
import jax
import numpy as np
import pytest

from fedsim import datasets, experiment, sweeps
from fedsim.commands import main
from fedsim.comparison import read_runs
from fedsim.configuration import build_members
from fedsim.configuration._build import _sampler, _with_few_labels
from fedsim.configuration._config import options_of_samplers
from fedsim.data import population_identity
from fedsim.execution import _members, _memory
from fedsim.experiment import Checkpoints, RunConfig, Settings, build, read_config, read_metrics, restore, run_experiment
from fedsim.experiment._run_log import RunLog
from fedsim.experiment.driving import Run
from fedsim.sweeps._result import csv_of
from fedsim.sweeps._sweep import members_of

SMALL = ["--model", "digits_logistic", "--rounds", "4", "--clients", "3", "--epochs", "1", "--evaluate-every", "2"]
ONE_DEVICE = ["--execution", "jit"]
SWEEP = [*SMALL, *ONE_DEVICE, "--algorithm", "fedprox", "--client-learning-rate", "0.05,0.5", "--mu=0.1,1", "--seeds", "2"]
NAMES = [f"client_learning_rate={rate},mu={mu},seed={seed}" for rate in (0.05, 0.5) for mu in (0.1, 1.0) for seed in (0, 1)]
TWO_DEVICES = [*SMALL, "--execution", "pmap", "--devices", "2", "--no-progress"]
RATES = [*TWO_DEVICES, "--client-learning-rate", "0.05,0.1,0.5"]
RATE_NAMES = [f"client_learning_rate={rate},seed=0" for rate in (0.05, 0.1, 0.5)]
slow = pytest.mark.slow


def bits(folder):
    """Returns the bits of the last state, and the metrics without times."""
    stored = read_config(folder)
    algorithm = build(RunConfig.from_json(stored["config"]), Settings(**stored["settings"])).algorithm
    state, round = restore(folder, algorithm)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "metrics.jsonl")]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], round, lines


def quick_pictures(patch):
    patch.setattr(RunLog, "draw", lambda self, folder, title, sampler: (folder / "learning_curve.png").touch())


@pytest.fixture
def no_pictures(monkeypatch):
    quick_pictures(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        quick_pictures(patch)
        assert main(["run", *SWEEP, "--folder", str(folder), "--no-progress"]) == 0
    return folder


def separate(folder, name, *options):
    """Runs the member ``name`` of `RATES` as a run of its own."""
    rate = name.partition(",")[0].partition("=")[2]
    assert main(["run", *TWO_DEVICES, "--client-learning-rate", rate, *options, "--folder", str(folder)]) == 0
    return folder


def files(folder):
    """Returns the names of the files of a run, without those of its checkpoints and TensorBoard files."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.startswith(("tensorboard/", "checkpoints/")))


def assert_close(folder, other):
    """Asserts that two runs have the same files, lines and last round, with numbers that are equal up to the order of sums."""
    assert files(folder) == files(other)
    rounds = [Checkpoints(of / "checkpoints").rounds()[-1] for of in (folder, other)]
    assert rounds[0] == rounds[1]
    for of_one, of_other in zip(*(read_metrics(of / "metrics.jsonl") for of in (folder, other)), strict=True):
        assert list(of_one) == list(of_other)
        for name in of_one.keys() - {"seconds"}:
            assert of_one[name] == pytest.approx(of_other[name], rel=1e-5, abs=1e-6), name


def assert_ran_at_the_same_time(sweep):
    """Asserts that the first two members of `RATES` ran at the same time, so that their rounds took the same time."""
    first, second = (read_metrics(sweep / name / "metrics.jsonl") for name in RATE_NAMES[:2])
    assert [line.get("seconds") for line in first] == [line.get("seconds") for line in second]


@pytest.mark.slow
def test_every_combination_has_the_folder_of_a_separate_run(finished, tmp_path):
    assert sorted(path.name for path in finished.iterdir() if path.is_dir()) == sorted(NAMES)
    alone = tmp_path / "alone"
    options = ["--client-learning-rate", "0.5", "--mu", "0.1", "--seed", "1", "--algorithm", "fedprox"]
    assert main(["run", *SMALL, *ONE_DEVICE, *options, "--folder", str(alone), "--no-progress"]) == 0
    member = finished / "client_learning_rate=0.5,mu=0.1,seed=1"
    assert read_config(member)["config"] == read_config(alone)["config"]
    assert bits(member) == bits(alone)
    names = [{path.name for path in folder.iterdir()} for folder in (member, alone)]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["devices", pytest.param("vmap", marks=slow)])
def test_members_that_run_at_the_same_time_equal_separate_runs(how, tmp_path, no_pictures, caplog):
    """Three members on two devices; one compilation for all of them."""
    sweep = tmp_path / "sweep"
    with jax.log_compiles(), caplog.at_level("WARNING"):
        # A batch size of its own, so that no other test has compiled these programs.
        assert main(["run", *RATES, "--batch-size", "17", "--sweep-mode", how, "--folder", str(sweep)]) == 0
    compiled = [text.split()[1] for text in map(str, caplog.messages) if text.startswith("Compiling ")]
    assert sum("together" in name for name in compiled) == 1
    assert json.loads((sweep / "sweep.json").read_text())["how"] == how
    for name in RATE_NAMES[1:]:
        assert_close(sweep / name, separate(tmp_path / name, name, "--batch-size", "17"))
    assert_ran_at_the_same_time(sweep)


@slow
def test_members_that_run_sequentially_have_the_bits_of_separate_runs(tmp_path, no_pictures):
    sweep = tmp_path / "sweep"
    assert main(["run", *RATES, "--sweep-mode", "sequential", "--folder", str(sweep)]) == 0
    for name in RATE_NAMES:
        assert bits(sweep / name) == bits(separate(tmp_path / name, name))


TOY = ["--dataset", "toy_regression(clients=6)", *SMALL[2:], *ONE_DEVICE, "--rounds", "2", "--no-progress"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["devices", pytest.param("sequential", marks=slow)])
def test_members_with_different_seeds_have_their_own_data_and_the_bits_of_separate_runs(how, tmp_path, no_pictures):
    sweep = tmp_path / "sweep"
    assert (
        main(["run", *TOY, "--client-learning-rate", "0.01,0.02", "--seeds", "2", "--sweep-mode", how, "--folder", str(sweep)])
        == 0
    )
    for seed in (0, 1):
        alone = tmp_path / f"alone {seed}"
        assert main(["run", *TOY, "--client-learning-rate", "0.02", "--seed", str(seed), "--folder", str(alone)]) == 0
        member = sweep / f"client_learning_rate=0.02,seed={seed}"
        assert bits(member) == bits(alone)
        recorded = read_config(member)["population"]
        assert recorded == read_config(alone)["population"]
        assert recorded["dataset"] == f"toy_regression(clients=6, seed={seed})"
        assert recorded["examples"] == datasets.load("toy_regression", clients=6, seed=seed).train.num_examples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "options"),
    [("toy_regression(clients=6)", []), ("digits(clients=20, seed=9)", ["--model", "digits_logistic", "--labels", "0.5"])],
)
def test_no_member_trains_on_the_data_of_one_that_runs_on_another_device(dataset, options, tmp_path, no_pictures):
    """Each seed has other data, or other labels of the same data."""
    options = ["--dataset", dataset, *SMALL[2:], "--rounds", "2", "--no-progress", *options]
    sweep = [
        "--client-learning-rate",
        "0.01,0.02",
        "--seed",
        "1,2",
        "--execution",
        "pmap",
        "--devices",
        "2",
        "--sweep-mode",
        "devices",
    ]
    assert main(["run", *options, *sweep, "--folder", str(tmp_path / "s")]) == 0
    for seed in (1, 2):
        alone, member = tmp_path / f"{seed}", tmp_path / "s" / f"client_learning_rate=0.02,seed={seed}"
        single = ["--client-learning-rate", "0.02", "--seed", str(seed), *ONE_DEVICE]
        assert main(["run", *options, *single, "--folder", str(alone)]) == 0
        assert bits(member)[0] == bits(alone)[0]
        assert_close(member, alone)  # The evaluation of a member uses both devices.


def test_members_with_other_datasets_models_and_algorithms_are_those_of_separate_runs():
    """A sweep in Python may vary any field."""
    names = itertools.product(
        ["digits", "digits(clients=20, seed=1)"], ["digits_logistic", "digits_dense"], ["fedavg", "fedprox"], [0, 4]
    )
    configs = [
        RunConfig(dataset=dataset, model=model, algorithm=algorithm, seed=seed) for dataset, model, algorithm, seed in names
    ]
    members = build_members(configs, Settings(execution="jit"))
    for config, member in zip(configs, members, strict=True):
        options = {"clients": 20, "seed": 1} if "clients" in config.dataset else {"seed": config.seed}
        expected = datasets.load("digits", **options)
        assert population_identity(member.sampler.data) == population_identity(expected.train)
        assert population_identity(member.test_data) == population_identity(expected.test)
        sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(member.algorithm.model.init, jax.random.key(0)))]
        assert (sum(sizes) == 650) == (config.model == "digits_logistic")
        assert type(member.algorithm).__name__.lower() == config.algorithm
    assert len({id(member.sampler.data) for member in members}) == 3


def test_members_share_a_sampler_only_if_it_is_that_of_separate_runs():
    """That of ADPSGD depends on the numbers of steps, and thus on incomplete batches."""
    common = {"dataset": "digits(clients=6)", "model": "digits_logistic", "batch_size": 50}
    configs = [
        RunConfig(**common, algorithm=algorithm, drop_remainder=drop)
        for algorithm, drop in (("dpsgd", False), ("adpsgd", False), ("adpsgd", True))
    ]

    def ids(sampler):
        return [sampler.cohort(round).client_ids for round in range(12)]

    found = [ids(member.sampler) for member in build_members(configs, Settings(execution="jit"))]
    assert found == [ids(build(config, Settings(execution="jit")).sampler) for config in configs]
    assert found[0] != found[1] != found[2]


def test_members_share_an_attack_only_if_it_is_that_of_separate_runs():
    common = {"model": "digits_logistic", "attack": "model_replacement(inner='label_flip(num_classes=10)')", "rounds": 2}
    configs = [RunConfig(**common, synchronization=f"synchronous(over_selection={number})") for number in (1, 2)]
    members = build_members(configs, Settings(execution="jit"))
    assert [member.sampler.cohort(0).attack.clients for member in members] == [10, 5]


def test_samplers_depend_on_no_other_options_than_those_that_runs_with_one_sampler_share():
    read = set()

    class Recording(RunConfig):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    for options in (
        {"attack": "model_replacement(inner='label_flip(num_classes=10)')", "stragglers": 0.5, "epochs": 2},
        {"algorithm": "adpsgd", "step_seconds": "1"},
        {"labels": 0.5, "sampler": "poisson"},
    ):
        made = build(RunConfig(**options), Settings(execution="jit"))
        config = Recording(**options)
        read.clear()
        _sampler(_with_few_labels(made.test_data, type(made.algorithm), config), config, made.algorithm)
        assert {"clients", "seed"} <= read
        assert read & {field.name for field in dataclasses.fields(RunConfig)} <= set(options_of_samplers())


@pytest.mark.slow
def test_a_dataset_with_a_seed_is_the_same_for_all_seeds(tmp_path, no_pictures):
    fixed = ["--dataset", "toy_regression(clients=6, seed=1)", *TOY[2:], "--rounds", "1"]
    assert main(["run", *fixed, "--seeds", "2", "--folder", str(tmp_path / "s")]) == 0
    first, second = (read_config(tmp_path / "s" / f"seed={seed}") for seed in (0, 1))
    assert first["population"] == second["population"] and "dataset" not in first["population"]
    assert first["config"]["dataset"] == "toy_regression(clients=6, seed=1)"
    # Repeated with another seed, the run keeps its data, and one without a seed of the dataset gets other data.
    assert main(["run", *TOY, "--rounds", "1", "--folder", str(tmp_path / "free")]) == 0
    for origin, seed in (("s/seed=0", 1), ("free", 7)):
        again = tmp_path / f"again {seed}"
        assert main(["run", "--from", str(tmp_path / origin), "--seed", "7", "--no-progress", "--folder", str(again)]) == 0
        expected = datasets.load("toy_regression", clients=6, seed=seed).train.num_examples
        assert read_config(again)["population"]["examples"] == expected


def test_a_folder_of_an_earlier_version_has_the_data_of_seed_0(tmp_path, no_pictures, capsys):
    for seed, status in ((0, 0), (1, 2)):
        folder = tmp_path / str(seed)
        given = ["--dataset", "toy_regression(clients=6, seed=0)", *TOY[2:], "--seed", str(seed)]
        assert main(["run", *given, "--folder", str(folder)]) == 0
        stored = read_config(folder)
        stored["config"]["dataset"] = "toy_regression(clients=6)"  # The seed of the dataset was not recorded.
        (folder / "config.json").write_text(json.dumps(stored))
        assert main(["resume", str(folder)]) == status
    message = 'population, dataset: "toy_regression(clients=6, seed=1)" in this run, "toy_regression(clients=6, seed=0)" in the'
    assert message in capsys.readouterr().err


@slow
def test_a_folder_of_an_earlier_version_has_the_topology_of_seed_0(tmp_path, no_pictures, capsys):
    given = ["--dataset", "toy_regression(clients=6, seed=0)", "--algorithm", "dpsgd", "--rounds", "1", "--no-progress"]
    for seed, status in ((0, 0), (1, 2)):
        folder = tmp_path / str(seed)
        topology = ["--topology", "random_regular(degree=3)"]
        assert main(["run", *given, *topology, "--seed", str(seed), "--folder", str(folder)]) == 0
        stored = read_config(folder)
        assert stored["population"].pop("topology") == f"random_regular(degree=3, seed={seed})"
        (folder / "config.json").write_text(json.dumps(stored))
        assert main(["resume", str(folder)]) == status
    message = 'population, topology: "random_regular(degree=3, seed=1)" in this run, "random_regular(degree=3, seed=0)" in the'
    assert message in capsys.readouterr().err


@slow
def test_members_with_memories_of_clients_equal_separate_runs(tmp_path, no_pictures):
    sweep, scaffold = tmp_path / "sweep", ["--algorithm", "scaffold"]
    assert main(["run", *RATES, *scaffold, "--folder", str(sweep)]) == 0
    assert_close(sweep / RATE_NAMES[2], separate(tmp_path / "separate", RATE_NAMES[2], *scaffold))
    assert_ran_at_the_same_time(sweep)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["devices", pytest.param("vmap", marks=slow)])
def test_members_whose_checkpoints_are_of_different_rounds_continue_to_the_same_bits(how, tmp_path, no_pictures):
    """One member lost its last rounds, one has no round, one is finished."""
    options = [*RATES, "--sweep-mode", how, "--rounds", "7", "--evaluate-every", "3", "--checkpoint-every", "2"]
    unbroken = tmp_path / "unbroken"
    assert main(["run", *options, "--folder", str(unbroken)]) == 0
    folder = shutil.copytree(unbroken, tmp_path / "sweep")
    first, second, third = (folder / name for name in RATE_NAMES)
    shutil.rmtree(third / "checkpoints" / "00000007")
    assert Checkpoints(third / "checkpoints").rounds()[-1] == 6
    shutil.rmtree(second)
    before = (first / "metrics.jsonl").stat().st_mtime_ns
    assert main(["resume", str(folder), "--no-progress"]) == 0
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before
    for name in RATE_NAMES:
        assert bits(folder / name) == bits(unbroken / name)
    assert (folder / "table.txt").read_text() == (unbroken / "table.txt").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--example-storage", "stream"], "the examples are not all on the device"),
        pytest.param(
            ["--algorithm", str(Path(__file__).parents[2] / "examples/python_loop.py:WeightTransfer")],
            "WeightTransfer.apply is not compiled",
            marks=slow,
        ),
    ],
)
def test_members_that_cannot_run_at_the_same_time_run_one_after_another_with_a_warning(
    options, reason, tmp_path, capsys, no_pictures
):
    assert main(["run", *RATES, *options, "--sweep-mode", "vmap", "--folder", str(tmp_path / "s")]) == 0
    error = capsys.readouterr().err
    assert f"warning: 3 of 3 runs run one after another (how='sequential'), because {reason}." in error
    assert bits(tmp_path / "s" / RATE_NAMES[0]) == bits(separate(tmp_path / "separate", RATE_NAMES[0], *options))


@slow
@pytest.mark.filterwarnings("always")
def test_members_whose_memories_of_clients_are_not_on_the_device_run_one_after_another(
    tmp_path, monkeypatch, capsys, no_pictures
):
    monkeypatch.setattr(_memory, "_RESIDENT_BYTES_ON_CPU", 0)
    scaffold = ["--algorithm", "scaffold"]
    assert main(["run", *RATES, *scaffold, "--folder", str(tmp_path / "s")]) == 0
    error = capsys.readouterr().err
    assert "because the clients' memories are not all on the device" in error and "--example-storage resident" in error
    alone = separate(tmp_path / "separate", RATE_NAMES[0], *scaffold)
    assert (alone / "checkpoints" / "clients.rows").exists()
    assert_close(tmp_path / "s" / RATE_NAMES[0], alone)
    resident = tmp_path / "resident"
    assert main(["run", *RATES, *scaffold, "--example-storage", "resident", "--folder", str(resident)]) == 0
    assert "one after another" not in capsys.readouterr().err
    assert_ran_at_the_same_time(resident)


@slow
def test_how_is_recorded_and_used_when_a_sweep_continues(finished, tmp_path, capsys, no_pictures):
    folder = shutil.copytree(finished, tmp_path / "sweep")
    assert experiment.read_sweep(folder)["how"] == "devices"
    for how, recorded in (("sequential", "sequential"), (None, "sequential"), ("devices", "devices")):
        shutil.rmtree(folder / NAMES[2])
        assert main(["resume", str(folder), "--no-progress", *(["--sweep-mode", how] if how else [])]) == 0
        assert experiment.read_sweep(folder)["how"] == recorded
        assert bits(folder / NAMES[2]) == bits(finished / NAMES[2])
    assert main(["run", *SMALL, "--sweep-mode", "vmap", "--folder", str(tmp_path / "r"), "--no-progress"]) == 2
    assert (
        "Expected several values of an option or --seeds with --sweep-mode, got --sweep-mode vmap for a single run"
        in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="Expected how to be 'vmap', 'devices' or 'sequential'"):
        sweeps.sweep(RunConfig(), Settings(folder=str(tmp_path / "s")), {"mu": [1.0]}, how="fast")
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("default")
def test_updates_that_are_not_finite_warn_of_every_member(tmp_path, capsys, no_pictures):
    rates = ["--client-learning-rate", "1e38,2e38"]
    assert main(["run", *TWO_DEVICES, *rates, "--folder", str(tmp_path / "s")]) == 0
    error = capsys.readouterr().err
    for rate in ("1e+38", "2e+38"):
        assert f"warning: client_learning_rate={rate},seed=0: 3 client update(s) held a NaN" in error
        assert f"warning: client_learning_rate={rate},seed=0: Round 0 aggregated no update" in error


@pytest.mark.slow
@pytest.mark.parametrize("how", ["devices", pytest.param("sequential", marks=slow)])
def test_updates_that_are_not_finite_name_the_member_and_stop_no_other_one(how, tmp_path, capsys, no_pictures):
    """Both waves have a member that fails before the last dispatch; when the sweep continues, all of the first wave fail."""
    options = [*TWO_DEVICES, "--nonfinite", "raise", "--rounds", "6"]
    folder = tmp_path / "raising"
    rates = ["--client-learning-rate", "1e38,0.1,2e38,0.5"]
    good, bad = ([f"client_learning_rate={rate},seed=0" for rate in of] for of in (("0.1", "0.5"), ("1e+38", "2e+38")))

    def assert_the_bad_ones_failed(status):
        error = capsys.readouterr().err
        assert status == 1 and f"2 of 4 runs failed. {folder / 'table.txt'} has the 2 that finished." in error
        for name in bad:
            assert f"{name}: The update of client" in error
            assert not read_metrics(folder / name / "metrics.jsonl")
        for name in good:
            assert f"{name}:" not in error
            assert read_metrics(folder / name / "metrics.jsonl")[-1]["round"] == 6
        with (folder / "members.csv").open(newline="") as file:
            assert [row["folder"] for row in csv.DictReader(file)] == good
        table = (folder / "table.txt").read_text().splitlines()
        assert [line.split()[0] for line in table[1:3]] == ["0.1", "0.5"]

    assert_the_bad_ones_failed(main(["run", *options, *rates, "--sweep-mode", how, "--folder", str(folder)]))
    separately = tmp_path / "separate"
    assert main(["run", *options, "--client-learning-rate", "0.1", "--folder", str(separately)]) == 0
    assert_close(folder / good[0], separately)
    shutil.rmtree(folder / good[1])
    before = (folder / good[0] / "metrics.jsonl").stat().st_mtime_ns
    assert_the_bad_ones_failed(main(["resume", str(folder), "--no-progress"]))
    assert (folder / good[0] / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.filterwarnings("always")
def test_a_member_that_diverges_is_named(tmp_path, capsys, no_pictures):
    options = ["--client-learning-rate", "0.1,1000", "--rounds", "12", "--evaluate-every", "6"]
    assert main(["run", *TWO_DEVICES, *options, "--folder", str(tmp_path / "s")]) == 0
    error = capsys.readouterr().err
    assert "client_learning_rate=1000.0,seed=0: The t" in error and "client_learning_rate=0.1,seed=0:" not in error
    first, second = [row.split() for row in (tmp_path / "s/table.txt").read_text().splitlines()[1:3]]
    assert "diverged" not in first and second[2] == "diverged"


@slow
@pytest.mark.filterwarnings("always")
def test_a_device_that_runs_out_of_memory_runs_half_as_many_members(tmp_path, monkeypatch, capsys, no_pictures):
    compile_members = _members._compiled

    def compiled(programs, setting, mesh, side_by_side):
        def exhausted(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return exhausted if side_by_side > 1 else compile_members(programs, setting, mesh, side_by_side)

    monkeypatch.setattr(_members, "_compiled", compiled)
    assert main(["run", *RATES, "--sweep-mode", "vmap", "--folder", str(tmp_path / "s")]) == 0
    assert "out of memory with 2 members side by side" in capsys.readouterr().err
    assert_close(tmp_path / "s" / RATE_NAMES[2], separate(tmp_path / "separate", RATE_NAMES[2]))


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_rounds_that_run_again_are_counted_once(tmp_path, monkeypatch, capsys, no_pictures):
    bars = federation.progress_bars(monkeypatch)
    sizes = federation.out_of_memory_in_the_third_dispatch(monkeypatch)
    assert main(["run", *RATES, "--sweep-mode", "vmap", "--rounds", "6", "--folder", str(tmp_path / "s")]) == 0
    assert "out of memory with 2 members side by side" in capsys.readouterr().err
    assert sizes[:4] == [3, 3, 3, 2]
    (bar,) = bars
    assert bar.n == bar.total == 18


def test_states_are_copied_to_the_host_for_evaluations_and_checkpoints_alone(tmp_path, monkeypatch, no_pictures):
    """Two members run at the same time, then the third one: after rounds 3 and 6, an evaluation, and 4, a checkpoint."""
    reads = federation.reads_of_states(monkeypatch)
    options = ["--rounds", "6", "--evaluate-every", "3", "--checkpoint-every", "4", "--rounds-per-dispatch", "1"]
    assert main(["run", *RATES, *options, "--sweep-mode", "devices", "--folder", str(tmp_path / "s")]) == 0
    assert reads == [2, 2, 2, 1, 1, 1]


@slow
def test_members_that_run_sequentially_stop_after_a_signal_and_continue_to_the_same_bits(
    tmp_path, monkeypatch, capsys, no_pictures
):
    options = [*RATES, "--sweep-mode", "sequential", "--rounds", "6", "--rounds-per-dispatch", "1"]
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    assert main(["run", *options, "--folder", str(unbroken)]) == 0
    finish, dispatches = Run.finish, []

    def finish_and_interrupt(run, *arguments, **keywords):
        finish(run, *arguments, **keywords)
        dispatches.append(run.position)
        if len(dispatches) == 6 + 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", finish_and_interrupt)
        assert main(["run", *options, "--folder", str(stopped)]) == 128 + signal.SIGINT
    assert "SIGINT: stopped 1 run(s) after round 4." in capsys.readouterr().err
    assert not (stopped / RATE_NAMES[2]).exists()
    assert Checkpoints(stopped / RATE_NAMES[1] / "checkpoints").rounds()[-1] == 4
    assert main(["resume", str(stopped), "--no-progress"]) == 0
    for name in RATE_NAMES:
        assert bits(stopped / name) == bits(unbroken / name)


@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("fedadam", marks=slow)])
def test_members_share_programs_whatever_their_learning_rates(algorithm):
    configs = [
        RunConfig(algorithm=algorithm, model="digits_logistic", client_learning_rate=rate, client_schedule="cosine")
        for rate in (0.1, 0.3)
    ]
    programs = set()
    for built in build_members(configs, Settings(execution="jit")):
        state = built.algorithm.init(jax.random.key(0))
        built.algorithm.apply(state, built.sampler.cohort(0))
        programs |= set(map(id, federation.executables(built.algorithm)))
    assert len(programs) == 1
    momenta = [RunConfig(model="digits_logistic", client_momentum=momentum) for momentum in (0.0, 0.9)]
    shared = [built.algorithm._execution["traces"][0] for built in build_members(momenta, Settings(execution="jit"))]
    assert shared[0] is not shared[1]


@pytest.mark.slow
def test_the_table_has_means_and_deviations_and_names_the_best_setting(finished):
    with (finished / "members.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["folder"] for row in rows] == NAMES
    accuracies = {}
    for name in NAMES:
        (line,) = [
            line for line in read_metrics(finished / name / "metrics.jsonl") if line["round"] == 4 and "test_loss" in line
        ]
        accuracies.setdefault(name.rpartition(",")[0], []).append(line["test_accuracy"])
    table = (finished / "table.txt").read_text().splitlines()
    assert table[0].split() == ["client_learning_rate", "mu", "seeds", "loss", "accuracy", "training", "loss"]
    for row, values in zip(table[1:5], accuracies.values(), strict=True):
        assert f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" in row
    best = max(accuracies, key=lambda name: statistics.fmean(accuracies[name]))
    assert table[-1].startswith(f"best  {best.replace(',', ' ')}: accuracy {statistics.fmean(accuracies[best]):.4f} ± ")


def test_a_sweep_goes_on_with_the_runs_that_are_not_finished(finished, tmp_path, capsys, no_pictures):
    folder = shutil.copytree(finished, tmp_path / "sweep")
    shutil.rmtree(folder / NAMES[2])  # never started
    (folder / NAMES[5] / "metrics.jsonl").write_text("")  # killed before its first checkpoint
    shutil.rmtree(folder / NAMES[5] / "checkpoints")
    (folder / "table.txt").unlink()
    times = {name: (folder / name / "metrics.jsonl").stat().st_mtime_ns for name in NAMES if (folder / name).exists()}
    assert main(["resume", str(folder), "--progress"]) == 0
    assert "best  client_learning_rate=" in capsys.readouterr().out
    changed = [name for name in NAMES if times.get(name) != (folder / name / "metrics.jsonl").stat().st_mtime_ns]
    assert changed == [NAMES[2], NAMES[5]]
    assert (folder / "table.txt").read_text() == (finished / "table.txt").read_text()
    for name in changed:
        assert bits(folder / name) == bits(finished / name)


def test_the_same_command_again_continues_and_another_sweep_is_refused(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "sweep")
    assert main(["run", *SWEEP, "--folder", str(folder), "--no-progress"]) == 0
    assert main(["run", *SWEEP, "--seeds", "3", "--folder", str(folder), "--no-progress"]) == 2
    assert "seeds: [0, 1, 2] now, [0, 1] in the folder" in capsys.readouterr().err
    assert main(["run", *SWEEP, "--folder", str(folder / NAMES[0]), "--no-progress"]) == 2
    assert "holds a run and not a sweep" in capsys.readouterr().err
    assert main(["run", "--model", "digits_logistic", "--rounds", "1", "--folder", str(folder), "--no-progress"]) == 2
    assert "holds a sweep and not a run" in capsys.readouterr().err
    assert not (folder / "config.json").exists()


@pytest.mark.slow
def test_seeds_alone_make_a_sweep(tmp_path, capsys):
    options = ["--rounds", "2", "--seed", "5", "--seeds", "2", "--folder", str(tmp_path / "s")]
    assert main(["run", *SMALL, *ONE_DEVICE, *options]) == 0
    assert {path.name for path in (tmp_path / "s").iterdir() if path.is_dir()} == {"seed=5", "seed=6"}
    out = capsys.readouterr().out
    assert "2 runs of 2 rounds" in out and "±" in out and "best" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client-learning-rate", "0.1,-1"], "client_learning_rate=-1.0,seed=0: Expected client_learning_rate > 0"),
        (["--client-learning-rate", "0.1,fast"], "Expected numbers separated by commas after --client-learning-rate"),
        (["--epochs", "1,2.5"], "Expected whole numbers separated by commas after --epochs, got '1,2.5'"),
        (["--client-learning-rate", "0.1,0.1"], "Expected different values of --client-learning-rate, got 0.1,0.1"),
        (["--seeds", "0"], "Expected seeds >= 1"),
        (["--seed", "1,2", "--seeds", "2"], "Expected several values of --seed or a number --seeds, got both"),
        (["--clients", "3,101"], "A cohort of clients=101 is larger than the population of 100"),
        (["--algorithm", "fedprox", "--mu", "0.1,-1"], "Expected mu >= 0 and finite, got mu=-1.0"),
    ],
)
def test_wrong_values_are_found_before_the_first_run(options, message, tmp_path, capsys):
    assert main(["run", *SMALL, *options, "--folder", str(tmp_path / "s"), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_only_numbers_can_have_several_values(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["run", *SMALL, "--weighting", "examples,uniform", "--folder", str(tmp_path / "s")])
    with pytest.raises(SystemExit):
        main(["run", *SMALL, "--lanes", "1,2", "--folder", str(tmp_path / "s")])
    assert main(["run", *SMALL, "--dataset", "digits(alpha=0.1,clients=20)", "--rounds", "1", "--folder", str(tmp_path / "r"),
                 "--no-progress"]) == 0  # fmt: skip
    assert read_config(tmp_path / "r")["config"]["dataset"] == "digits(alpha=0.1,clients=20)"


def test_code_of_another_user_needs_trust(finished, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "sweep")
    stored = json.loads((folder / "sweep.json").read_text())
    stored["config"]["attack"] = "os:system(command='false')"
    (folder / "sweep.json").write_text(json.dumps(stored))
    assert main(["resume", str(folder), "--no-progress"]) == 2
    assert "repeat the command with --trust" in capsys.readouterr().err


def test_without_a_metric_that_can_be_judged_no_setting_is_the_best():
    def table(line):
        members = [
            sweeps.SweepMember(
                setting={"rate": rate}, seed=0, folder=Path("r"), line={"round": 1, "test_entropy": value} | line
            )
            for rate, value in ((0.1, 0.6), (9.0, 0.7))
        ]
        return sweeps.SweepResult(members=members, folder=Path("s")).table().splitlines()[-1]

    assert table({}) == "best  none: no metric of all runs says whether higher or lower values are better"
    chosen = table({"better": {"test_entropy": "lower"}})
    assert chosen == "best  rate=0.1: entropy 0.6000, chosen on test data, so it is optimistic: give --validation"
    assert table({"better": {"test_entropy": "higher"}}).startswith("best  rate=9.0: entropy 0.7000, ")


def test_a_member_that_ends_before_the_others_keeps_its_last_state(tmp_path, no_pictures):
    config = RunConfig(model="digits_logistic", rounds=6, clients=3, evaluate_every=2)
    ends = {"stop_when": [None, "spent(megabytes=0.01)"]}
    settings = Settings(folder=str(tmp_path), execution="pmap", devices=2, checkpoint_every=100, progress=False)
    result = sweeps.sweep(config, settings, ends, how="devices")
    assert [member.line["round"] for member in result.members] == [6, 2]
    assert [Checkpoints(member.folder / "checkpoints").rounds()[-1] for member in result.members] == [6, 2]


@pytest.mark.slow
def test_members_that_wait_in_other_rounds_have_the_losses_of_separate_runs(tmp_path, no_pictures):
    """On a clock, clients start from the models of earlier rounds, which rounds without clients must not replace."""
    options = [*SMALL, "--rounds", "16", "--evaluate-every", "2,3", "--step-seconds", "1", "--no-progress"]
    options += ["--synchronization", "buffered(size=2, concurrency=6)", "--stop-when", "spent(seconds=1000000)"]
    losses = []
    for name, how in (("together", ["--execution", "pmap", "--devices", "2"]), ("alone", ["--sweep-mode", "sequential"])):
        assert main(["run", *options, *how, "--folder", str(tmp_path / name)]) == 0
        lines = [read_metrics(tmp_path / name / f"evaluate_every={every},seed=0" / "metrics.jsonl") for every in (2, 3)]
        losses.append([[line["loss"] for line in own if "seconds" in line] for own in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_algorithms_with_and_without_personal_models_are_ranked_by_what_all_have():
    lines = {"fedavg": {"test_accuracy": 0.93}, "ditto": {"test_accuracy": 0.8, "test_personal_accuracy": 0.95}}
    members = [
        sweeps.SweepMember(setting={"algorithm": name}, seed=0, folder=Path(name), line={"round": 1} | line)
        for name, line in lines.items()
    ]
    result = sweeps.SweepResult(members=members, folder=Path("s"))
    header, fedavg, ditto, *_, best = result.table().splitlines()
    assert header.split() == ["algorithm", "seeds", "accuracy", "personal_accuracy"]
    assert (fedavg.split()[2:], ditto.split()[2:]) == (["0.9300", "-"], ["0.8000", "0.9500"])
    assert best.startswith("best  algorithm=fedavg: accuracy 0.9300, ")
    rows = list(csv.DictReader(io.StringIO(csv_of(result))))
    assert [row["test_personal_accuracy"] for row in rows] == ["", "0.95"]


def test_members_whose_names_differ_in_a_directory_have_different_folders():
    values = ["a/mine.py:Mine", "b/mine.py:Mine", "fedavg"]
    members = members_of("s", RunConfig(), {"algorithm": values}, [0])
    names = [member.folder.name for member, _ in members]
    assert len(set(names)) == 3 and names[2] == "algorithm=fedavg,seed=0"
    assert names[0].startswith("algorithm=mine.pyMine,seed=0-")


def test_a_member_that_was_interrupted_between_evaluations_is_not_finished(tmp_path, no_pictures):
    config = RunConfig(model="digits_logistic", rounds=8, clients=2, evaluate_every=4, stop_when="spent(megabytes=0.01)")

    def interrupt(line, state):
        if line["round"] == 3:
            signal.raise_signal(signal.SIGINT)

    settings = Settings(folder=str(tmp_path / "s" / "client_learning_rate=0.1,seed=0"), rounds_per_dispatch=1)
    run_experiment(build(config, settings), config, settings, progress=False, callbacks=[interrupt])
    result = sweeps.sweep(config, Settings(folder=str(tmp_path / "s"), progress=False), {"client_learning_rate": [0.1]})
    assert [(member.line["round"], "test_accuracy" in member.line) for member in result.members] == [(4, True)]


def test_a_member_that_was_killed_before_its_last_files_gets_them(tmp_path, no_pictures, monkeypatch):
    config = RunConfig(model="digits_logistic", rounds=4, clients=2, evaluate_every=2, stop_when="spent(megabytes=0.01)")
    arguments = config, Settings(folder=str(tmp_path / "s"), progress=False), {"client_learning_rate": [0.1]}
    with monkeypatch.context() as patch:
        patch.setattr(Run, "draw", lambda self: self.log.draw(self.paths.path, "", self.sampler))  # those of an earlier signal
        sweeps.sweep(*arguments)
    (run,) = read_runs(tmp_path / "s")
    assert not run.is_finished and run.round == 2 and not (run.folder / "clients.csv").exists()
    assert len(sweeps.sweep(*arguments).members) == 1
    (run,) = read_runs(tmp_path / "s")
    assert run.is_finished and run.ended["round"] == 2 and (run.folder / "clients.csv").exists()


def test_a_sweep_does_not_continue_with_other_code(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("from fedsim.algorithms import FedProx\n\n\nclass Mine(FedProx):\n    pass\n")
    arguments = ["run", *SMALL, "--algorithm", f"{file}:Mine", "--rounds", "1", "--mu", "0.1,1"]
    assert main([*arguments, "--folder", str(tmp_path / "s"), "--no-progress"]) == 0
    assert main(["resume", str(tmp_path / "s"), "--no-progress"]) == 0
    file.write_text(file.read_text().replace("pass", "mu = 2.0"))
    assert main(["resume", str(tmp_path / "s"), "--no-progress"]) == 2
    assert f"has changed since the run began: {file.resolve()}. Restore it" in capsys.readouterr().err


def test_a_setting_without_a_finite_evaluation_is_not_the_best():
    lines = {(0.1, 0): 0.5, (0.1, 1): 0.7, (9.0, 0): 0.9, (9.0, 1): None}
    members = [
        sweeps.SweepMember(setting={"rate": rate}, seed=seed, folder=Path("f"), line={"round": 1, "test_accuracy": value})
        for (rate, seed), value in lines.items()
    ]
    table = sweeps.SweepResult(members=members, folder=Path("f")).table().splitlines()
    assert table[2].split() == ["9.0", "2", "-"] and table[-1].startswith("best  rate=0.1: accuracy 0.6000")


@pytest.mark.parametrize(
    ("accuracies", "last"),
    [
        (
            {0.1: [0.5, 0.7], 9.0: [0.9]},
            ["best  rate=0.1: accuracy 0.6000", "left out  rate=9.0: accuracy 0.9000 (1 of 2 seeds"],
        ),
        ({0.1: [0.5, 0.7], 9.0: [0.4]}, ["best  rate=0.1: accuracy 0.6000"]),
        ({0.1: [0.5], 9.0: [0.9]}, ["best  rate=9.0: accuracy 0.9000"]),
        ({0.1: [0.5, None], 9.0: [0.4]}, ["best  none: every setting with 2 finished seeds", "left out  rate=9.0: accuracy"]),
    ],
)
def test_the_best_setting_is_one_whose_seeds_did_not_fail(accuracies, last):
    members = [
        sweeps.SweepMember(setting={"rate": rate}, seed=seed, folder=Path("f"), line={"round": 1, "test_accuracy": value})
        for rate, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    table = sweeps.SweepResult(members=members, folder=Path("f")).table()
    lines = [line for line in table.partition("\n\n")[2].splitlines() if not line.startswith("edge")]
    assert len(lines) == len(last) and all(map(str.startswith, lines, last)), table


def _table(values, diverged=()):
    """The table of a sweep with a member for each value: ``name=value`` to its test loss and accuracy."""
    members = [
        sweeps.SweepMember(
            setting={"rate": rate, "size": size},
            seed=0,
            folder=Path("f"),
            diverged=rate in diverged,
            line={"round": 1, "test_loss": loss, "test_accuracy": accuracy},
            loss=loss,
        )
        for (rate, size), (loss, accuracy) in values.items()
    ]
    return sweeps.SweepResult(members=members, folder=Path("f")).table().splitlines()


def test_a_member_that_diverged_is_so_called_in_the_table():
    losses = {0.1: 2.0, 1.0: 258.9, 9.0: 1562300282201350078464.0, 99.0: None}
    rows = _table({(rate, 5): (loss, 0.1) for rate, loss in losses.items()}, diverged=(1.0, 9.0, 99.0))
    assert rows[1].split()[3:] == ["2.0000", "0.1000", "2.0000"]
    assert [row.split()[3:] for row in rows[2:5]] == [["diverged", "0.1000", "diverged"]] * 3
    members = [
        sweeps.SweepMember(setting={}, seed=seed, folder=Path("f"), line={"round": 1, "test_loss": loss}, diverged=loss > 1e6)
        for seed, loss in enumerate([1.0, 1e12, 2.0])
    ]
    row = sweeps.SweepResult(members=members, folder=Path("f")).table().splitlines()[1]
    assert row.split()[:5] == ["3", "1", "of", "3", "diverged"]


def test_the_edge_of_the_grid_is_that_of_all_runs_and_not_of_the_finished_ones():
    members = [
        sweeps.SweepMember(setting={"rate": rate}, seed=0, folder=Path("f"), line={"round": 1, "test_accuracy": rate})
        for rate in (0.1, 0.3)
    ]
    result = sweeps.SweepResult(members=members, folder=Path("f"))
    assert "rate=0.3 is the largest of the grid" in result.table()
    assert "grid" not in dataclasses.replace(result, varied={"rate": [0.1, 0.3, 1.0]}).table()  # The run with 1.0 failed.


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ((1.0, 10), ["rate=1.0 is the largest of the grid: try larger"]),
        ((0.3, 20), ["size=20 is the largest of the grid: try larger"]),
        ((0.1, 1), ["rate=0.1 is the smallest of the grid: try smaller"]),
        ((0.3, 10), []),
    ],
)
def test_a_best_value_at_the_edge_of_the_grid_is_said(best, expected):
    rows = _table({(rate, size): (1.0, float((rate, size) == best)) for rate in (0.1, 0.3, 1.0) for size in (1, 10, 20)})
    assert [row for row in rows if row.startswith("edge")] == [f"edge  the best {text} ones" for text in expected]
    assert rows[-1].startswith(f"best  rate={best[0]} size={best[1]}: ")


def _sweep(folder: str, rounds: str) -> None:
    raise SystemExit(main(["run", *SMALL, *ONE_DEVICE, "--rounds", rounds, "--evaluate-every", "50", "--checkpoint-every", "10",
                           "--client-learning-rate", "0.05,0.5", "--folder", folder, "--no-progress"]))  # fmt: skip


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_ends_with_the_bits_of_an_unbroken_one(number, tmp_path):
    context = multiprocessing.get_context("spawn")
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    rounds = "600"
    process = context.Process(target=_sweep, args=(str(unbroken), rounds))
    process.start()
    process.join(timeout=600)
    assert process.exitcode == 0
    process = context.Process(target=_sweep, args=(str(killed), rounds))
    process.start()
    second = killed / "client_learning_rate=0.5,seed=0" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not second.exists() or second.read_bytes().count(b"\n") < 20:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(timeout=600)
    assert process.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert second.read_bytes().count(b"\n") < 600
    first = killed / "client_learning_rate=0.05,seed=0" / "metrics.jsonl"
    before = first.stat().st_mtime_ns
    assert main(["resume", str(killed), "--no-progress"]) == 0
    assert first.stat().st_mtime_ns == before
    for name in ("client_learning_rate=0.05,seed=0", "client_learning_rate=0.5,seed=0"):
        assert bits(killed / name) == bits(unbroken / name)


@slow
@pytest.mark.parametrize(
    ("algorithm", "options"), [("dpsgd", ["--topology", "complete"]), ("adpsgd", ["--batch-size", "10,20"])]
)
def test_a_sweep_without_a_server_has_the_runs_of_separate_commands(algorithm, options, tmp_path, no_pictures):
    few = ["--dataset", "digits(clients=6)", *SMALL, *ONE_DEVICE, "--no-progress", "--algorithm", algorithm]
    sweep = ["--client-learning-rate", "0.05,0.1", *options, "--sweep-mode", "sequential"]
    assert main(["run", *few, *sweep, "--folder", str(tmp_path / "s")]) == 0
    single = ["--client-learning-rate", "0.1", *(value.rpartition(",")[2] for value in options)]
    assert main(["run", *few, *single, "--folder", str(tmp_path / "r")]) == 0
    (folder,) = (path for path in (tmp_path / "s").glob("*rate=0.1*") if algorithm == "dpsgd" or "batch_size=20" in path.name)
    assert bits(folder) == bits(tmp_path / "r")


def test_numbers_of_numpy_are_recorded_as_those_of_python(tmp_path, no_pictures):
    config = RunConfig(model="digits_logistic", rounds=np.int64(1), clients=np.int64(2), client_momentum=np.float32(0.5))
    settings = Settings(folder=str(tmp_path / "s"), progress=False, checkpoint_every=np.int64(1))
    varied = {"client_learning_rate": np.logspace(-1, -1, 1), "epochs": [np.int64(1)]}
    (member,) = sweeps.sweep(config, settings, varied).members
    assert member.name == "client_learning_rate=0.1,epochs=1,seed=0"
    stored = read_config(member.folder)
    own = dataclasses.replace(config, client_learning_rate=0.1, epochs=1)
    assert RunConfig.from_json(stored["config"]) == own and stored["config"]["clients"] == 2
    assert stored["settings"]["checkpoint_every"] == 1
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["varied"] == {"client_learning_rate": [0.1], "epochs": [1]}
