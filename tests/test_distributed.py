"""Runs that several processes share, as real processes on loopback, against one process with as many devices."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedsim.experiment import read_metrics
from fedsim.saved_arrays import checkpoint_folder, checkpoint_rounds, is_complete, read_arrays

RUN = ["run", "--dataset", "digits(clients=20)", "--model", "digits_dense", "--clients", "6", "--evaluate-every", "3"]


def started(processes: int, *arguments: str | Path, devices: int = 4, each: list[list[str]] | None = None) -> list[subprocess.Popen]:
    """Starts ``fedsim`` in several processes, which have ``devices`` devices together; ``each`` adds options to one of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "fedsim", *map(str, arguments), "--devices", str(devices)]
    shared = ["--coordinator-address", address, "--num-processes", str(processes)] if processes > 1 else []
    own = [["--process-id", str(number)] if shared else [] for number in range(processes)]
    return [
        subprocess.Popen(
            [*command, *shared, *own[number], *(each[number] if each else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for number in range(processes)
    ]


def outputs(processes: list[subprocess.Popen], seconds: float = 300) -> list[str]:
    """Waits for processes, and returns what they printed."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def finished(processes: int, *arguments: str | Path, **options) -> list[str]:
    started_now = started(processes, *arguments, **options)
    printed = outputs(started_now)
    assert [process.returncode for process in started_now] == [0] * processes, "\n".join(printed)
    return printed


def state_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoints = folder / "checkpoints"
    return read_arrays(checkpoint_folder(checkpoints, checkpoint_rounds(checkpoints)[-1]))


def lines_of(folder: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if "second" not in name} for line in read_metrics(folder / "metrics.jsonl")]


def assert_same_bits(one: Path, other: Path) -> None:
    states = state_of(one), state_of(other)
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)
    assert lines_of(one) == lines_of(other)


def test_two_processes_give_the_bits_of_one_with_as_many_devices(tmp_path):
    run = [*RUN, "--algorithm", "scaffold", "--rounds", "6", "--folder"]
    printed = finished(2, *run, tmp_path / "two")
    finished(1, *run, tmp_path / "one")
    assert_same_bits(tmp_path / "two", tmp_path / "one")
    assert "after round 6 of 6" in printed[0] and "4 x cpu" in printed[0]
    assert "round" not in printed[1]  # Process 0 shows the bar and the table.


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm", "scaffold", "--memory", "stream"],  # The memories of clients are in a file of process 0.
        ["--algorithm", "fedadam", "--memory", "resident"],
        ["--algorithm", "ditto", "--mesh", "clients=2, model=2"],
        ["--algorithm", "fedavg", "--aggregator", "median"],
    ],
    ids=lambda options: " ".join(options[1:]),
)
def test_runs_give_the_bits_of_one_process(tmp_path, processes, options):
    run = [*RUN, *options, "--rounds", "6", "--folder"]
    finished(processes, *run, tmp_path / "several")
    finished(1, *run, tmp_path / "one")
    assert_same_bits(tmp_path / "several", tmp_path / "one")
