"""The page of `fedsim report`: its numbers are those of the runs, it loads nothing, and a browser draws its curves."""

import html
import json
import re
import shutil
import subprocess

import pytest

from fedsim.commands import main
from fedsim.comparison import RecordedRun, read_runs, report


def recorded(folder, seed, rounds, offset=0.0, **fields):
    """Writes a run folder without training, with an evaluation every second round and results of 30 clients."""
    folder.mkdir(parents=True)
    config = {"config": {"seed": seed, "rounds": rounds, "hyperparameters": {}, **fields}, "versions": {"jax": "0.10"}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for round in range(1, rounds + 1):
        lines.append({"round": round, "loss": 1 / round, "bits_up": 8e5, "bits_down": 8e5, "seconds": 0.5})
        lines[-1] |= {"simulated_seconds": 2.0 * round, "staleness_counts": [3, 1]}
        if round % 2 == 0:
            accuracy = offset + 0.5 + 0.4 * round / rounds
            lines.append({"round": round, "test_accuracy": accuracy, "test_accuracy_clients_worst10": accuracy - 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [f"c{i},5,{1 - i / 60:.4f},{i / 30:.4f}" for i in range(30)]
    (folder / "clients.csv").write_text("\n".join(["id,num_examples,loss,accuracy", *rows]))


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_numbers_are_those_of_the_runs(tmp_path):
    for seed in (0, 1):
        recorded(tmp_path / str(seed), seed, rounds=6, offset=-0.1 * seed, algorithm="</script><b>")
    page = report(read_runs(tmp_path), title="a & b")
    first, second = data_of(page)
    assert first["name"] == "seed=0" and second["name"] == "seed=1"
    at = [first["axes"]["round"][place] for place, _ in first["curves"]["test_accuracy"]]
    assert at == [2, 4, 6] and [value for _, value in first["curves"]["test_accuracy"]] == pytest.approx(
        [0.6333, 0.7667, 0.9], abs=1e-4
    )
    place = first["curves"]["test_accuracy"][-1][0]
    assert [first["axes"][name][place] for name in ("megabytes", "simulated_seconds", "seconds")] == pytest.approx(
        [1.2, 12.0, 3.0]
    )
    assert first["staleness"] == [18, 6] and first["clients"]["accuracy"][0] == [pytest.approx(3.33), 0.0]
    assert "0.9 / 0.9 / 0.7667" in page and "<title>a &amp; b</title>" in page
    # A configuration that somebody else wrote cannot add code to the page.
    assert "</script><b>" not in page and html.escape("</script><b>") in page
    assert page.count("<script") == 2 and not re.search(
        r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|url\(|import\s*\(", page
    )


def test_a_long_run_is_thinned_and_a_run_without_evaluation_is_shown(tmp_path):
    recorded(tmp_path / "long", 0, rounds=5000)
    run = RecordedRun(
        folder=tmp_path / "short", fields={}, seed=0, rounds=1, history=[{"round": 1, "loss": 0.5, "seconds": 1.0}]
    )
    page = report([*read_runs(tmp_path / "long"), run])
    assert len(data_of(page)[0]["curves"]["training_loss"]) <= 400 and len(data_of(page)[1]["curves"]["training_loss"]) == 1


def test_the_command_writes_a_page_of_twenty_runs_that_a_browser_draws(tmp_path, capsys):
    for seed in range(20):
        recorded(tmp_path / "runs" / str(seed), seed, rounds=500)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out), "--title", "Twenty"]) == 0
    assert "20 runs" in capsys.readouterr().out and out.stat().st_size <= 3e6
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "no" / "page.html")]) == 2
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
    ]
    shown = subprocess.run([browser, *options, "--dump-dom", out.as_uri()], capture_output=True, text=True, timeout=120).stdout
    # Curves of the accuracy, accuracies of clients, and the staleness of each run.
    drawn = shown.partition("<script")[0]
    assert drawn.count("<polyline") == 60 and "No run has these values" not in drawn and "NaN" not in drawn
