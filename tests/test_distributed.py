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


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def started(processes: int, *arguments: str | Path, each: list[list[str]] | None = None) -> list[subprocess.Popen]:
    """Starts ``fedsim`` in several processes, which have four devices together; ``each`` adds options to one of them."""
    address = free_address()
    command = [sys.executable, "-m", "fedsim", *map(str, arguments)]
    if arguments[0] == "run" and "--mesh" not in arguments:
        command += ["--devices", "4"]
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


def finished(processes: int, *arguments: str | Path) -> list[str]:
    started_now = started(processes, *arguments)
    printed = outputs(started_now)
    assert [process.returncode for process in started_now] == [0] * processes, "\n".join(printed)
    return printed


def state_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoints = folder / "checkpoints"
    arrays = read_arrays(checkpoint_folder(checkpoints, checkpoint_rounds(checkpoints)[-1]))
    # Where the rows of clients are in their file depends on earlier checkpoints. Their checksums do not.
    return {name: array for name, array in arrays.items() if not name.endswith((".index", ".processes"))}


def lines_of(folder: Path) -> list[dict]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def assert_same_bits(one: Path, other: Path) -> None:
    states = state_of(one), state_of(other)
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)
    assert lines_of(one) == lines_of(other)


def test_two_processes_give_the_bits_of_one_with_as_many_devices(tmp_path):
    """It is in `make test`, because nothing else there runs in several processes."""
    run = [*RUN, "--algorithm", "scaffold", "--example-storage", "stream", "--rounds", "6", "--folder"]
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
        ["--algorithm", "scaffold", "--example-storage", "stream"],  # The memories of clients are in a file of each process.
        ["--algorithm", "fedadam", "--example-storage", "resident"],
        ["--algorithm", "ditto", "--example-storage", "stream", "--mesh", "clients=2, model=2"],
        ["--algorithm", "fedavg", "--aggregator", "coordinate_median"],
        ["--algorithm", "diloco", "--example-storage", "stream", "--steps", "5"],
        ["--algorithm", "fedavg", "--sampler", "power_of_choice(candidates=20)"],
    ],
    ids=lambda options: " ".join(options[1:]),
)
def test_runs_give_the_bits_of_one_process(tmp_path, processes, options):
    run = [*RUN, *options, "--rounds", "6", "--folder"]
    finished(processes, *run, tmp_path / "several")
    finished(1, *run, tmp_path / "one")
    assert_same_bits(tmp_path / "several", tmp_path / "one")


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_signal_and_gives_the_bits_of_one_process(tmp_path):
    sweep = [*RUN, "--client-learning-rate", "0.05,0.1", "--seeds", "2", "--rounds", "6", "--folder"]
    running = started(2, *sweep, tmp_path / "several")
    first = tmp_path / "several" / "client_learning_rate=0.05,seed=0" / "metrics.jsonl"
    wait_for(first.exists)
    running[1].send_signal(signal.SIGTERM)  # Process 0 hears of it.
    printed = outputs(running)
    assert [process.returncode for process in running] == [128 + signal.SIGTERM] * 2, "\n".join(printed)
    assert "fedsim resume" in printed[0] and "fedsim resume" not in printed[1]
    printed = finished(2, "resume", tmp_path / "several")
    assert "4 runs of 6 rounds" in printed[0] and "runs of" not in printed[1]
    finished(1, *sweep, tmp_path / "one", "--sweep-mode", "sequential")
    for member in sorted(path.name for path in (tmp_path / "one").iterdir() if path.is_dir()):
        assert_same_bits(tmp_path / "several" / member, tmp_path / "one" / member)
    assert (tmp_path / "several" / "members.csv").read_text() == (tmp_path / "one" / "members.csv").read_text()


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "named"),
    [(1, "tasks are unhealthy (stopped sending heartbeats):\n1"), (0, "the leader (usually slice 0 task 0)")],
)
def test_after_a_process_was_killed_the_others_name_it_and_the_run_goes_on(tmp_path, killed, named):
    run = [*RUN, "--algorithm", "scaffold", "--example-storage", "stream", "--rounds", "60", "--checkpoint-every", "2"]
    several = started(2, *run, "--folder", tmp_path / "killed")
    checkpoints = tmp_path / "killed" / "checkpoints"
    wait_for(lambda: checkpoints.exists() and len(checkpoint_rounds(checkpoints)) > 1)
    os.kill(several[killed].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    printed = outputs(several, seconds=60)[1 - killed]
    assert time.monotonic() - killed_at < 60
    assert several[1 - killed].returncode != 0 and named in printed, printed
    assert f"To continue: fedsim resume {tmp_path / 'killed'}" in printed
    saved = checkpoint_rounds(checkpoints)
    assert saved[-1] < 60 and all(is_complete(checkpoint_folder(checkpoints, round)) for round in saved)

    finished(2, "resume", tmp_path / "killed")
    finished(1, *run, "--folder", tmp_path / "whole")
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[], ["--mesh", "clients=2, model=2"]], ids=["clients", "mesh"])
def test_a_run_of_two_processes_goes_on_in_one_and_in_four(tmp_path, mesh):
    run = [*RUN, "--algorithm", "scaffold", "--example-storage", "stream", "--rounds", "40", "--checkpoint-every", "5", *mesh]
    several = started(2, *run, "--folder", tmp_path / "stopped")
    checkpoints = tmp_path / "stopped" / "checkpoints"
    wait_for(lambda: checkpoints.exists() and checkpoint_rounds(checkpoints))
    several[1].send_signal(signal.SIGTERM)  # One process is enough, and all stop after the same round.
    printed = outputs(several)
    assert [process.returncode for process in several] == [128 + signal.SIGTERM] * 2
    assert "SIGTERM: stopped after round" in printed[0] and "To continue: fedsim resume" in printed[0]

    finished(4, "resume", tmp_path / "stopped")
    finished(1, *run, "--folder", tmp_path / "whole")
    # The devices are as many as before, so that the sums have the same order.
    assert_same_bits(tmp_path / "stopped", tmp_path / "whole")


