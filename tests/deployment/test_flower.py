"""Two nodes over Flower's network on this machine: the result, a killed node, a stranger, Ctrl-C, and what is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedsim.deployment import NodeError
from fedsim.deployment._processes import FlowerProcesses, _free_port
from fedsim.experiment import RunConfig, Settings, build, read_config, run_experiment
from fedsim.experiment.driving import Checkpoints, RunFolder
from fedsim.saved_arrays import checkpoint_folder, read_arrays

NEEDS_FLOWER = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


@pytest.fixture
def short_folder():
    """A folder for the files of the network: the paths of Unix sockets are short."""
    folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started(short_folder):
    """A function that starts a command of fedsim. If the test fails, it is ended."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", "fedsim", *arguments]
        with open(short_folder / "stderr", "w") as said:
            processes.append(subprocess.Popen(command, env=os.environ | {"TMPDIR": str(short_folder)}, stderr=said))
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
        process.wait(timeout=60)


def said_by(temporary):
    return (temporary / "stderr").read_text()


def left_behind(temporary):
    """Returns the processes that have been started with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(temporary) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def deliveries(folder):
    path = folder / "deliveries.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_params(folder, near, round, atol):
    """Compares the parameters of a deployed run with those of a simulated one."""
    expected, got = (read_arrays(checkpoint_folder(run / "checkpoints", round)) for run in (near, folder))
    names = [name for name in expected if "params" in name]
    assert names
    for name in names:
        np.testing.assert_allclose(got[name], expected[name], atol=atol, rtol=0)


def assert_refused(address, authority, environment, log, key=None):
    """Starts a SuperNode, whose private key is in the file ``key`` or that has none, and waits until it is refused."""
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"  # It starts flower-superexec.
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": path, **environment}
    command = [
        f"{programs}/flower-supernode",
        "--superlink",
        address,
        "--port",
        str(_free_port()),
        "--root-certificates",
        str(authority),
    ]
    command += [] if key is None else ["--auth-supernode-private-key", str(key)]
    with open(log, "w") as said:
        stranger = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        assert stranger.wait(timeout=120) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # What it has started may live on.
            os.killpg(stranger.pid, signal.SIGKILL)
        stranger.wait()
    assert "Failed to initialize the connection to the SuperLink" in log.read_text()


@NEEDS_FLOWER
@pytest.mark.slow
def test_two_nodes_end_as_a_simulation_does(tmp_path, short_folder, started):
    """The deployment that every `.ci/run` does: synchronous rounds of FedAvg."""
    folder = tmp_path / "far"
    process = started("deploy", "--nodes", "2", "--rounds", "2", "--no-progress", "--folder", str(folder))
    while not (folder / "nodes" / "node.json").exists():
        assert process.poll() is None, said_by(short_folder)
        time.sleep(0.1)
    given = json.loads((folder / "nodes" / "node.json").read_text())["config"]
    config, settings = RunConfig.from_json(given), Settings(folder=str(tmp_path / "near"), execution="jit")
    run_experiment(build(config, settings), config, settings, progress=False)
    assert process.wait(timeout=300) == 0, said_by(short_folder)
    assert [line["answered"] for line in deliveries(folder)] == [[0, 1], [0, 1]]
    assert left_behind(short_folder) == []
    assert_same_params(folder, tmp_path / "near", round=2, atol=1e-7)


@NEEDS_FLOWER
@pytest.mark.slow
def test_two_nodes_train_and_one_is_killed(tmp_path, short_folder, started):
    folder, near = tmp_path / "far", tmp_path / "near"
    options = ["--nodes", "2", "--algorithm", "scaffold", "--rounds", "2", "--no-progress", "--folder"]
    process = started("deploy", *options, str(folder))
    assert process.wait(timeout=300) == 0, said_by(short_folder)
    assert [line["answered"] for line in deliveries(folder)] == [[0, 1], [0, 1]]
    assert left_behind(short_folder) == []

    config, settings = RunConfig.from_json(read_config(folder)["config"]), Settings(folder=str(near), execution="jit")
    run_experiment(build(config, settings), config, settings, progress=False)
    assert_same_params(folder, near, round=2, atol=1e-6)

    process = started("resume", str(folder), "--rounds", "50", "--no-progress")
    until = time.monotonic() + 300
    while len(deliveries(folder)) < 3:
        assert process.poll() is None, said_by(short_folder)
        assert time.monotonic() < until
        time.sleep(0.2)
    (worker,) = [
        child for child in psutil.Process(process.pid).children() if child.cmdline()[1:3] == ["-m", "fedsim.deployment"]
        and child.cmdline()[4] == "1"
    ]  # fmt: skip
    worker.kill()
    while not deliveries(folder)[-1]["lost"]:
        assert process.poll() is None, said_by(short_folder)
        assert time.monotonic() < until
        time.sleep(0.2)
    assert deliveries(folder)[-1]["lost"] == {"1": "its worker has ended with status -9"}
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    said = said_by(short_folder)
    assert "Node 1 did not answer in round" in said
    assert "To continue: fedsim resume" in said
    assert left_behind(short_folder) == []


@NEEDS_FLOWER
@pytest.mark.slow
def test_encrypted_nodes_train_and_one_without_a_key_does_not_come(tmp_path, short_folder, started):
    """The stranger knows the address and the authority of a `--secure` run. The result is that of the run's nodes alone."""
    folder, near = tmp_path / "far", tmp_path / "near"
    options = ["--secure", "--nodes", "2", "--model", "digits_logistic", "--rounds", "4", "--no-progress"]
    process = started("deploy", *options, "--folder", str(folder))
    until = time.monotonic() + 300
    while not deliveries(folder):
        assert process.poll() is None, said_by(short_folder)
        assert time.monotonic() < until
        time.sleep(0.1)
    (network,) = short_folder.glob("fedsim-*/config.toml")
    link = tomllib.loads(network.read_text())["superlink"]["fedsim"]
    assert not link.get("insecure", False)
    assert_refused(link["address"], link["root-certificates"], {"FLWR_HOME": str(tmp_path)}, tmp_path / "stranger.log")
    assert process.poll() is None, "the run has ended before the stranger came"
    assert process.wait(timeout=300) == 0, said_by(short_folder)
    assert [line["answered"] for line in deliveries(folder)] == [[0, 1]] * 4
    assert left_behind(short_folder) == []
    assert not any(path.suffix in (".key", ".pem") for place in (folder, short_folder) for path in place.rglob("*"))
    config, settings = RunConfig.from_json(read_config(folder)["config"]), Settings(folder=str(near), execution="jit")
    run_experiment(build(config, settings), config, settings, progress=False)
    assert_same_params(folder, near, round=4, atol=1e-6)


