"""The command line itself: its commands and their list, unknown names, tracebacks and interrupts."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim import commands
from fedsim.commands import _run, main
from fedsim.commands._configuration import configured


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
    # A shell lets processes in the background ignore the signal, and these tests may be one.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["run"]) == 130 and sent and sys.unraisablehook is before
    finally:
        signal.signal(signal.SIGINT, handler)
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


@pytest.mark.parametrize("command", ["datasets", "models", "algorithms"])
def test_lists_of_registered_names(command, capsys):
    assert main([command]) == 0
    names = {"datasets": "digits", "models": "emnist_cnn", "algorithms": "fedyogi"}
    assert any(line.startswith(names[command]) for line in capsys.readouterr().out.splitlines())


def test_commands_are_listed(capsys):
    assert main([]) == 0 and "resume FOLDER" in capsys.readouterr().out


def test_a_traceback_is_printed_on_request(capsys):
    assert main(["run", "--rounds", "0", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_unknown_option_and_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--roundz", "3"])
    assert stop.value.code == 2 and "--rounds" in capsys.readouterr().err
    assert main(["rum"]) == 2 and "Did you mean 'run'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "--rounds", "0", "--dp-noise", "1", "--dp_noise=2"], "--dp-noise 1 --dp_noise=2"),
        (["plan", "--rounds", "3", "--rounds", "0"], "--rounds 3 --rounds 0"),
        (["run", "--rounds", "0", "--progress", "--no-progress"], "--progress --no-progress"),
        (["reproduce", "fedavg", "--only", "a", "b", "--only", "c"], "--only a b --only c"),
        (["datasets", "describe", "mnyst", "--label", "a", "--label", "b"], "--label a --label b"),
    ],
)
def test_of_an_option_that_is_given_twice_the_last_counts_and_it_is_said(arguments, shown, capsys):
    """A name of an algorithm, for example, that is given twice makes a sweep instead."""
    assert main(arguments) == 2
    assert f"fedsim: warning: {shown}: the last one counts.\n" in capsys.readouterr().err
    main(["run", "--rounds", "0", "--algorithm", "fedavg", "--algorithm", "fedprox"])
    assert "the last one counts" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "varied", "last"),
    [
        (["0.01,0.1", "0.5"], {}, 0.5),
        (["log_uniform(0.01, 1)", "0.5"], {}, 0.5),
        (["0.5", "0.01,0.1"], {"client_learning_rate": [0.01, 0.1]}, 0.01),
        (["0.01,0.1", "0.5,1"], {"client_learning_rate": [0.5, 1.0]}, 0.5),
    ],
)
def test_of_several_values_that_are_given_twice_the_last_make_the_sweep(arguments, varied, last):
    given = [part for values in arguments for part in ("--client-learning-rate", values)]
    found = configured(given, "fedsim run", "", {})
    assert (found.varied, found.config.client_learning_rate) == (varied, last)


def test_every_command_is_a_module_and_in_the_help(capsys):
    modules = {path.stem for path in Path(commands.__file__).parent.glob("_*.py")}
    assert {f"_{command}" for command in commands.COMMANDS} <= modules
    assert main(["--help"]) == 0
    assert re.findall(r"^  ([a-z]+)", capsys.readouterr().out, re.MULTILINE) == list(commands.COMMANDS)


def test_the_step_of_a_server_that_adds_up_changes_follows_the_number_of_clients():
    for options, rate in (
        ([], 1 / 20),
        (["--clients", "50"], 1 / 50),
        (["--server-learning-rate", "2", "--clients", "5"], 2.0),
    ):
        config = configured(["--algorithm", "dssgd", *options], "fedsim run", "", {}).config
        assert config.hyperparameters["server_learning_rate"] == rate
