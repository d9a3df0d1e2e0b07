"""`fedsim runs` and `fedsim compare` on the folders of runs: what they print and write, what they load, and wrong input."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from recorded_runs import write_run

import fedsim
from fedsim.commands import main


@pytest.fixture
def runs(tmp_path):
    """Creates a folder with three seeds of two algorithms."""
    draw = np.random.default_rng(0)
    for name, gain in (("fedavg", 0.0), ("fedprox", 0.1)):
        for seed in range(3):
            accuracies = np.linspace(0.3, 0.7, 5) + gain + draw.normal(0, 0.005, 5)
            write_run(tmp_path / "runs" / f"{name}-{seed}", accuracies.tolist(), seed=seed, algorithm=name)
    return tmp_path / "runs"


def test_both_commands_on_a_run_that_was_trained(finished, capsys):
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert main(["runs", str(finished.parent)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("finished"))
    assert f"{last['test_accuracy']:.4f}" in row and "fedprox" in row
    assert main(["compare", str(finished), "--target", "accuracy=0.01"]) == 0
    shown = capsys.readouterr().out
    assert f"fedprox  *      1  {last['test_accuracy']:.4f}  " in shown and "one seed, so there is no interval" in shown


@pytest.mark.slow
def test_a_run_that_was_started_in_python(tmp_path, capsys):
    data = fedsim.datasets.load("digits")
    for seed in range(2):
        algorithm = fedsim.algorithms.FedAvg(
            model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20)
        )
        sampler = fedsim.UniformSampler(data.train, clients=3, seed=seed)
        fedsim.experiment.run(
            algorithm, sampler, rounds=2, test_data=data.test, folder=tmp_path / str(seed), evaluate_every=1, progress=False
        )
    capsys.readouterr()
    assert main(["compare", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FedAvg")]
    assert len(rows) == 1 and "      2  0." in rows[0] and "±" in rows[0]


def test_the_files_are_written(runs, tmp_path, capsys):
    names = {kind: str(tmp_path / f"out.{kind}") for kind in ("csv", "tex", "png", "pdf")}
    arguments = ["--csv", names["csv"], "--latex", names["tex"], "--figure", names["png"]]
    assert main(["compare", str(runs), *arguments, "--target", "accuracy=0.6", "--difference", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert "second is better" in shown and "more seeds to find a difference of 0.01" in shown and "MB to target" in shown
    with open(names["csv"]) as file:
        assert [row["algorithm"] for row in csv.DictReader(file)] == ["fedavg", "fedprox"]
    assert "\\toprule" in Path(names["tex"]).read_text()
    assert main(["compare", str(runs), "--figure", names["pdf"], "--against", "bytes", "--group", "algorithm,rounds"]) == 0
    assert Path(names["png"]).read_bytes()[:4] == b"\x89PNG" and Path(names["pdf"]).read_bytes()[:4] == b"%PDF"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "RUNS", "--target", "0.8"], "Expected --target METRIC=NUMBER, got 0.8: give accuracy=0.8"),
        (["compare", "RUNS", "--figure", "a.svg"], "Expected --figure to be a .pdf or .png file, got a.svg"),
        (["compare", "no such"], "got no such, which does not exist"),
        (["compare", "RUNS", "--csv", "no/such/folder.csv"], "Expected --csv in a folder that exists, got no/such/folder.csv"),
        (["runs", "no such"], "got no such, which does not exist"),
    ],
)
def test_wrong_input_is_refused(runs, arguments, message, capsys):
    assert main([str(runs) if argument == "RUNS" else argument for argument in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["runs", "compare"])
def test_neither_command_loads_jax_or_runs_code(command, tmp_path):
    """So they do not wait for JAX, and need no trust in the folder."""
    write_run(tmp_path / "a", [0.5], algorithm=f"{tmp_path}/mine.py:Mine")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = "import sys; from fedsim.commands import main; status = main(sys.argv[1:]); sys.exit(status or 'jax' in sys.modules)"
    root = Path(fedsim.__file__).parents[1]
    assert (
        subprocess.run([sys.executable, "-c", code, command, str(tmp_path)], cwd=root, stdout=subprocess.DEVNULL).returncode
        == 0
    )
    assert not (tmp_path / "ran").exists()
