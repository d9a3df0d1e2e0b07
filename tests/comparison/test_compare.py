"""What is read from run folders, how runs become settings and groups, and what is said about them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import groups, recorded, write_run

from fedsim.comparison import Cost, RecordedRun, compare, edge_of_grid, read_runs, runs_table
from fedsim.comparison._result import latex_escaped


def said(runs, **options):
    return " | ".join(compare(runs, **options).notes)


def test_last_best_and_last_ten_and_the_cost_of_a_target(tmp_path):
    accuracies = [0.1, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.6, 0.7]
    comparison = compare(read_runs(write_run(tmp_path / "a", accuracies)), target=("accuracy", 0.75))
    (outcome,) = comparison.settings[0].outcomes.values()
    assert (outcome.last, outcome.best, outcome.best_round) == (0.7, 0.9, 2)
    assert math.isclose(outcome.last10, np.mean(accuracies[-10:]))
    assert outcome.to_target == Cost(rounds=2, megabytes=6.0, seconds=1.0)  # 1 MB up and 2 MB down in a round of 0.5 s


def test_a_target_of_a_loss_is_reached_from_above_and_simulated_time_is_preferred():
    history = [
        {"round": 1, "seconds": 9.0, "simulated_seconds": 30.0, "bytes_up": 10**6, "bytes_down": 0, "bits_up": 1},
        {"round": 1, "test_loss": 2.0},
        {"round": 2, "seconds": 9.0, "simulated_seconds": 50.0, "bytes_up": 10**6, "bytes_down": 10**6, "bits_up": 1},
        {"round": 2, "test_loss": 1.0},
    ]
    run = dataclasses.replace(recorded(0.5, rounds=2), history=history)
    comparison = compare([run], target=("loss", 1.5))
    assert comparison.metric == "test_loss" and not comparison.higher and comparison.simulated
    assert comparison.settings[0].costs == [Cost(rounds=2, megabytes=3.0, seconds=50.0)]


def test_the_best_setting_is_that_of_the_validation_data():
    runs = [recorded(0.9, validation=0.6, rate=0.1), recorded(0.8, validation=0.7, rate=1.0)]
    comparison = compare(runs)
    assert [result.setting["rate"] for result in comparison.selected] == [1.0]
    assert comparison.selection == "validation_accuracy" and "optimistic" not in comparison.table() + comparison.latex()
    without = compare([*runs, recorded(0.7, rate=10.0)])
    assert [result.setting["rate"] for result in without.selected] == [0.1]
    for text in (without.table(), without.latex()):
        assert "Selected on test data: these figures are optimistic." in text
    assert "Only 2 of 3 runs have validation_accuracy, so settings are selected by test_accuracy." in without.notes


def test_the_best_round_is_that_of_the_validation_data():
    pairs = [(0.9, 0.5), (0.7, 0.8), (0.6, 0.6)]
    history = [{"round": n, "test_accuracy": t, "validation_accuracy": v} for n, (t, v) in enumerate(pairs, 1)]
    run = dataclasses.replace(recorded(0.0, rounds=3), history=history)
    (outcome,) = compare([run], at="best").settings[0].outcomes.values()
    assert (outcome.best_round, outcome.best) == (2, 0.7) and not compare([run], at="best").is_optimistic
    alone = [{name: value for name, value in line.items() if name != "validation_accuracy"} for line in history]
    assert compare([dataclasses.replace(run, history=alone)], at="best").is_optimistic


@pytest.mark.parametrize(
    ("best", "values", "said"),
    [
        (0.1, [0.01, 0.1], "largest"),
        (0.01, [0.01, 0.1], "smallest"),
        (0.1, [0.01, 0.1, 1.0], None),
        (0.0, [0.0, 1.0], None),
        (1, [1, 5], None),
        ("b", ["a", "b"], None),
        (True, [False, True], None),
        (0.1, [0.1], None),
    ],
)
def test_the_edge_of_a_grid(best, values, said):
    text = edge_of_grid("x", best, values)
    assert (text is None) if said is None else f"the {said} of the grid" in text


def test_the_grid_is_that_of_all_runs_of_the_group_and_of_its_sweep():
    runs = [recorded(0.5, rate=0.1), recorded(0.9, rate=1.0)]
    assert "the best rate=1.0 is the largest of the grid: try larger ones" in said(runs)
    unfinished = dataclasses.replace(recorded(0.1, rate=10.0), rounds=9)
    assert "of the grid" not in said([*runs, unfinished])
    of_sweep = [dataclasses.replace(run, grid={"rate": [0.1, 1.0, 10.0]}, sweep_size=3) for run in runs]
    assert "of the grid" not in said(of_sweep) and "2 of the 3 runs of the sweep runs are here." in said(of_sweep)
    assert "of the grid" in said([*runs, recorded(0.1, rate=10.0, algorithm="fedprox")])


def test_drawn_settings_have_no_edge_and_runs_of_their_search_that_are_missing_are_said(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"varied": [{"rate": 0.1}, {"rate": 0.2}, {"rate": 0.3}], "seeds": [0, 1]}))
    for rate, accuracy in ((0.1, 0.5), (0.2, 0.6)):
        write_run(tmp_path / f"rate={rate}", [accuracy], hyperparameters={"rate": rate})
    text = said(read_runs(tmp_path))
    assert "of the grid" not in text and "2 of the 6 runs of the sweep" in text


def test_settings_with_values_that_have_no_hash_are_compared():
    runs = [recorded(accuracy, hidden=hidden) for accuracy, hidden in ((0.5, [64]), (0.6, [64, 32]))]
    assert [result.setting["hidden"] for result in compare(runs).selected] == [[64, 32]]


def test_settings_are_what_differs_within_a_group_besides_the_seed():
    runs = [recorded(0.5 + seed / 100, seed=seed, rate=rate, clip=None) for rate in (0.1, 0.2) for seed in range(3)]
    prox = [recorded(0.6 + seed / 99, seed=seed, rate=0.1, mu=mu, algorithm="fedprox") for mu in (0.1, 1) for seed in range(2)]
    comparison = compare([*runs, *prox])
    assert [(result.name, dict(result.setting), len(result.runs)) for result in comparison.settings] == [
        ("fedavg", {"rate": 0.1}, 3),
        ("fedavg", {"rate": 0.2}, 3),
        ("fedprox", {"mu": 0.1}, 2),
        ("fedprox", {"mu": 1}, 2),
    ]
    assert "The groups also differ in rate (fedavg: 0.1, 0.2; fedprox: 0.1)." in comparison.notes
    assert not any("mu (" in note for note in comparison.notes) and "numbers of settings" not in said([*runs, *prox])
    more = said([*runs, *prox[:2]])
    assert "numbers of settings are tested (fedavg 2, fedprox 1) with the seeds that they were selected with" in more
    by_rate = compare(runs, group=["rate"])
    assert [result.name for result in by_rate.settings] == ["rate=0.1", "rate=0.2"] and len(by_rate.tests) == 1


def test_runs_of_other_datasets_and_numbers_of_rounds_are_not_mixed():
    runs = [
        recorded(0.5 + seed / 10, seed=seed, algorithm=name, dataset=dataset, rounds=rounds)
        for name in ("fedavg", "fedprox")
        for dataset, rounds in (("digits", 1), ("mnist", 1), ("digits", 2))
        for seed in range(2)
    ]
    comparison = compare(runs)
    assert len(comparison.settings) == 6 and all(len(result.runs) == 2 for result in comparison.settings)
    assert [(test.first.context, test.second.context) for test in comparison.tests] == [
        ({"dataset": dataset, "rounds": rounds},) * 2 for dataset, rounds in (("digits", 1), ("mnist", 1), ("digits", 2))
    ]
    assert "The runs have different dataset: digits, mnist" in said(runs) and "different rounds: 1, 2" in said(runs)
    by_rounds = [run for run in runs if run.fields["dataset"] == "digits" and run.fields["algorithm"] == "fedavg"]
    assert len(compare(by_rounds, group=["rounds"]).tests) == 1


def test_a_run_that_was_killed_before_its_last_evaluation_is_not_finished(tmp_path):
    write_run(tmp_path / "a", [0.5, 0.6])
    metrics = write_run(tmp_path / "killed", [0.5, 0.6], seed=1) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    never = write_run(tmp_path / "never", [0.5, 0.6], seed=2) / "metrics.jsonl"  # a run without test data
    never.write_text("".join(line for line in metrics.read_text().splitlines(keepends=True) if "seconds" in line))
    finished, killed, unevaluated = read_runs(tmp_path)
    assert (killed.is_finished, killed.state) == (False, "round 2 of 2, without its evaluation")
    assert finished.is_finished and unevaluated.is_finished
    comparison = compare([finished, killed])
    assert list(comparison.settings[0].outcomes) == [0] and "without its evaluation" in " ".join(comparison.notes)


def test_a_run_that_was_killed_before_its_only_evaluation_is_not_finished(tmp_path):
    for seed, ended in enumerate([{"round": 2, "rule": None, "reason": None}, None]):
        folder = write_run(tmp_path / str(seed), [0.5, 0.6], seed=seed)
        stored = json.loads((folder / "config.json").read_text()) | {"ended": ended}
        (folder / "config.json").write_text(json.dumps(stored))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(line for line in lines if "seconds" in line))
    unevaluated, killed = read_runs(tmp_path)
    assert (unevaluated.is_finished, unevaluated.state) == (True, "finished")
    assert (killed.is_finished, killed.state) == (False, "round 2 of 2, without its last files")


def test_unfinished_repeated_and_damaged_runs_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "a", [0.5, 0.6])
    write_run(tmp_path / "again", [0.5, 0.6])
    write_run(tmp_path / "short", [0.5], seed=1, rounds=2)
    write_run(tmp_path / "ruled", [0.5], seed=2, rounds=2, stop_when="reached(value=0.5)")
    config = write_run(tmp_path / "interrupted", [0.5], seed=5, rounds=2, stop_when="reached(value=0.5)") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "ended": None}))
    damaged = write_run(tmp_path / "damaged", [0.5, 0.6], seed=3) / "metrics.jsonl"
    damaged.write_text("oops\n" + damaged.read_text())
    (write_run(tmp_path / "unreadable", [0.5, 0.6], seed=4) / "config.json").write_text("{")
    runs = read_runs(tmp_path)
    states = {run.folder.name: run.state for run in runs}
    assert states == {
        "a": "finished",
        "again": "finished",
        "damaged": "metrics.jsonl has 1 lines that cannot be read",
        "interrupted": "round 1 of 2",
        "ruled": "round 1 of 2: stopped by reached(value=0.5), or interrupted",
        "short": "round 1 of 2",
        "unreadable": "config.json cannot be read (JSONDecodeError)",
    }
    comparison = compare(runs)
    assert sorted(seed for result in comparison.settings for seed in result.runs) == [0, 2]
    text = " ".join(comparison.notes)
    for name in ("damaged", "short", "unreadable"):
        assert re.search(rf"Left out, not finished: [^.]*[^|]*{name} \({re.escape(states[name])}", text)
    assert "Left out, the setting and the seed of another run" in text and "again (finished)" in text
    assert "Ended early" in text and "one seed, so there is no interval" in text


def test_a_setting_with_a_value_that_is_not_finite_is_not_selected():
    runs = [recorded(0.5, seed=seed, rate=0.1) for seed in range(2)] + [
        recorded(0.9, rate=1.0),
        recorded(None, seed=1, rate=1.0),
    ]
    comparison = compare(runs)
    assert [result.setting["rate"] for result in comparison.selected] == [0.1]
    assert "fedavg rate=1: test_accuracy is not finite with the seeds 1" in " ".join(comparison.notes)
    assert "No setting of fedavg is selected" in said([recorded(None)])


def test_a_setting_of_which_few_seeds_have_finished_is_not_selected():
    runs = [recorded(0.8, seed=seed, rate=0.1) for seed in range(3)] + [recorded(0.9, rate=1.0)]
    runs += [dataclasses.replace(recorded(0.1, seed=seed, rate=1.0), rounds=9) for seed in (1, 2)]
    assert [result.setting["rate"] for result in compare(runs).selected] == [0.1]
    assert "Not selected, fedavg rate=1: it is better, but has 1 of 3 seeds." in said(runs)
    failed = [recorded(None, seed=seed, rate=0.1) for seed in range(3)] + [recorded(0.9, rate=1.0)]
    assert not compare(failed).selected and "none of those with 3 seeds has finite values" in said(failed)


def test_other_data_versions_and_seeds_are_said():
    runs = groups([0.5, 0.6], [0.7, 0.9])
    runs = [
        dataclasses.replace(run, data=f"{run.seed}{'x' * (i == 2)}", versions={"jax": f"0.{i // 2}", "numpy": "2"})
        for i, run in enumerate(runs)
    ]
    assert "Runs with the same seed have different training, validation or test data (seeds 0)." in said(runs)
    assert "The runs had different versions: jax 0.0 and 0.1." in said(runs)
    uneven = [recorded(0.5, rate=0.1), recorded(0.5, rate=0.2), recorded(0.6, rate=0.2, seed=1)]
    assert "The settings of fedavg have different seeds" in said(uneven)


def test_code_that_has_changed_is_another_setting(tmp_path):
    for number in range(2):
        folder = write_run(tmp_path / str(number), [0.5])
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stored, "code": {"mine.py": str(number)}}))
    assert [list(result.setting) for result in compare(read_runs(tmp_path)).settings] == [["code"], ["code"]]


def test_the_csv_has_the_numbers_of_the_table():
    runs = [recorded(0.5 + seed / 10, seed=seed, rate=rate) for rate in (0.1, 0.2) for seed in range(2)]
    rows = list(csv.DictReader(io.StringIO(compare(runs, target=("accuracy", 0.6)).csv())))
    assert [row["rate"] for row in rows] == ["0.1", "0.2"] and [row["selected"] for row in rows] == ["1", "0"]
    assert float(rows[0]["last_mean"]) == pytest.approx(0.55) and float(rows[0]["last_std"]) == pytest.approx(0.05 * 2**0.5)
    assert rows[0]["reached_by"] == "1" and rows[0]["rounds_to_target"] == "1.0"


def test_latex_is_escaped_and_has_as_many_cells_in_every_row():
    runs = [recorded(0.5 + seed / 10, seed=seed, algorithm=name) for name in ("a_b&c", r"my.py:50%\x") for seed in range(2)]
    text = compare(runs, target=("accuracy", 0.6)).latex()
    assert r"a\_b\&c" in text and r"my.py:50\%\textbackslash{}x" in text and r"$\pm$" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1 and len(body) == 3
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\toprule") == 1
    assert len(re.search(r"\{(l*r*)\}", text)[1]) == len(re.findall(r"(?<!\\)&", body[0])) + 1
    assert latex_escaped("#_{}~^<>$") == r"\#\_\{\}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\$"


def test_the_figure_has_a_mean_and_a_band_over_seeds():
    draw = np.random.default_rng(0)
    values = draw.uniform(0.5, 0.9, (4, 3))
    history = [
        [{"round": n, "seconds": s + 1.0, "test_accuracy": float(of[n - 1])} for n in (1, 2, 3)] for s, of in enumerate(values)
    ]
    runs = [dataclasses.replace(recorded(0, seed=seed, rounds=3), history=lines) for seed, lines in enumerate(history)]
    axes = compare(runs).plot().axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), values.mean(0))
    half = 3.182446 * values.std(0, ddof=1) / 2  # the quantile of 3 degrees of freedom, and the root of 4
    edges = axes.collections[0].get_paths()[0].vertices
    for x in (1, 2, 3):
        at = edges[np.isclose(edges[:, 0], x), 1]
        np.testing.assert_allclose([at.min(), at.max()], values.mean(0)[x - 1] + np.array([-1, 1]) * half[x - 1], rtol=1e-6)
    seconds = compare(runs).plot("seconds").axes[0].lines[0]
    np.testing.assert_allclose(seconds.get_xdata(), [2.5, 5.0, 7.5])  # the mean of 1, 2, 3 and 4 seconds per round
    with pytest.raises(ValueError, match="Expected runs with bytes"):
        compare(runs).plot("bytes")
    one = compare(runs[:1]).plot().axes[0]
    assert not one.collections and "1 seed, no band" in one.get_legend_handles_labels()[1][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f1"}, "Expected the name of a metric, got metric=f1, and the runs have the metrics accuracy"),
        ({"group": ["algoritm"]}, "got 'algoritm'. Did you mean 'algorithm'"),
        ({"group": []}, "Expected at least one field in group"),
        ({"at": "first"}, "Expected at to be last, best or last10, got at='first'"),
        ({"difference": -0.1}, "Expected difference > 0, got difference=-0.1"),
        ({"target": ("f1", 0.5)}, "Expected runs with test_f1"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compare([recorded(0.5)], **options)


def test_a_metric_without_a_direction_is_refused_unless_the_run_says_it():
    run = dataclasses.replace(recorded(0.5), history=[{"round": 1, "test_error": 0.1}])
    with pytest.raises(ValueError, match="higher or lower values are better, got test_error"):
        compare([run], metric="error")
    said = dataclasses.replace(run, history=[{"round": 1, "test_error": 0.1, "better": {"test_error": "lower"}}])
    assert compare([said]).metric == "test_error" and not compare([said]).higher


def test_no_finished_run_is_an_error():
    with pytest.raises(ValueError, match="Expected at least one run"):
        compare([])
    with pytest.raises(ValueError, match=r"Expected finished runs, got .* \(round 1 of 5\)"):
        compare([dataclasses.replace(recorded(0.5), rounds=5)])


def test_runs_are_found_once_and_in_the_order_of_numbers(tmp_path):
    for seed in (10, 9, 1):
        write_run(tmp_path / "sweep" / f"rate=0.1,seed={seed}", [0.5], seed=seed)
    write_run(tmp_path / "sweep" / "rate=0.01,seed=0", [0.5])
    runs = read_runs(tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "rate=0.1,seed=9")
    assert [run.folder.name for run in runs] == ["rate=0.01,seed=0", *(f"rate=0.1,seed={seed}" for seed in (1, 9, 10))]
    assert runs_table(runs, tmp_path).splitlines()[1].startswith("sweep/rate=0.01,seed=0  finished")
    varied = {"rate": [0.01, 0.1], "mu": [1]}
    for content, size in (({"varied": varied, "seeds": [0, 1, 9, 10]}, 8), ({"varied": {"rate": 1}, "seeds": [0]}, 0), ([], 0)):
        (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(content))
        assert {(run.sweep_size, run.grid == varied) for run in read_runs(tmp_path)} == {(size, size > 0)}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="in which no folder has a config.json"):
        read_runs(tmp_path / "empty")


def test_the_metric_is_one_that_all_runs_have():
    def recorded(name, seed):
        last = {"round": 1, "test_accuracy": 0.8 + seed / 100} | ({"test_personal_accuracy": 0.9} if name == "ditto" else {})
        return RecordedRun(folder=Path(f"{name}{seed}"), fields={"algorithm": name}, seed=seed, rounds=1, history=[last])

    compared = compare([recorded(name, seed) for name in ("fedavg", "ditto") for seed in range(3)])
    assert compared.metric == "test_accuracy" and len(compared.settings) == 2
    assert compare([recorded("ditto", seed) for seed in range(3)]).metric == "test_personal_accuracy"
