"""`FlowerNodes`: nodes on this machine that talk over Flower's network: a SuperLink, SuperNodes, and a worker of each node."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from fedsim.deployment import _relay
from fedsim.deployment._nodes import Blobs, NodeError, Nodes, Replies
from fedsim.experiment.driving import Interruption

_POLL_SECONDS = 0.1
_SECONDS_TO_END = 3.0
_VERSION = "1.42"
_APP = """\
[project]
name = "fedsim-deployment"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "fedsim"

[tool.flwr.app.components]
serverapp = "fedsim_app.server:app"
clientapp = "fedsim_app.client:app"
"""


def check_flower() -> None:
    """Raises ``ImportError`` unless the version of Flower is installed that fedsim runs on."""
    remedy = "pip install 'fedsim-jax[run,flower]'"
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"`fedsim deploy` runs on Flower's network, and flwr is not installed: {remedy}.") from None
    if not version.startswith(f"{_VERSION}."):
        raise ImportError(f"`fedsim deploy` needs flwr {_VERSION}, got {version}: {remedy}.")


class FlowerNodes(Nodes):
    """Nodes on this machine, as processes of their own. They end when the context ends, for any reason.

    Args:
      commands: for each node, the command that starts its worker; the path of its socket is added.
      port: of the SuperLink; None chooses a free one.
      wait: the most seconds until all nodes have come.

    Raises:
      ImportError: Flower is not installed, or in another version.
      ValueError: the port is in use.
      NodeError: a process has ended, or a node has not come in time.
    """

    def __init__(self, commands: Sequence[Sequence[str]], *, port: int | None = None, wait: float = 120.0) -> None:
        check_flower()
        self.count, self._commands, self._port, self._wait = len(commands), commands, port, wait
        self._introductions: dict[int, dict[str, Any]] = {}
        self._ids: dict[int, str] = {}  # Flower's, by the nodes' numbers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._driver: Connection | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FlowerNodes:
        # The paths of Unix sockets are short, so that they are not in the run folder.
        self._folder = Path(tempfile.mkdtemp(prefix="fedsim-"))
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._stack.callback(self._end_processes)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with Interruption():  # A second Ctrl-C would leave processes behind.
            if self._driver is not None:
                self._driver.close()
            self._stack.close()

    def introductions(self) -> dict[int, dict[str, Any]]:
        return self._introductions

    def ask(self, requests: Mapping[int, Blobs]) -> Replies:
        asked, replies, lost = {}, {}, {}
        for number, blobs in requests.items():
            if reason := self._why_dead(number):
                lost[number] = reason
                continue
            message = self._of_relay({"do": "send", "node": self._ids[number]}, blobs)["message"]
            if message is None:
                lost[number] = "Flower refused the message"
            else:
                asked[message] = number
        while asked:
            for message, number in list(asked.items()):
                if reason := self._why_dead(number):
                    lost[asked.pop(message)] = reason
            count = self._of_relay({"do": "pull", "messages": list(asked)})["replies"] if asked else 0
            for _ in range(count):
                facts, blobs = self._frame()
                if facts["message"] not in asked:
                    continue
                number = asked.pop(facts["message"])
                if "error" in facts:
                    lost[number] = facts["error"]
                else:
                    replies[number] = blobs["reply"]
            time.sleep(_POLL_SECONDS)
        return Replies(replies, lost)

    def _start(self) -> None:
        environment, superlink = self._environment(), _checked_port(self._port)
        address = f"127.0.0.1:{superlink}"
        until = time.monotonic() + self._wait
        sockets = [self._folder / f"{number}" for number in range(self.count)]
        for number, (command, path) in enumerate(zip(self._commands, sockets, strict=True)):
            self._run(
                f"worker of node {number}", [*command, str(path)], os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            )
        link = ["--insecure", "--host", "127.0.0.1", "--port", str(superlink), "--disable-runtime-dependency-installation"]
        self._run("SuperLink", ["flower-superlink", *link], environment)
        self._until(lambda: _answers(superlink), until, "the SuperLink did not start")
        ports = [_free_port() for _ in sockets]
        for number, (path, port) in enumerate(zip(sockets, ports, strict=True)):
            own = ["--insecure", "--superlink", address, "--port", str(port), "--node-config", f'{_relay.WORKER}="{path}"']
            self._run(f"SuperNode {number}", ["flower-supernode", *own], environment)
        app = self._written_app()
        (self._folder / "config.toml").write_text(f'[superlink.fedsim]\naddress = "{address}"\ninsecure = true\n')
        with Listener(str(self._folder / "driver"), "AF_UNIX") as listener:
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            self._run("flwr run", ["flwr", "run", str(app), "fedsim"], environment)
            self._driver = self._accepted(listener, until)
        self._until(
            lambda: len(self._of_relay({"do": "nodes"})["nodes"]) >= self.count,
            until,
            f"fewer than {self.count} nodes have registered at the SuperLink",
        )
        for path, number in zip(sockets, range(self.count), strict=True):
            self._until(path.exists, until, f"the worker of node {number} was not ready")
        self._meet(self._of_relay({"do": "nodes"})["nodes"])

    def _meet(self, ids: Sequence[str]) -> None:
        """Asks the nodes for their numbers."""
        self._ids = dict(enumerate(ids))
        met = super().introductions()
        self._ids = {facts["node"]: self._ids[at] for at, facts in met.items()}
        self._introductions = {facts["node"]: facts for facts in met.values()}

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | {
            "PATH": path,
            "FLWR_HOME": str(self._folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            _relay.DRIVER: str(self._folder / "driver"),
        }

    def _written_app(self) -> Path:
        app = self._folder / "app"
        package = app / "fedsim_app"
        package.mkdir(parents=True)
        (app / "pyproject.toml").write_text(_APP)
        (package / "__init__.py").write_text("")
        shutil.copy(_relay.__file__, package / "relay.py")
        for side in ("server", "client"):
            (package / f"{side}.py").write_text(f"from fedsim_app.relay import {side}_app\n\napp = {side}_app()\n")
        return app

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a process. Signals of the terminal do not reach it: this process ends it."""
        with open(self._log(name), "wb") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.log"

    def _accepted(self, listener: Listener, until: float) -> Connection:
        found: list[Connection] = []

        def accept() -> bool:
            with contextlib.suppress(TimeoutError, socket.timeout):
                found.append(listener.accept())
            return bool(found)

        self._until(accept, until, "Flower did not start the app")
        return found[0]

    def _until(self, condition: Any, until: float, otherwise: str) -> None:
        while not condition():
            for name, process in self._processes.items():
                if process.poll() not in (None, 0):
                    raise NodeError(f"The {name} has ended with status {process.returncode}: {self._end_of(name)}")
            if time.monotonic() > until:
                raise NodeError(f"After {self._wait:g} s {otherwise}: wait longer (--wait), or use fewer nodes. {self._logs()}")
            time.sleep(_POLL_SECONDS)

    def _why_dead(self, number: int) -> str:
        for name in (f"SuperNode {number}", f"worker of node {number}"):
            process = self._processes.get(name)
            if self._ids and process is not None and process.poll() is not None:
                return f"its {name.split()[0]} has ended with status {process.returncode}"
        return ""

    def _of_relay(self, facts: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        assert self._driver is not None
        try:
            _relay.send(self._driver, facts, blobs or {})
        except OSError as error:
            raise NodeError(f"Flower's ServerApp has ended. {self._logs()}") from error
        return self._frame()[0]

    def _frame(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        assert self._driver is not None
        try:
            return _relay.receive(self._driver)
        except (EOFError, OSError) as error:
            raise NodeError(f"Flower's ServerApp has ended. {self._logs()}") from error

    def _end_of(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def _logs(self) -> str:
        """Returns the last lines of the processes, because their files are deleted."""
        return "\n".join(["The last lines of the processes:", *(f"  {name}: {self._end_of(name)}" for name in self._processes)])

    def _end_processes(self) -> None:
        """Ends all processes, and those that they have started."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, sent)
            until = time.monotonic() + _SECONDS_TO_END
            while time.monotonic() < until and any(_group_lives(process) for process in self._processes.values()):
                time.sleep(0.05)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _checked_port(port: int | None) -> int:
    if port is None:
        return _free_port()
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"Expected a free port, got port={port} ({error.strerror}): give another one, or leave it out."
            ) from error
    return port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
