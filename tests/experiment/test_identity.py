"""A run folder refuses another configuration, algorithm, sampler or population, and the error names the differences."""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import re
import shutil
import subprocess
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.aggregators import CentredClipping, Compressed, Mean, TrimmedMean
from fedsim.comparison import read_runs
from fedsim.experiment import RunConfig, Settings, _environment, read_config, read_sweep, run
from fedsim.experiment._environment import changed_code, code_of
from fedsim.experiment._folder import RunFolder, _differences
from fedsim.experiment._identity import describe
from fedsim.names import import_reference, imported_module


def test_another_configuration_is_refused_naming_the_differences(arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r", config={"dataset": "digits", "alpha": 0.3})
    before = (tmp_path / "r/config.json").read_text()
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "rounds": 13}, folder=tmp_path / "r", config={"dataset": "emnist62", "beta": 1})
    text = str(error.value)
    assert (
        'dataset: "emnist62" in this run, "digits" in the folder' in text and "rounds: 13 in this run, 12 in the folder" in text
    )
    assert (
        "alpha: not given in this run, 0.3 in the folder" in text
        and "beta: 1 in this run, not given in the folder" in text
        and "seed" not in text
    )
    assert (tmp_path / "r/config.json").read_text() == before


def test_without_a_config_the_arguments_are_compared(arguments, make_algorithm, tmp_path):
    run(**arguments, folder=tmp_path / "r")
    sampler = fedsim.UniformSampler(arguments["sampler"].data, clients=3, seed=8)
    other = {**arguments, "algorithm": make_algorithm(weighting="uniform"), "sampler": sampler}
    with pytest.raises(
        ValueError,
        match=r'(?s)root_key: \[0, 8\] in this run, \[0, 7\] in the folder.*weighting: "uniform" in this run, "examples" in',
    ):
        run(**other, folder=tmp_path / "r")


def _changed(data, **changes):
    """Returns a copy of the population with other names, columns or sizes."""
    given = dict(columns=dict(data.columns), sizes=data.sizes, client_ids=data.client_ids)
    return fedsim.FederatedData.from_arrays(**{**given, **changes})


def _attacked(sampler, *, seed=1, **changes):
    return fedsim.samplers.Attacked(sampler, fedsim.attacks.SignFlip(**changes), seed=seed)


_TOP_K = fedsim.compressors.TopK(fraction=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"aggregator": TrimmedMean(trim=0.3)}, 'aggregator: "TrimmedMean(trim=0.3)" in this run, "Mean()" in the folder'),
        (
            {"aggregator": Compressed(_TOP_K)},
            {"aggregator": Compressed(_TOP_K, inner=CentredClipping(2.0))},
            "inner=CentredClipping(radius=2.0)",
        ),
        ({"downlink": _TOP_K}, {}, 'downlink: null in this run, "TopK('),
        ({"downlink": _TOP_K}, {"downlink": fedsim.compressors.TopK(fraction=0.5)}, "fraction=0.25"),
        ({}, {"batches": fedsim.Batches(size=4, shuffle=False)}, "shuffle=False"),
        ({}, {"averaging": 0.5}, "averaging: 0.5 in this run, null in the folder"),
    ],
)
def test_another_field_of_the_algorithm_is_refused_and_both_values_are_named(
    arguments, make_algorithm, tmp_path, before, after, expected
):
    arguments |= dict(rounds=1, test_data=None, folder=tmp_path / "r")
    one, other = (make_algorithm(**fields, execution=fedsim.Jit()) for fields in (before, after))
    run(**{**arguments, "algorithm": one})
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "algorithm": other})
    assert expected in str(error.value) and str(error.value).count(" in this run, ") == 1
    assert "Choose another folder, or use the same configuration and population." in str(error.value)
    assert len(run(**{**arguments, "algorithm": one}).history) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            lambda s: s,
            lambda s: fedsim.samplers.ShuffledSampler(s.data, clients=3, seed=7),
            '"ShuffledSampler(clients=3)" in this run, "Uniform',
        ),
        (lambda s: s, lambda s: _attacked(s), "not given in the folder"),
        (lambda s: _attacked(s), lambda s: _attacked(s, scale=2.0), "SignFlip(scale=2.0)"),
        (lambda s: _attacked(s), lambda s: _attacked(s, seed=2), "cohorts (hash)"),
        (
            lambda s: fedsim.samplers.Stragglers(s, epochs=5),
            lambda s: fedsim.samplers.Stragglers(s, epochs=9),
            "Stragglers(sampler=UniformSampler(clients=3), fraction=0.5, epochs=9, drop=False)",
        ),
        (
            lambda s: fedsim.samplers.WeightedSampler(s.data, clients=3, seed=7),
            lambda s: fedsim.samplers.WeightedSampler(s.data, clients=3, seed=7, weights=np.arange(1, 13)),
            "cohorts (hash)",
        ),
    ],
)
def test_another_sampler_is_refused_and_both_are_named(arguments, tmp_path, before, after, expected):
    arguments |= dict(rounds=5, test_data=None)
    one, other = before(arguments["sampler"]), after(arguments["sampler"])
    run(**{**arguments, "sampler": one}, folder=tmp_path / "r")
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "sampler": other}, folder=tmp_path / "r")
    assert expected in str(error.value)
    run(**{**arguments, "sampler": before(arguments["sampler"])}, folder=tmp_path / "r")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"client_ids": list("abcdefghijkl")}, "population, client ids and sizes (hash): "),
        ({"sizes": [16, 4] * 6}, "population, client ids and sizes (hash): "),
        ({"columns": {"z": np.zeros(120)}}, 'population, features: ["x", "y", "z"] in this run, ["x", "y"] in the folder'),
        ({"columns": {"y": np.arange(120) % 3}}, "population, examples (hash): "),
    ],
)
@pytest.mark.parametrize("config", [None, {"dataset": "mine"}, fedsim.experiment.RunConfig(rounds=1)])
def test_another_population_is_refused_and_both_are_named(arguments, data, tmp_path, config, changes, expected):
    arguments |= dict(rounds=1, test_data=None, folder=tmp_path / "r", config=config)
    run(**arguments)
    if "columns" in changes:
        changes = {"columns": {**data.columns, **changes["columns"]}}
    other = {**arguments, "sampler": fedsim.UniformSampler(_changed(data, **changes), clients=3, seed=7)}
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**other)
    assert expected in str(error.value) and str(error.value).count(" in this run, ") == 1
    data.save(tmp_path / "same.h5")
    same = fedsim.UniformSampler(fedsim.FederatedData.open(tmp_path / "same.h5"), clients=3, seed=7)
    assert run(**{**arguments, "sampler": same}).round == 1


