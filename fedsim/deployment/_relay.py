"""The apps that Flower runs: they pass messages on, between fedsim's server, Flower's network and the workers of nodes.

Flower starts a process for each app and each message, so this file imports neither JAX nor fedsim. It is copied into the folder
of the app. Both ends of a Unix socket exchange frames: a JSON object, and as many byte strings as it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

# The variable of the environment that has the path of the socket of `fedsim deploy`.
DRIVER = "FEDSIM_DEPLOY_SOCKET"
# The names under which a node's configuration has the path of the socket of its worker, and its number.
WORKER, NUMBER = "worker", "partition-id"
# A worker without messages for so long ends; what it keeps is on the disk.
IDLE_SECONDS = 600
KIND = "train.fedsim"


def send(connection: Connection, facts: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Sends a frame."""
    connection.send_bytes(json.dumps({**facts, "blobs": list(blobs)}).encode())
    for blob in blobs.values():
        connection.send_bytes(blob)


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a frame. Raises ``EOFError`` if the other end is closed."""
    facts = json.loads(connection.recv_bytes())
    return facts, {name: connection.recv_bytes() for name in facts.pop("blobs")}


def _server(grid: Any, context: Any) -> None:
    pass_on(grid, Client(os.environ[DRIVER], "AF_UNIX"))


def pass_on(grid: Any, driver: Connection) -> None:
    """Sends the messages of fedsim to nodes and returns their replies, until the other end closes the connection."""
    with driver:
        while True:
            try:
                facts, blobs = receive(driver)
            except (EOFError, ConnectionError):
                return
            if facts["do"] == "nodes":
                send(driver, {"nodes": [str(node) for node in grid.get_node_ids()]}, {})
            elif facts["do"] == "send":
                from flwr.app import Message

                message = Message(_record(blobs), dst_node_id=int(facts["node"]), message_type=KIND)
                (number,) = grid.push_messages([message]) or [None]
                send(driver, {"message": number}, {})
            else:
                replies = list(grid.pull_messages(facts["messages"]))
                send(driver, {"replies": len(replies)}, {})
                for reply in replies:
                    of = {"message": reply.metadata.reply_to_message_id}
                    if reply.has_error():
                        send(driver, {**of, "error": f"{reply.error.reason} (Flower's error {reply.error.code})"}, {})
                        continue
                    blobs = _blobs(reply.content)
                    if "error" in blobs:
                        send(driver, {**of, "error": blobs["error"].decode()}, {})
                    else:
                        send(driver, of, blobs)


def _answer(message: Any, worker: str) -> Any:
    """Gives a message to the worker of this node, and returns its reply."""
    from flwr.app import Message

    with Client(worker, "AF_UNIX") as connection:
        send(connection, {}, _blobs(message.content))
        _, blobs = receive(connection)
    return Message(_record(blobs), reply_to=message)


def _started_worker(file: Path, context: Any) -> str:
    """Returns the path of the socket of this run's worker at this node, which the first message starts.

    The worker ends with the process that starts apps at this node, or when no message has come for some time.

    Raises:
      RuntimeError: the worker has ended; the message is the last line that it wrote.
    """
    given = context.node_config
    if NUMBER not in given:
        raise RuntimeError(
            f"Expected {NUMBER} in the node's configuration, got none: flower-supernode --node-config '{NUMBER}=0'"
        )
    number, run = str(given[NUMBER]), f"{context.run_id}-{context.node_id}"
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    folder = Path(tempfile.gettempdir()) / f"fedsim-{os.getuid()}-{run}"  # The paths of Unix sockets are short.
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"Expected a folder of this user, got {folder}: delete it")
    path = folder / "socket"
    with contextlib.suppress(OSError), Client(str(path), "AF_UNIX"):
        return str(path)
    path.unlink(missing_ok=True)
    own = str(given.get("folder") or home / "fedsim" / number)
    command = [sys.executable, "-m", "fedsim.deployment", str(file), number, str(path), "--folder", own]
    command += ["--watch", str(os.getppid()), "--idle", str(given.get("idle", IDLE_SECONDS))]
    command += ["--data", str(given["data"])] if "data" in given else []
    with open(folder / "log", "wb") as log:
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while not path.exists():
        if worker.poll() is not None:
            lines = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"its worker has ended with status {worker.returncode}")
        time.sleep(0.1)
    return str(path)


def _record(blobs: Mapping[str, bytes]) -> Any:
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({"fedsim": ArrayRecord({name: Array(np.frombuffer(blob, np.uint8)) for name, blob in blobs.items()})})


def _blobs(content: Any) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in content.array_records["fedsim"].items()}


def server_app() -> Any:
    """Returns Flower's ``ServerApp``."""
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(_server)
    return app


def client_app(file: Path | None = None) -> Any:
    """Returns Flower's ``ClientApp``. With a file, the configuration of a run, it starts the node's worker itself."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    def answer(message: Any, context: Any) -> Any:
        try:
            worker = str(context.node_config[WORKER]) if file is None else _started_worker(file, context)
        except RuntimeError as error:
            return Message(_record({"error": str(error).encode()}), reply_to=message)
        return _answer(message, worker)

    app = ClientApp()
    app.train("fedsim")(answer)
    return app
