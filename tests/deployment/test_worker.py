"""The worker of a node as a process: what it answers with another number of devices, what it says of an error, when it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from deployment.test_deployment import largest_difference

import fedsim
from fedsim.configuration import build
from fedsim.deployment import Deployed, Nodes, Received, _relay
from fedsim.deployment._deploy import for_nodes
from fedsim.experiment import RunConfig, Settings

CONFIG = RunConfig(dataset="digits(clients=12)", model="digits_logistic", algorithm="scaffold", clients=6)


class Workers(Nodes):
    """Workers that are asked through their sockets, without a network."""

    def __init__(self, sockets):
        self.count, self.sockets, self.received = len(sockets), sockets, []

    def send(self, number, blobs):
        with Client(str(self.sockets[number]), "AF_UNIX") as connection:
            _relay.send(connection, {}, blobs)
            self.received.append(Received(f"{number}", number, _relay.receive(connection)[1]["reply"]))
        return f"{number}"

    def receive(self):
        received, self.received = self.received, []
        return received


@pytest.fixture
def start():
    """A function that starts a worker with a number of devices and options; returns its process and its socket."""
    folder, processes = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp")), []

    def started(number, devices, *options, **given):
        file = folder / f"{len(processes)}.json"
        about = for_nodes(CONFIG, Settings(folder="x"), 2, None) | {"folder": str(folder / "nodes")} | given
        file.write_text(json.dumps(about))
        path = folder / str(number)
        environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, "-m", "fedsim.deployment", str(file), str(number), str(path), *options]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return processes[-1], path

    yield started
    for process in processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    shutil.rmtree(folder)


def wait(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_nodes_may_have_different_numbers_of_devices(start, tmp_path):
    sockets = [start(0, devices=1)[1], start(1, devices=3)[1]]
    built = build(CONFIG, Settings(execution="jit"))
    algorithm, sampler = built.algorithm, built.sampler
    state = other = algorithm.init(fedsim.rng.root(0))
    wait(lambda: all(path.exists() for path in sockets))
    apart = build(CONFIG, Settings(), Deployed(nodes=Workers(sockets), folder=tmp_path)).algorithm
    apart.execution.check(sampler.cohort(0))
    for round in range(2):
        state, _ = algorithm.apply(state, sampler.cohort(round))
        other, _ = apart.apply(other, sampler.cohort(round))
    assert largest_difference(state.params, other.params) < 1e-6


@pytest.mark.slow
def test_a_worker_names_its_error_and_ends_when_it_is_idle(start, tmp_path):
    missing, _ = start(1, 1, "--data", str(tmp_path / "none.h5"), node_data="{node}.h5")
    idle, path = start(0, 1, "--idle", "2", "--watch", str(os.getpid()))
    assert missing.wait(timeout=120) == 2
    assert missing.communicate()[1].startswith("FileNotFoundError: Node 1 has no data, because there is no ")
    assert idle.wait(timeout=120) == 0
    assert not path.exists()
