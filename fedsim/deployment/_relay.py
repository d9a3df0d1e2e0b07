"""The apps that Flower runs: they pass messages on, between `fedsim deploy`, Flower's network and the workers of nodes.

Flower starts a process for each app and each message, so this file imports neither JAX nor fedsim. `fedsim deploy` copies it
into the folder of the app. Both ends of a Unix socket exchange frames: a JSON object, and as many byte strings as it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

# The variable of the environment that has the path of the socket of `fedsim deploy`.
DRIVER = "FEDSIM_DEPLOY_SOCKET"
# The name under which a node's configuration has the path of the socket of its worker.
WORKER = "worker"
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
    """Sends the messages of `fedsim deploy` to nodes and returns their replies, until the other end closes the socket."""
    from flwr.app import Message

    with Client(os.environ[DRIVER], "AF_UNIX") as driver:
        while True:
            try:
                facts, blobs = receive(driver)
            except (EOFError, ConnectionError):
                return
            if facts["do"] == "nodes":
                send(driver, {"nodes": [str(node) for node in grid.get_node_ids()]}, {})
            elif facts["do"] == "send":
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
                    else:
                        send(driver, of, _blobs(reply.content))


def _client(message: Any, context: Any) -> Any:
    """Gives a message to the worker of this node, and returns its reply."""
    from flwr.app import Message

    with Client(str(context.node_config[WORKER]), "AF_UNIX") as worker:
        send(worker, {}, _blobs(message.content))
        _, blobs = receive(worker)
    return Message(_record(blobs), reply_to=message)


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


def client_app() -> Any:
    """Returns Flower's ``ClientApp``."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train("fedsim")(_client)
    return app
