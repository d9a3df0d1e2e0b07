"""The app for a federation that exists: what is written, and a run of it on a SuperLink and two SuperNodes of Flower."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from deployment.test_flower import deliveries
from deployment.test_own_data import halves

import fedsim
from fedsim.commands import main
from fedsim.configuration import build
from fedsim.deployment import deployment_of, write_app
from fedsim.deployment._processes import _answers, _free_port
from fedsim.experiment import RunConfig, Settings, run_experiment
from fedsim.saved_arrays import checkpoint_folder, checkpoint_rounds, read_arrays


def test_the_app_names_its_parts_and_has_no_path_of_this_machine(tmp_path):
    app = tmp_path / "app"
    write_app(app, RunConfig(data=None, rounds=3), Settings(folder="runs/a"), nodes=3, node_data="clients-{node}.h5", wait=900)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == {"folder": "runs/a", "wait": 900.0}
    for component in project["tool"]["flwr"]["app"]["components"].values():
        module, name = component.split(":")
        assert f"{name} = " in (app / f"{module.replace('.', '/')}.py").read_text()
    given = json.loads((app / "fedsim_app" / "run.json").read_text())
    assert (given["nodes"], given["node_data"], given["config"]["rounds"]) == (3, "clients-{node}.h5", 3)
    assert not any(str(place) in path.read_text() for path in app.rglob("*.*") for place in (tmp_path, Path.home()))
    assert "from 0 to 2" in (app / "README.md").read_text()


def test_the_readme_names_the_files_that_the_server_needs(tmp_path):
    parameters = tmp_path / "first.npz"
    np.savez(parameters, a=np.zeros(1))
    config = RunConfig(data=str(tmp_path), init_from=str(parameters))
    for app, own, named in ((tmp_path / "a", config, True), (tmp_path / "b", RunConfig(), False)):
        write_app(app, own, Settings(folder="run"), node_data="{node}.h5")
        text = (app / "README.md").read_text()
        assert (f"where this app was written: `{tmp_path}` (--data), `{parameters}` (--init-from).\n" in text) == named
        assert ("under the same paths" in text) == named and "sha256" not in text


def test_what_other_machines_do_not_have_is_refused(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from fedsim.algorithms import FedAvg as Own\n")
    config = RunConfig(algorithm=f"{own}:Own")
    with pytest.raises(ValueError, match=r"got algorithm='.*own\.py:Own', a file on this machine: install it as a package"):
        write_app(tmp_path / "app", config, Settings(folder="a"))
    with pytest.raises(FileExistsError, match="Expected an empty folder for the app"):
        write_app(tmp_path, RunConfig(), Settings(folder="a"))
    with pytest.raises(ValueError, match="Expected labels=None with data of the nodes' own, got labels=0.5"):
        write_app(tmp_path / "app", RunConfig(labels=0.5), Settings(folder="a"), node_data="x.h5")


def test_the_command_writes_the_app_and_starts_nothing(tmp_path, capsys):
    app = tmp_path / "app"
    assert main(["deploy", "--app", str(app), "--nodes", "3", "--rounds", "7", "--folder", "/srv/run"]) == 0
    assert capsys.readouterr().out == f"{app}/README.md says how to run the app.\n"
    given = json.loads((app / "fedsim_app" / "run.json").read_text())
    assert (given["nodes"], given["config"]["rounds"], given["settings"]["folder"]) == (3, 7, "/srv/run")


@pytest.mark.slow
def test_resume_refuses_the_run_of_an_app_and_names_flwr_run(tmp_path, capsys):
    config, settings = RunConfig(model="digits_logistic", rounds=1), Settings(folder=str(tmp_path), execution="jit")
    run_experiment(build(config, settings), config, settings, progress=False)
    (tmp_path / "deployment.json").write_text('{"nodes": 2, "app": true}')
    assert deployment_of(tmp_path) == {"nodes": 2, "secure": False, "node_data": None, "app": True, "run": ""}
    assert main(["resume", str(tmp_path), "--rounds", "2"]) == 2
    assert "was deployed by an app: continue it with `flwr run`" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")
@pytest.mark.slow
def test_the_app_trains_on_a_federation_that_exists(tmp_path):
    """Two nodes with clients of their own. `flwr stop` ends the run early, and the second `flwr run` goes on.

    The result is that of a simulation of all clients, without a break, and its model is exported.
    """
    home = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))
    for number, own in enumerate(halves()):
        own.save(home / f"{number}.h5")
    app, folder, rounds = home / "app", home / "run", 30
    config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", algorithm="scaffold", rounds=rounds, clients=6)
    write_app(app, config, Settings(folder="given by flwr run", execution="jit", checkpoint_every=1), node_data="{node}.h5")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(home), "TMPDIR": str(home),
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    }  # fmt: skip
    port, processes = _free_port(), []

    def start(name, *command):
        with open(home / f"{name}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    try:
        start("link", "flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        until = time.monotonic() + 60
        while not _answers(port) and time.monotonic() < until:
            time.sleep(0.2)
        for number in range(2):
            place = f'partition-id={number} data="{home}/{number}.h5" idle=5'
            known = ["--superlink", f"127.0.0.1:{port}", "--port", str(_free_port()), "--node-config", place]
            start(f"node-{number}", "flower-supernode", "--insecure", *known)
        command = ["flwr", "run", str(app), "here", "--stream", "-c", f'folder="{folder}"']
        start("first", *command)
        until = time.monotonic() + 300
        while not checkpoint_rounds(folder / "checkpoints"):
            assert time.monotonic() < until, "\n".join(path.read_text()[-3000:] for path in home.glob("*.log"))
            time.sleep(0.2)
        (run,) = re.findall(r"Successfully started run (\d+)", (home / "first.log").read_text())
        subprocess.run(["flwr", "stop", run, "here"], env=environment, timeout=60, check=True)
        stopped = deliveries(folder)
        assert len(stopped) < rounds
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert f"after round {rounds} of {rounds}" in said.stdout + said.stderr
        assert [line["round"] for line in deliveries(folder)] == [*range(1, rounds + 1)]
        assert deliveries(folder)[0] == stopped[0]  # with its seconds, so that it did not run again
        exported = home / "model.npz"
        subprocess.run([sys.executable, "-m", "fedsim", "export", str(folder), str(exported)], check=True)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    near, settings = tmp_path / "near", Settings(folder=str(tmp_path / "near"), execution="jit")
    run_experiment(build(config, settings), config, settings, progress=False)
    expected, got = (read_arrays(checkpoint_folder(run / "checkpoints", rounds)) for run in (near, folder))
    names = [name for name in expected if "params" in name]
    assert names
    for name in names:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-6)
    model = fedsim.read_params(exported)
    assert sum(array.size for array in model.values()) == sum(expected[name].size for name in names)
    until = time.monotonic() + 30
    while workers(home) and time.monotonic() < until:
        time.sleep(0.5)
    assert workers(home) == []
    shutil.rmtree(home, ignore_errors=True)


def workers(home):
    """Returns the sockets of workers in this folder that answer."""
    found = []
    for path in home.glob("fedsim-*/socket"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            found.append(path)
    return found


def test_an_app_refuses_what_does_not_belong_to_it(tmp_path, capsys):
    for option, given in (["--port", "9999"], "port=9999"), (["--secure"], "secure=True"):
        assert main(["deploy", "--app", str(tmp_path / "app"), "--folder", "/srv/run", *option]) == 2
        assert f"Expected no {option[0]} with --app, got {given}" in capsys.readouterr().err
    file = tmp_path / "people.csv"
    file.write_text("user,age,y\n" + "".join(f"u{i % 3},{i},{i % 2}\n" for i in range(30)))
    config = RunConfig(dataset=f"{file}(client='user')", rounds=2)
    with pytest.raises(ValueError, match="Expected a dataset that all nodes can describe, got dataset=.*people.csv"):
        write_app(tmp_path / "other", config, Settings(folder="run"), node_data="of-{node}.h5")
