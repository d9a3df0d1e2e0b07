"""The command `fedsim resume`: what it prints, and that a run continues only with the code that it began with."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from small_run import SMALL

from fedsim.commands import main
from fedsim.experiment import read_config


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


@pytest.mark.slow
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