def test_without_flower_the_error_names_the_extra(monkeypatch, tmp_path):
    import importlib.metadata

    from fedsim.deployment import deploy

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"flwr is not installed: pip install 'fedsim-jax\[run,flower\]'"):
        deploy(RunConfig(), Settings(folder=str(tmp_path / "a")))
    assert not (tmp_path / "a").exists()


def test_a_port_in_use_is_named():
    import socket

    from fedsim.deployment._processes import _checked_port

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ValueError, match=f"Expected a free port, got port={port} "):
            _checked_port(port)


def test_a_run_that_was_not_deployed_is_not_continued_on_nodes(tmp_path, monkeypatch):
    from fedsim.deployment import _deploy

    monkeypatch.setattr(_deploy, "check_flower", lambda: None)
    config, settings = RunConfig(), Settings(folder=str(tmp_path))
    (tmp_path / "deployment.json").write_text('{"nodes": 3}')
    with pytest.raises(ValueError, match="Expected nodes=3, as the run in .* has, got nodes=2: the clients belong to these"):
        _deploy.deploy(config, settings)
    (tmp_path / "deployment.json").unlink()
    Checkpoints(tmp_path / "checkpoints").save(1, {"w": np.ones(1)})
    with pytest.raises(ValueError, match="was not deployed, so its nodes have nothing to go on with: choose another folder"):
        _deploy.deploy(config, settings)


def test_a_folder_in_use_keeps_the_files_of_its_nodes(tmp_path, monkeypatch):
    from fedsim.deployment import _deploy

    monkeypatch.setattr(_deploy, "check_flower", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    with RunFolder(tmp_path).lock(), pytest.raises(ValueError, match="is in use by another run"):
        _deploy.deploy(RunConfig(), Settings(folder=str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", ".lock"}


def test_a_deployment_whose_nodes_do_not_come_leaves_no_folder(tmp_path, monkeypatch):
    from fedsim.deployment import _deploy

    class Network:
        count = 2

        def __init__(self, processes):
            assert (tmp_path / "runs" / "a" / "nodes" / "node.json").exists()

        def __enter__(self):
            raise NodeError("After 3 s the worker of node 0 was not ready")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(_deploy, "check_flower", lambda: None)
    monkeypatch.setattr(_deploy, "FlowerProcesses", lambda *_, **__: None)
    monkeypatch.setattr(_deploy, "FlowerNodes", Network)
    config = RunConfig(model="digits_logistic", rounds=1)
    with pytest.raises(NodeError, match="was not ready"):
        _deploy.deploy(config, Settings(folder=str(tmp_path / "runs" / "a"), progress=False))
    assert list((tmp_path / "runs").iterdir()) == []


@NEEDS_FLOWER
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "wait", "message"),
    [
        (
            "raise SystemExit('ValueError: no data in DIR')",
            120.0,
            "worker of node 0 has ended with status 1: ValueError: no",
        ),
        ("import time; time.sleep(600)", 3.0, r"After 3 s .*: wait longer \(--wait\), or use fewer nodes"),
    ],
)
def test_a_node_that_does_not_come_is_named(code, wait, message):
    processes = FlowerProcesses([[sys.executable, "-c", code]], wait=wait)
    with pytest.raises(NodeError, match=message), processes:
        pass
    assert not processes.folder.exists()
    assert all(process.poll() is not None for process in processes._processes.values())