HELD = """
import sys
import optax, fedsim
fedsim.use_all_cores(1)
fedsim.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
data, model = fedsim.datasets.load("digits(clients=21)").train, fedsim.models.digits_logistic()
algorithm = fedsim.algorithms.SCAFFOLD(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
sampler = fedsim.UniformSampler(data, clients=21, seed=0)
rows = fedsim.experiment.run(algorithm, sampler, rounds=1, progress=False).state.clients
print((rows.index >= 0).nonzero()[0].tolist())
"""


@pytest.mark.slow
def test_each_process_has_the_rows_of_its_own_clients():
    address = free_address()
    several = [
        subprocess.Popen([sys.executable, "-c", HELD, address, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    held = [text.splitlines()[-1] for text in outputs(several)]
    assert held == [str(list(range(0, 21, 2))), str(list(range(1, 21, 2)))]  # 11 = ceil(21 / 2) rows and 10


@pytest.mark.slow
def test_checkpoints_are_read_and_continued_by_another_number_of_processes(tmp_path):
    run = [*RUN, "--algorithm", "scaffold", "--example-storage", "stream", "--checkpoint-every", "1", "--rounds"]
    finished(2, *run, "3", "--folder", tmp_path / "several")
    checkpoints = tmp_path / "several" / "checkpoints"
    for processes, rounds in [(1, 6), (4, 9), (2, 12)]:
        finished(processes, "resume", tmp_path / "several", "--rounds", str(rounds))
        rows = sorted(path.name for path in checkpoints.glob("*.rows"))
        assert rows == [*(f"clients.{process}.rows" for process in range(1, processes)), "clients.rows"]
    finished(1, *run, "12", "--folder", tmp_path / "whole")
    assert_same_bits(tmp_path / "several", tmp_path / "whole")


@pytest.mark.slow
def test_processes_that_differ_are_refused(tmp_path):
    run = [*RUN, "--algorithm", "fedavg", "--rounds", "2", "--folder", tmp_path / "run"]
    printed = outputs(several := started(2, *run, each=[[], ["--seed", "7"]]))
    assert [process.returncode for process in several] == [2, 2]
    for text in printed:
        assert "seed: 0 in process 0, 7 in process 1" in text, text
    assert not (tmp_path / "run").exists()