def test_a_folder_of_an_earlier_version_without_the_population_is_refused(arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r")
    stored = read_config(tmp_path / "r")
    del stored["population"], stored["config"]["aggregator"]
    (tmp_path / "r/config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="An earlier version of fedsim wrote it") as error:
        run(**arguments, folder=tmp_path / "r")
    assert 'aggregator: "Mean()" in this run, not given in the folder' in str(error.value)
    assert "population, clients: 12 in this run, not given in the folder" in str(error.value)


def test_other_test_examples_are_refused(arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r")
    columns = {**arguments["test_data"].columns, "x": -arguments["test_data"].columns["x"]}
    other = dataclasses.replace(arguments["test_data"], columns=columns)
    with pytest.raises(ValueError, match=r"test population, examples \(hash\): "):
        run(**arguments | {"test_data": other}, folder=tmp_path / "r")


def test_the_commit_is_read_without_writing_to_the_repository(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("A = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@a.example"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(_environment, "_PACKAGE", package)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    os.utime(package / "a.py", (1e9, 1e9))  # Another time, for which git would refresh its index.
    index = (tmp_path / ".git/index").read_bytes()
    assert _environment.commit() == head and (tmp_path / ".git/index").read_bytes() == index
    (package / "a.py").write_text("A = 2\n")
    assert _environment.commit() == f"{head} with changes"
    monkeypatch.setattr(_environment, "_PACKAGE", tmp_path / "elsewhere/package")
    assert _environment.commit() == ""


def _notebook(source):
    """Returns the names that a notebook cell defines."""
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), namespace)
    return namespace


CELL = """
import dataclasses, fedsim
FACTOR = 1.0
def halved(x):
    return x / 2
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mine(fedsim.algorithms.FedAvg):
    def client_loss(self, shared, params, batch):
        return halved(super().client_loss(shared, params, batch)) * FACTOR
def unused(x):
    return x
"""


def test_the_code_of_a_notebook_that_an_algorithm_uses_is_part_of_the_run(make_algorithm):
    def code(source):
        fields = {field.name: getattr(make_algorithm(), field.name) for field in dataclasses.fields(make_algorithm())}
        return code_of(_notebook(source)["Mine"](**fields))

    first = code(CELL)
    assert {"__main__.Mine.client_loss", "__main__.halved"} <= first.keys() and "__main__.unused" not in first
    assert code(CELL + "# a comment\n") == first == code(CELL.replace("return x\n", "return -x\n"))
    for old, new in (("x / 2", "x / 3"), ("1.0", "-0.5"), (" * FACTOR", " / FACTOR")):
        changed = code(CELL.replace(old, new))
        assert changed_code(first, changed) and changed.keys() == first.keys(), old


_FILES = {
    "mine.py": "from rates_of_mine import FACTOR\ndef net():\n    import package_of_mine.sub as sub\n    return later(sub)\n"
    "def later(x):\n    import later_of_mine\n    return later_of_mine\n",
    "rates_of_mine.py": "FACTOR = 0.5\n",
    "later_of_mine.py": "import numpy, os\n",
    "package_of_mine/__init__.py": "",
    "package_of_mine/sub.py": "from . import deep\nfrom .deep import VALUE\n",
    "package_of_mine/deep.py": "VALUE = 1\n",
    "unused_of_mine.py": "",
}


def test_code_includes_modules_of_which_only_values_are_used_or_which_a_function_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_of_mine").mkdir()
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    import_reference(f"{tmp_path}/mine.py:net")
    first = code_of(imported_module(f"{tmp_path}/mine.py:net"))
    assert first.keys() == {str((tmp_path / name).resolve()) for name in _FILES if name != "unused_of_mine.py"}
    for name in ("rates_of_mine.py", "later_of_mine.py", "package_of_mine/deep.py"):
        (tmp_path / name).write_text("FACTOR = -0.5\n")
        assert changed_code(first, code_of(imported_module(f"{tmp_path}/mine.py:net"))) == [str((tmp_path / name).resolve())]
        (tmp_path / name).write_text(_FILES[name])


def test_files_of_the_same_name_in_two_folders_are_two_modules(tmp_path):
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def net():\n    return {folder!r}\n")
        names.append(f"{tmp_path}/{folder}/mine.py:net")
    assert [import_reference(name)() for name in names] == ["a", "b"]
    assert [list(code_of(imported_module(name))) for name in names] == [[str(tmp_path / f"{f}/mine.py")] for f in ("a", "b")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_recorded_names_that_are_no_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    names = dict.fromkeys([str(tmp_path / "pipe.py"), "/dev/zero", str(tmp_path)], "0" * 16)
    assert changed_code(names, {}) == list(names)


def test_the_kind_of_device_is_compared_and_not_the_number():
    def differences(old, new):
        return _differences({"devices": old}, {"devices": new})

    assert (
        differences("1 x cpu", "8 x cpu")
        == ""
        == differences("1 x NVIDIA H100, deterministic", "8 x NVIDIA H100, deterministic")
    )
    assert differences("1 x cpu", "1 x NVIDIA H100, not deterministic") == "devices cpu (now NVIDIA H100, not deterministic)"
    for other in ("1 x NVIDIA A100, not deterministic", "1 x NVIDIA H100, deterministic"):
        assert "now NVIDIA H100, not deterministic" in differences(other, "1 x NVIDIA H100, not deterministic")


def test_changed_examples_of_a_folder_are_refused_with_its_name(arguments, data, tmp_path):
    config = fedsim.experiment.RunConfig(rounds=1, data=str(tmp_path))
    arguments |= dict(rounds=1, test_data=None, config=config, folder=tmp_path / "r")
    run(**arguments)
    sampler = fedsim.UniformSampler(_changed(data, columns={**data.columns, "x": -data.columns["x"]}), clients=3, seed=7)
    with pytest.raises(
        ValueError, match=f"The examples in {re.escape(str(tmp_path))} have changed since the run began: restore"
    ):
        run(**{**arguments, "sampler": sampler})
    assert run(**arguments).round == 1


@dataclasses.dataclass(frozen=True, eq=False)
class Mine(Mean):
    """An aggregator with fields of many types."""

    start: np.ndarray
    big: jax.Array
    sizes: tuple[float, ...]
    rule: Callable[[float], float]


def test_equal_objects_have_equal_descriptions(sampler, model):
    """Objects that differ only in their addresses are the same run; objects that differ in a number are not."""

    def made(start):
        return fedsim.algorithms.FedAvg(
            model=model,
            client_optimizer=lambda round: optax.sgd(0.1 / (1 + round)),
            batches=fedsim.Batches(size=4),
            aggregator=Mine(start=np.full(3, start), big=jnp.full(100, start), sizes=(1, start), rule=lambda x: x),
        )

    one, same, other = (describe(made(start), sampler, None, rounds=3) for start in (1.0, 1.0, 2.0))
    assert one == same and "0x" not in str(one)
    assert {name for name in one if one[name] != other[name]} == {"aggregator"}
    assert "start=float64 [1.0, 1.0, 1.0], big=float32 [100] (hash " in one["aggregator"]
    assert "sizes=(1, 1.0)" in one["aggregator"] and "rule" not in one["aggregator"]


def test_a_folder_without_a_finished_round_accepts_another_run(arguments, make_algorithm, bits, unbroken, tmp_path):
    refused = {**arguments, "algorithm": make_algorithm(aggregator=fedsim.aggregators.Krum(attackers=5))}
    with pytest.raises(ValueError, match=r"Krum\(attackers=5\) needs cohorts of at least .* = 13"):
        run(**refused, folder=tmp_path / "r")
    assert "Krum" in read_config(tmp_path / "r")["config"]["aggregator"]
    assert bits(run(**arguments, folder=tmp_path / "r").state) == unbroken
    assert read_config(tmp_path / "r")["config"]["aggregator"] == "Mean()"
    with pytest.raises(ValueError, match="another configuration"):
        run(**refused, folder=tmp_path / "r")


@pytest.mark.slow
def test_client_memory_of_a_run_without_rounds_does_not_affect_another_run(arguments, model, bits, tmp_path):
    def with_memory(cls, **fields):
        given = dict(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
        return {**arguments, "test_data": None, "algorithm": cls(**given, execution=fedsim.Jit(memory="stream"), **fields)}

    krum = fedsim.aggregators.Krum(attackers=5)
    with pytest.raises(ValueError, match="needs cohorts of at least"):
        run(**with_memory(fedsim.algorithms.APFL, aggregator=krum), folder=tmp_path / "r")
    after = run(**with_memory(fedsim.algorithms.SCAFFOLD), folder=tmp_path / "r").state
    expected = run(**with_memory(fedsim.algorithms.SCAFFOLD)).state
    assert bits(after.params) == bits(expected.params)


@pytest.mark.parametrize("left", ["metrics", "checkpoint"])
def test_a_folder_with_a_finished_round_refuses_another_run(arguments, make_algorithm, tmp_path, left):
    run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    if left == "metrics":
        shutil.rmtree(tmp_path / "r/checkpoints")
    else:
        (tmp_path / "r/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="another configuration"):
        run(**{**arguments, "algorithm": make_algorithm(weighting="uniform")}, folder=tmp_path / "r")


def test_a_folder_whose_run_is_in_its_first_round_refuses_another_run(arguments, make_algorithm, tmp_path):
    other = {**arguments, "algorithm": make_algorithm(weighting="uniform")}

    class Meanwhile(fedsim.UniformSampler):
        def cohort(self, round):
            if (tmp_path / "r/metrics.jsonl").exists() and round == 0:
                with pytest.raises(ValueError, match="is in use by another run"):
                    run(**other, folder=tmp_path / "r")
                refused.append(read_config(tmp_path / "r")["config"]["weighting"])
            return super().cohort(round)

    refused = []
    run(**{**arguments, "sampler": Meanwhile(arguments["sampler"].data, clients=3, seed=7)}, folder=tmp_path / "r")
    assert refused == ["examples"]


def test_a_folder_whose_run_computes_its_initial_state_refuses_another_run(arguments, make_algorithm, tmp_path):
    """The folder is locked from the check of its configuration on, also while the initial state is computed."""

    class Slow(fedsim.algorithms.FedAvg):
        def init(self, key):
            if not isinstance(key, jax.core.Tracer):
                with pytest.raises(ValueError, match="is in use by another run"):
                    run(**{**arguments, "rounds": 5}, folder=tmp_path / "r")
                refused.append(read_config(tmp_path / "r")["config"]["rounds"])
            return super().init(key)

    refused = []
    given = dict(model=arguments["algorithm"].model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    run(**{**arguments, "algorithm": Slow(**given, execution=fedsim.Jit())}, folder=tmp_path / "r")
    assert refused == [12] and read_config(tmp_path / "r")["config"]["rounds"] == 12


@pytest.mark.parametrize("when", ["the initial state", "the last evaluation"])
def test_an_error_before_the_first_round_unlocks_the_folder(arguments, make_algorithm, tmp_path, when):
    def fail(state):
        raise RuntimeError("The evaluation failed.")

    class Failing(fedsim.algorithms.FedAvg):
        def init(self, key):
            assert isinstance(key, jax.core.Tracer), "The initial state failed."
            return super().init(key)

    given = dict(model=arguments["algorithm"].model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    changed = {"algorithm": Failing(**given, execution=fedsim.Jit())}
    if when == "the last evaluation":
        run(**{**arguments, "test_data": None}, folder=tmp_path / "r", config={"name": "a"})
        changed = {"evaluate": fail}
    with pytest.raises((RuntimeError, AssertionError), match="failed"):
        run(**{**arguments, **changed}, folder=tmp_path / "r", config={"name": "a"})
    RunFolder(tmp_path / "r").lock().close()


def _with_former_names(stored):
    """Returns the file of a run or a sweep of SCAFFOLD as earlier versions wrote it."""
    config = {**stored["config"], "client_devices": stored["config"]["step_seconds"]}
    config |= {"client_schedule": "exponential", "client_schedule_end": 0.0, "client_schedule_decay": 0.5}
    config |= {"client_schedule_every": 10, "client_schedule_staircase": False, "hyperparameters": {"option": "I"}}
    settings = {**stored["settings"], "memory": "stream"}
    del config["step_seconds"], settings["example_storage"]
    return {**stored, "config": config, "settings": settings}


def _present(**fields):
    schedule = "exponential(decay=0.5, every=10, staircase=False)"
    given = dict(algorithm="scaffold", hyperparameters={"control_variate": "I"}, client_schedule=schedule, step_seconds="2")
    return dataclasses.asdict(RunConfig(**given | fields)), dataclasses.asdict(Settings(example_storage="stream"))


def test_a_folder_with_former_names_of_options_holds_the_same_run(tmp_path):
    config, settings = _present()
    run_folder = RunFolder(tmp_path / "r")
    run_folder.initialize(config, {"population": {"clients": 2}}, settings, "1 x cpu", {}).close()
    former = _with_former_names(read_config(tmp_path / "r"))
    run_folder.config.write_text(json.dumps(former))
    run_folder.metrics.write_text('{"round": 1, "seconds": 0.5}\n')
    stored = read_config(tmp_path / "r")
    assert (stored["config"], stored["settings"]) == (config, settings)
    (recorded,) = read_runs(tmp_path)
    assert recorded.fields["step_seconds"] == "2" and recorded.fields["control_variate"] == "I"
    run_folder.initialize(config, {"population": {"clients": 2}}, settings, "1 x cpu", {}).close()
    with pytest.raises(ValueError, match=r'step_seconds: "3" in this run, "2" in the folder'):
        run_folder.initialize(_present(step_seconds="3")[0], {"population": {"clients": 2}}, settings, "1 x cpu", {})


def test_a_sweep_with_former_names_of_options_is_the_same_sweep(tmp_path):
    config, settings = _present(algorithm="fedavg", hyperparameters={})
    former = _with_former_names({"config": config, "settings": settings}) | {"varied": {"algorithm": ["fedavg", "scaffold"]}}
    former["config"]["hyperparameters"] = {}
    fields = {"algorithm": "scaffold", "hyperparameters": {"option": "I"}, "client_schedule_decay": 0.1}
    former |= {"seeds": [0], "differing": [[{"algorithm": "fedavg"}, {}], [{"algorithm": "scaffold"}, fields]]}
    (tmp_path / "sweep.json").write_text(json.dumps(former))
    stored = read_sweep(tmp_path)
    assert (stored["config"], stored["settings"]) == (config, settings)
    schedule = "exponential(decay=0.1, every=10, staircase=False)"
    expected = {"algorithm": "scaffold", "hyperparameters": {"control_variate": "I"}, "client_schedule": schedule}
    assert stored["differing"] == [[{"algorithm": "fedavg"}, {}], [{"algorithm": "scaffold"}, expected]]
    # Also of fields that have the value of the configuration, as those of a sweep in Python may have.
    present = {**stored, "differing": [[{"algorithm": "scaffold"}, {"rounds": config["rounds"], "hyperparameters": {}}]]}
    (tmp_path / "sweep.json").write_text(json.dumps(present))
    assert read_sweep(tmp_path) == present


def test_former_names_of_options_are_names_of_own_algorithms_and_of_python(tmp_path):
    own = {"memory": 1, "option": "a", "client_devices": 2, "client_schedule_end": 3}
    config = dataclasses.asdict(RunConfig(algorithm="mine.py:Own", hyperparameters=own))
    for stored in ({"config": config, "settings": {}}, {"config": own, "settings": {"memory": 3}}):
        (tmp_path / "config.json").write_text(json.dumps(stored))
        assert read_config(tmp_path) == stored
    assert RunConfig.from_json(config).hyperparameters == own
