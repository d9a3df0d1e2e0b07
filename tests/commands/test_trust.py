"""Code that the configuration of a folder names: who may run it, and what is called by a name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest
from small_run import SMALL

import fedsim
from fedsim.commands import main
from fedsim.experiment import RunConfig, read_config
from fedsim.experiment._trust import check_trusted, named_code, signature, write_signed


@pytest.mark.slow
def test_the_user_s_own_folder_needs_no_trust_at_any_path(custom_run, tmp_path):
    moved = custom_run.rename(tmp_path / "moved")
    assert main(["resume", str(moved), "--no-progress"]) == 0
    assert main(["resume", str(moved), "--no-progress", "--rounds", "2"]) == 0
    assert main(["run", "--from", str(moved), "--folder", str(tmp_path / "again"), "--no-progress"]) == 0


@pytest.mark.first(1)
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

# Their texts are names of files, which are only read.
FILES = ("data", "init_from", "faults", "client_traces", "deliveries")

PLACES = [
    *(field.name for field in dataclasses.fields(RunConfig) if field.name not in FILES),
    *(f"hyperparameters, {name}" for name in ("mu", "unknown")),
    *(f"varied, {name}" for name in ("client_learning_rate", "robust_mixing", "unknown")),
    *(f"differing, {name}" for name in ("model", "unknown")),
]


def _with_text(place, text, folder):
    """Returns the content of ``config.json`` and ``sweep.json`` with a text in a field or among the varied values."""
    part, _, name = place.rpartition(", ")
    config = dataclasses.asdict(RunConfig(dataset="digits", algorithm="fedprox", rounds=1))
    varied = {name: [text]} if part == "varied" else {}
    differing = [[{"algorithm": "fedavg"}, {name: text}]] if part == "differing" else []
    if not varied and not differing:
        (config["hyperparameters"] if part else config)[name] = text
    stored = {"config": config, "settings": {"folder": folder}, "population": {}, "signature": "0" * 64}
    return stored, {**stored, "varied": varied, "seeds": [0], "differing": differing}


@pytest.mark.parametrize("text", EVIL)
def test_code_in_any_field_is_found(text):
    text = text.format(evil="/a/evil.py", mark="x")
    for place in PLACES:
        stored, sweep = _with_text(place, text, "runs/a:b")
        is_data = place == "dataset" and text.startswith("tfds:")
        assert bool(named_code(sweep)) != is_data, place
        if not place.startswith(("varied", "differing")):
            assert bool(named_code(stored)) != is_data, place


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "command",
    [
        ["resume"],
        ["replay", "--round", "1"],
        ["run", "--from"],
        ["plan", "--from"],
        ["evaluate"],
        ["bisect"],
    ],
)
def test_no_text_of_another_user_s_folder_runs_code(command, tmp_path, capsys):
    evil, mark, folder = tmp_path / "evil.py", tmp_path / "ran", tmp_path / "run"
    evil.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ntouch = lambda path: open(path, 'w').close()\n")
    folder.mkdir()
    for text in EVIL:
        for place in (
            "model",
            "robust_mixing",
            "topology",
            "mixing",
            "hyperparameters, mu",
            "varied, robust_mixing",
            "differing, model",
        ):
            stored, sweep = _with_text(place, text.format(evil=evil, mark=str(mark)), str(folder))
            (folder / "config.json").write_text(json.dumps(stored))
            if command[0] == "resume":
                (folder / "sweep.json").write_text(json.dumps(sweep))
            elif place.startswith(("varied", "differing")):
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


@pytest.mark.first(1)
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


@pytest.mark.parametrize("option", ["robust-mixing", "topology", "aggregator", "model", "dataset", "step-seconds", "attack"])
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


def test_an_own_folder_with_former_names_of_options_stays_trusted(tmp_path):
    """The signature is that of the file as it was written; another value in it is not trusted."""
    config = dataclasses.asdict(RunConfig(model="mine.py:net"))
    config["client_devices"] = config.pop("step_seconds")
    write_signed(tmp_path / "config.json", {"config": config, "settings": {}})
    assert "step_seconds" in read_config(tmp_path)["config"]
    check_trusted("r", read_config(tmp_path))
    changed = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**changed, "config": {**config, "client_devices": "2"}}))
    with pytest.raises(ValueError, match=r"mine.py:net"):
        check_trusted("r", read_config(tmp_path))
