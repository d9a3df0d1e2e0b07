"""`FlowerProcesses`: the processes of nodes on this machine: Flower's SuperLink and SuperNodes, and a worker of each node."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType

from fedsim.deployment import _relay
from fedsim.deployment._certificates import Certificates, check_certificate
from fedsim.deployment._nodes import NodeError
from fedsim.experiment.driving import Interruption

_POLL_SECONDS = 0.1
_SECONDS_TO_END = 3.0
_VERSION = "1.42"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal
# The description of an app, without its name.
PROJECT = """\
[project]
name = "{name}"
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


class FlowerProcesses:
    """Starts, watches and ends the processes of nodes on this machine. They end when the context ends, for any reason.

    Args:
      commands: for each node, the command that starts its worker; the path of its socket is added.
      port: of the SuperLink; None chooses a free one.
      wait: the most seconds until all nodes have come.
      secure: whether messages are encrypted, and nodes without a key are refused. Certificates and keys are those of this
        context.

    Attributes:
      count: the number of nodes.
      address: of the SuperLink, within the context.
      folder: of the network's files, within the context.
      driver: the connection to Flower's ServerApp, within the context.

    Raises:
      ImportError: Flower is not installed, or in another version.
      ValueError: the port is in use.
      NodeError: a process has ended, or a node has not come in time.

    >>> FlowerProcesses([["python", "worker.py"]] * 2).count
    2
    """

    address: str
    folder: Path
    driver: Connection

    def __init__(
        self, commands: Sequence[Sequence[str]], *, port: int | None = None, wait: float = 120.0, secure: bool = False
    ) -> None:
        check_flower()
        self.count, self._commands, self._port, self._wait = len(commands), commands, port, wait
        self._until, self._secure = 0.0, secure
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}  # with which command and environment
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FlowerProcesses:
        # The paths of Unix sockets are short, so that they are not in the run folder.
        self.folder = Path(tempfile.mkdtemp(prefix="fedsim-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._stack.callback(self._end)
        try:
            self._start()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        with Interruption():  # A second Ctrl-C would leave processes behind.
            self._stack.close()

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Waits until a condition holds.

        Raises:
          NodeError: a process has ended, or the time is over until which nodes must have come; the message then has the text
            ``otherwise``.
        """
        while not condition():
            for name, process in self._processes.items():
                if process.poll() not in (None, 0):
                    raise NodeError(f"The {name} has ended with status {process.returncode}: {self._end_of(name)}")
            if time.monotonic() > self._until:
                raise NodeError(f"After {self._wait:g} s {otherwise}: wait longer (--wait), or use fewer nodes. {self.logs()}")
            time.sleep(_POLL_SECONDS)

    def why_dead(self, number: int) -> str:
        """Returns why a node cannot answer any more, "" if its processes run."""
        for name in (f"SuperNode {number}", f"worker of node {number}"):
            process = self._processes[name]
            if process.poll() is not None:
                return f"its {name.split()[0]} has ended with status {process.returncode}"
        return ""

    def restart(self, number: int) -> None:
        """Starts the processes of a node again, those that run included."""
        names = [f"worker of node {number}", f"SuperNode {number}"]
        _end_groups([self._processes[name] for name in names])
        (self.folder / f"{number}").unlink(missing_ok=True)
        for name in names:
            self._run(name, *self._started[name])

    def is_ready(self, number: int) -> bool:
        """Returns whether the worker of a node accepts messages."""
        return (self.folder / f"{number}").exists()

    def logs(self) -> str:
        """Returns the last lines of the processes, because their files are deleted."""
        return "\n".join(["The last lines of the processes:", *(f"  {name}: {self._end_of(name)}" for name in self._processes)])

    def run_app(self, code: Path, *, seconds: float) -> None:
        """Runs another app on the same network, and waits until it has ended.

        Args:
          code: a file of Python with functions ``server_app`` and ``client_app`` that return Flower's apps. It is copied.
          seconds: the most that it may take.

        Raises:
          NodeError: it has not ended in time.
        """
        command = ["flwr", "run", str(self._written_app(code.stem, code)), "fedsim", "--stream"]
        try:
            subprocess.run(command, env=self.environment(), timeout=seconds, check=False, capture_output=True)
        except subprocess.TimeoutExpired as error:
            raise NodeError(f"After {seconds:g} s the app {code.name} has not ended. {self.logs()}") from error

    def _start(self) -> None:
        environment, superlink = self.environment(), _checked_port(self._port)
        address = self.address = f"127.0.0.1:{superlink}"
        self._until = time.monotonic() + self._wait
        sockets = [self.folder / f"{number}" for number in range(self.count)]
        for number, (command, path) in enumerate(zip(self._commands, sockets, strict=True)):
            self._run(
                f"worker of node {number}", [*command, str(path)], os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            )
        certificates = Certificates(self.folder / "certificates", self.count) if self._secure else None
        link, of_node, connection = _options(certificates)
        link += ["--host", "127.0.0.1", "--port", str(superlink), "--disable-runtime-dependency-installation"]
        self._run("SuperLink", ["flower-superlink", *link], environment)
        self.wait_until(lambda: _answers(superlink), "the SuperLink did not start")
        (self.folder / "config.toml").write_text(f'[superlink.fedsim]\naddress = "{address}"\n{connection}\n')
        if certificates is not None:
            check_certificate(certificates.authority, "127.0.0.1", superlink)
            self._register([certificates.public_node_key(number) for number in range(self.count)], environment)
        ports = [_free_port() for _ in sockets]
        for number, (path, port) in enumerate(zip(sockets, ports, strict=True)):
            own = [*of_node(number), "--superlink", address, "--port", str(port), "--node-config", f'{_relay.WORKER}="{path}"']
            self._run(f"SuperNode {number}", ["flower-supernode", *own], environment)
        app = self._written_app("app", Path(_relay.__file__))
        with Listener(str(self.folder / "driver"), "AF_UNIX") as listener:
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            self._run("flwr run", ["flwr", "run", str(app), "fedsim"], environment)
            self.driver = self._stack.enter_context(self._accepted(listener))
        for path, number in zip(sockets, range(self.count), strict=True):
            self.wait_until(path.exists, f"the worker of node {number} was not ready")

    def _register(self, keys: Sequence[Path], environment: Mapping[str, str]) -> None:
        """Makes the public keys of the nodes known to the SuperLink."""
        names = [f"registration of node {number}" for number in range(len(keys))]
        for name, key in zip(names, keys, strict=True):
            self._run(name, ["flwr", "supernode", "register", str(key), "fedsim"], environment)
        done = [self._processes[name] for name in names]
        self.wait_until(lambda: all(process.poll() == 0 for process in done), "the SuperLink did not register the nodes' keys")

    def environment(self) -> dict[str, str]:
        """Returns the variables of the environment with which Flower's processes start."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | {
            "PATH": path,
            "FLWR_HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            _relay.DRIVER: str(self.folder / "driver"),
        }

    def _written_app(self, name: str, code: Path) -> Path:
        app = self.folder / name
        package = app / "fedsim_app"
        package.mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT.format(name="fedsim-deployment"))
        (package / "__init__.py").write_text("")
        shutil.copy(code, package / "code.py")
        for side in ("server", "client"):
            (package / f"{side}.py").write_text(f"from fedsim_app.code import {side}_app\n\napp = {side}_app()\n")
        return app

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a process. Signals of the terminal do not reach it: this process ends it."""
        self._started[name] = command, environment
        with open(self._log(name), "wb") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def _accepted(self, listener: Listener) -> Connection:
        found: list[Connection] = []

        def accept() -> bool:
            with contextlib.suppress(TimeoutError, socket.timeout):
                found.append(listener.accept())
            return bool(found)

        self.wait_until(accept, "Flower did not start the app")
        return found[0]

    def _end_of(self, name: str) -> str:
        lines = _COLOURS.sub("", self._log(name).read_text(errors="replace")).strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def _end(self) -> None:
        _end_groups(list(self._processes.values()))


def _end_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes, and those that they have started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sent)
        until = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < until and any(_group_lives(process) for process in processes):
            time.sleep(0.05)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _options(certificates: Certificates | None) -> tuple[list[str], Callable[[int], list[str]], str]:
    """Returns how the SuperLink, the SuperNodes and ``flwr run`` connect: options of the first two, a line for the third."""
    if certificates is None:
        return ["--insecure"], lambda number: ["--insecure"], "insecure = true"
    authority, certificate, key = map(str, (certificates.authority, certificates.certificate, certificates.key))
    files = ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key]

    def of_node(number: int) -> list[str]:
        return ["--root-certificates", authority, "--auth-supernode-private-key", str(certificates.node_key(number))]

    return [*files, "--enable-supernode-auth"], of_node, f'root-certificates = "{authority}"'


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
