"""Faults of real processes: a killed node, a stopped one, one that the network loses for 30 or 75 seconds, a killed server."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from deployment.test_flower import deliveries, left_behind, said_by

from fedsim.saved_arrays import checkpoint_folder, checkpoint_rounds, read_arrays

NEEDS_FLOWER = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


def started(temporary, *arguments):
    command = [sys.executable, "-m", "fedsim", *arguments]
    with open(temporary / "stderr", "w") as said:
        return subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)}, stderr=said)


def processes_of(server, program, number):
    """Returns the processes of a node: its ``worker``, or its ``supernode`` and what that has started."""
    found = []
    for child in psutil.Process(server.pid).children():
        line = child.cmdline()
        is_worker = line[1:3] == ["-m", "fedsim.deployment"] and line[4] == f"{number}"
        is_supernode = any(word.endswith("flower-supernode") for word in line) and f'/{number}"' in " ".join(line)
        if is_worker if program == "worker" else is_supernode:
            found += [child, *child.children(recursive=True)]
    return found


def assert_ends_as_simulated(folder, near):
    """Repeats a run from its record, and compares the parameters. No update counts twice.

    Nodes and the simulation run different programs, whose last bits may differ with XLA's optimizations.
    """
    numbers = [number for line in deliveries(folder) if "updates" in line for number in line["updates"]["number"]]
    assert len(set(numbers)) == len(numbers)
    rounds = checkpoint_rounds(folder / "checkpoints")[-1]
    again = [sys.executable, "-m", "fedsim", "run", "--from", str(folder), "--deliveries", str(folder / "deliveries.jsonl")]
    again += ["--rounds", f"{rounds}", "--execution", "jit", "--no-progress", "--folder", str(near)]
    subprocess.run(again, check=True, timeout=300, env=os.environ)
    expected, got = (read_arrays(checkpoint_folder(run / "checkpoints", rounds)) for run in (near, folder))
    names = [name for name in expected if name.startswith((".params", ".server.params"))]  # Others are of earlier models.
    assert names
    for name in names:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


@NEEDS_FLOWER
@pytest.mark.slow
def test_a_node_that_is_silent_for_more_than_a_minute_is_away_until_it_is_heard_again(tmp_path):
    """Flower reports it as unavailable after a minute. Its updates until then are lost; those of later messages count."""
    temporary, folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp")), tmp_path / "far"
    server = started(
        temporary, "deploy", "--nodes", "2", "--model", "digits_logistic", "--rounds", "500", "--checkpoint-every", "1",
        "--synchronization", "buffered(size=2, concurrency=4)", "--no-progress", "--folder", str(folder),
    )  # fmt: skip
    until, stopped = time.monotonic() + 600, []

    def wait(condition, what):
        while not condition():
            assert server.poll() is None, said_by(temporary)
            assert time.monotonic() < until, f"{what}: {said_by(temporary)}"
            time.sleep(0.2)

    try:
        wait(lambda: len(deliveries(folder)) >= 2, "start")
        stopped = processes_of(server, "supernode", 1)
        assert stopped
        began = time.monotonic()
        for process in stopped:
            process.suspend()
        time.sleep(75 - (time.monotonic() - began))
        wait(lambda: any(line["lost"] for line in deliveries(folder)), "loss")
        silent = len(deliveries(folder))
        lost = [each for line in deliveries(folder) for each in line["lost"]]
        for process in stopped:
            process.resume()
        assert {each["node"] for each in lost} == {1}
        assert "error 5" in lost[0]["why"]
        wait(lambda: any(client % 2 for line in deliveries(folder)[silent:] for client in line["updates"]["client"]), "return")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 130, said_by(temporary)
        assert left_behind(temporary) == []
    finally:
        if server.poll() is None:
            for process in stopped:
                process.resume()
            server.terminate()
            server.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)
    assert_ends_as_simulated(folder, tmp_path / "near")


def killed_until(condition, server, node):
    """Returns a condition that kills a node whenever it has not held for half a minute: some kills meet no message."""
    last = -math.inf

    def holds(*known):
        nonlocal last
        if condition(*known):
            return True
        if time.monotonic() > last + 30:
            last = time.monotonic()
            for process in processes_of(server, "worker", node):
                process.kill()
        return False

    return holds


@NEEDS_FLOWER
@pytest.mark.slow
def test_a_node_that_is_started_again_agrees_on_new_masks(tmp_path):
    """The round in which it was killed counts for nobody. Until it is back, the other node is alone, and sends no sum."""
    temporary, folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp")), tmp_path / "far"
    server = started(
        temporary, "deploy", "--nodes", "2", "--model", "digits_logistic", "--rounds", "500", "--checkpoint-every", "1",
        "--aggregator", "secure_mean(max_weight=100)", "--no-progress", "--folder", str(folder),
    )  # fmt: skip
    until = time.monotonic() + 400

    def wait(condition, what):
        while not condition(answered := [line["answered"] for line in deliveries(folder)]):
            assert server.poll() is None, said_by(temporary)
            assert time.monotonic() < until, f"{what}, {answered}: {said_by(temporary)}"
            time.sleep(0.2)

    try:
        wait(lambda answered: len(answered) >= 2, "start")
        no_sum = "because the masks of the other nodes do not cancel without the sum of node 1"
        is_lost = killed_until(lambda answered: [] in answered and no_sum in said_by(temporary), server, 1)
        wait(is_lost, "the round that is lost")
        wait(lambda answered: [0, 1] in answered[answered.index([]) :], "return")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 130, said_by(temporary)
        assert left_behind(temporary) == []
        assert "because of the nodes that have its clients only node 0 is there" in said_by(temporary)
        assert all(line["answered"] in ([], [0, 1]) for line in deliveries(folder))
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)
    assert_ends_as_simulated(folder, tmp_path / "near")


@NEEDS_FLOWER
@pytest.mark.slow
def test_after_every_fault_the_run_ends_as_the_simulator_says(tmp_path):
    temporary, folder, near = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp")), tmp_path / "far", tmp_path / "near"
    model = "buffered(size=2, concurrency=4, staleness_weight='constant')"
    server = started(
        temporary, "deploy", "--nodes", "2", "--algorithm", "scaffold", "--synchronization", model, "--rounds", "500",
        "--checkpoint-every", "1", "--no-progress", "--folder", str(folder),
    )  # fmt: skip
    until = time.monotonic() + 900

    def wait(condition, what):
        while not condition():
            assert server.poll() is None, said_by(temporary)
            assert time.monotonic() < until, f"{what}: {said_by(temporary)}"
            time.sleep(0.2)

    def goes_on(node, what):
        """Waits for two more server steps, and for an update of a node that has started after now."""
        now, steps = deliveries(folder)[-1]["steps"]["time"], len(deliveries(folder))

        def has_come():
            new = [line["updates"] for line in deliveries(folder)[steps:]]
            begun = [start for of in new for client, start in zip(of["client"], of["start"], strict=True) if client % 2 == node]
            return len(new) >= 2 and max(begun, default=0) > now

        wait(has_come, what)

    try:
        wait(lambda: len(deliveries(folder)) >= 2, "start")
        lost = lambda: [each for line in deliveries(folder) for each in line["lost"]]  # noqa: E731

        wait(killed_until(lost, server, 1), "the loss of a killed node")
        assert {each["node"] for each in lost()} == {1}
        assert {each["why"] for each in lost()} <= {"its worker has ended with status -9", "it is not back yet"}
        goes_on(1, "a killed node that is started again")
        known = len(lost())

        for program, node, seconds in (("worker", 0, 5), ("supernode", 1, 30)):
            stopped = processes_of(server, program, node)
            assert stopped
            for process in stopped:
                process.suspend()
            time.sleep(seconds)
            for process in stopped:
                process.resume()
            goes_on(node, f"{program} that was stopped for {seconds} seconds")
        assert len(lost()) == known

        wait(lambda: len(checkpoint_rounds(folder / "checkpoints")) >= 2, "checkpoints")
        server.kill()
        server.wait()
        for process in psutil.process_iter():  # Nobody is left to end Flower's processes.
            try:
                if process.environ().get("TMPDIR") == str(temporary):
                    process.kill()
            except psutil.Error:
                continue
        before = len(deliveries(folder))
        server = started(temporary, "resume", str(folder), "--no-progress")
        wait(lambda: len(deliveries(folder)) >= before + 2, "a server that was started again")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 130, said_by(temporary)
        assert left_behind(temporary) == []
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)

    assert_ends_as_simulated(folder, near)
