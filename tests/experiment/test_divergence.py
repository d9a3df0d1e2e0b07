"""Warnings about a diverging loss: conditions that cause a warning, and noise that does not."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import optax
import pytest

import fedsim
from fedsim.commands import _run, main
from fedsim.experiment import closing_table, run
from fedsim.experiment.driving import LossMonitor


def _watch(losses, num_classes=10, name="loss"):
    monitor = LossMonitor(num_classes)
    for round, loss in enumerate(losses, start=1):
        monitor.add({"round": round, name: loss})
    return monitor.warning()


def test_noise_causes_no_warning():
    draw = np.random.default_rng(0)
    for num_classes in (10, None):
        for scale in (0.02, 1.0, 1e6):
            for _ in range(50):
                falling = scale * np.exp(-np.arange(300) / 100) * draw.lognormal(0, 0.4, 300)
                if num_classes and scale > 10:
                    continue  # for a classification model this loss is very large
                assert _watch(falling, num_classes) is None
        flat = 2.3 * draw.lognormal(0, 0.3, 300)
        flat[100] = 1e9  # one unusual cohort
        assert _watch(flat, num_classes) is None


@pytest.mark.parametrize("num_classes", [10, None])
def test_a_rising_loss_is_reported(num_classes):
    text = _watch(1.5 * 1.3 ** np.arange(40), num_classes)
    assert text.startswith("The training loss rose from 1.5 in round 1 to 41,676 in round 40. Try a lower client learning rate")
    assert _watch([2.0, 2.5, 6.0, 7.0], num_classes, "test_loss").startswith("The test loss rose from 2 in round 1 to 7")
    assert _watch([2.0, 6.0, 2.5, 6.0], num_classes, "test_loss") is None


@pytest.mark.parametrize("num_classes", [10, None])
def test_a_loss_that_is_not_finite_is_reported(num_classes):
    assert "and not finite in round 2" in _watch([1.0, None, None, None], num_classes)
    assert "and not finite in round 2" in _watch([1.0, math.inf], num_classes, "test_loss")
    assert _watch([1.0, None, 1.0, 1.0], num_classes) is None


def test_a_very_large_loss_is_reported_from_the_start():
    assert _watch([5e6, 5e6]) is None
    assert _watch([5e6, 5e6, 4e6]).startswith("The training loss is 4,000,000 in round 3, and 2.3 for a uniform guess. Try")


def test_rounds_without_a_step_and_metrics_without_a_loss_are_ignored():
    monitor = LossMonitor(10)
    for round in range(20):
        monitor.add({"round": round, "loss": None, "dropped": 0})
        monitor.add({"round": round, "cost": 1e30, "test_accuracy": None})
    assert monitor.warning() is None


def test_a_loss_that_fell_again_is_reported_as_such():
    assert _watch([*(1.5 * 2.0 ** np.arange(20)), *[1.0] * 20]).startswith(
        "The training loss rose from 1.5 in round 1 to 786,432 in round 20; in round 40 it is 1. Try"
    )


def test_a_table_says_diverged_instead_of_an_enormous_number():
    line = {"round": 1, "test_loss": 1562300282201350078464.0, "test_accuracy": 0.1, "test_loss_clients_mean": 1e20}
    fields = dict(round=1, rounds=1, seconds=1.0, rate=None, devices="1 x cpu", written=[])
    rows = {row.split()[0]: row.split()[1:] for row in closing_table([line], **fields, warning="...").splitlines() if row}
    assert rows["loss"] == ["diverged", "-", "-", "-"] and rows["accuracy"] == ["0.1000", "-", "-", "-"]
    large = closing_table([line | {"test_loss": 3e6}], **fields)  # the loss of a regression
    assert "3e+06" in large


def test_large_and_small_numbers_are_shown_in_columns_of_their_own():
    fields = dict(round=1, rounds=1, seconds=1.0, rate=0.004, devices="1 x cpu", written=[])
    over = {
        "test_perplexity_clients_mean": 123.456,
        "test_perplexity_clients_std": 234.567,
        "test_perplexity_clients_worst10": 9876.5,
    }
    small = {"test_loss": 2.34e-5, "test_loss_clients_mean": 1.2e-5, "test_loss_clients_std": 4.5e-6}
    text = closing_table([{"round": 1, "test_perplexity": 321.5} | over | small], **fields)
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines() if row}
    assert rows["perplexity"] == ["321.5000", "123.456", "234.567", "9876.5"]
    assert rows["loss"] == ["2.34e-05", "1.2e-05", "4.5e-06", "-"]
    assert len({len(row) for row in text.splitlines() if row.startswith(("perplexity", "loss", "test "))}) == 1
    assert "0.004 rounds/s" in text


@pytest.mark.parametrize(("losses", "expected"), [([2.0, 3.0, 6.0, 7.0], True), ([2.0, 6.0, 7.0, 1.0], False), ([2.0], False)])
def test_a_loss_that_fell_again_is_no_longer_diverged(losses, expected):
    monitor = LossMonitor(None)
    for round, loss in enumerate(losses, start=1):
        monitor.add({"round": round, "test_loss": loss})
    assert monitor.diverged == expected


def _diverging(make_algorithm):
    return make_algorithm(client_optimizer=optax.sgd(1e4))


@pytest.mark.slow
def test_a_run_warns_once_and_in_its_table(make_algorithm, sampler, data, tmp_path, capsys):
    arguments = dict(sampler=sampler, test_data=data, evaluate_every=5, folder=tmp_path / "r")
    with pytest.warns(UserWarning, match="loss .* Try a lower client learning rate") as caught:
        run(_diverging(make_algorithm), rounds=20, **arguments)
    assert len([w for w in caught if "learning rate" in str(w.message)]) == 1
    table = capsys.readouterr().out
    assert table.count("warning    The training loss") == 1 and "Try a lower client learning rate" in " ".join(table.split())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the run is finished, so its table is printed again
        run(_diverging(make_algorithm), rounds=20, **arguments)
    assert "warning    The training loss" in capsys.readouterr().out


def test_a_resumed_run_remembers_its_initial_loss(make_algorithm, sampler, tmp_path):
    class StopError(Exception):
        pass

    def stop(line, state):
        if line["round"] == 8:
            raise StopError

    poisoned = make_algorithm(client_optimizer=lambda round: optax.sgd(0.1 * 10.0 ** round.astype(np.float32)))
    arguments = dict(
        sampler=sampler, rounds=16, folder=tmp_path / "r", checkpoint_every=1, rounds_per_dispatch=1, progress=False
    )
    with pytest.raises(StopError):
        run(poisoned, **arguments, callbacks=[stop])
    with pytest.warns(UserWarning, match=r"The training loss (rose from|was) .* in round 1 (to|and not finite)"):
        result = run(poisoned, **arguments)
    assert [line["round"] for line in result.history] == list(range(1, 17))


@pytest.mark.filterwarnings("default")
def test_the_command_line_shows_warnings_above_the_bar(tmp_path, capsys):
    options = "--model digits_logistic --rounds 12 --client-learning-rate 3000 --epochs 1 --evaluate-every 4 --execution jit"
    assert main(["run", *options.split(), "--folder", str(tmp_path / "r")]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.replace("\r", "\n").splitlines() if "warning" in line]
    assert line.startswith("fedsim: warning: The t") and "Try a lower client learning rate" in line
    assert "UserWarning" not in err and "12/12" in err and "warning    The" in out


@pytest.mark.filterwarnings("default")
def test_a_warning_that_is_raised_twice_is_shown_once(capsys, monkeypatch):
    def command(_):
        for _ in range(3):
            with warnings.catch_warnings():  # this resets the record of warnings already shown
                warnings.warn("clients that can never take a step: 3", stacklevel=1)
        return 0

    monkeypatch.setattr(_run, "main", command)
    show = warnings.showwarning
    assert main(["run"]) == 0
    assert capsys.readouterr().err == "fedsim: warning: clients that can never take a step: 3\n"
    assert warnings.showwarning is show and sys.modules["fedsim.commands"] is fedsim.commands
