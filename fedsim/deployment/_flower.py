"""`FlowerNodes`: nodes whose messages Flower's network carries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedsim.deployment import _relay
from fedsim.deployment._nodes import Blobs, NodeError, Nodes, Received
from fedsim.deployment._processes import FlowerProcesses

if TYPE_CHECKING:
    from fedsim.deployment._app import ExistingNetwork

_POLL_SECONDS = 0.1


class FlowerNodes(Nodes):
    """Nodes that exchange messages with this process over Flower's network, within the context.

    Args:
      processes: those of the network and of the nodes, which the context starts and ends.

    Raises:
      NodeError: a process has ended, or a node has not come in time.
    """

    def __init__(self, processes: FlowerProcesses | ExistingNetwork) -> None:
        self.count, self._processes = processes.count, processes
        self._introductions: dict[int, dict[str, Any]] = {}
        self._ids: dict[int, str] = {}  # Flower's, by the nodes' numbers
        self._sent: dict[str, int] = {}  # the nodes of the messages without a reply
        self._refused: list[Received] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FlowerNodes:
        with self._stack as stack:
            stack.enter_context(self._processes)
            self._meet()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def introductions(self) -> dict[int, dict[str, Any]]:
        return self._introductions

    def send(self, number: int, blobs: Blobs) -> str:
        message = self._of_relay({"do": "send", "node": self._ids[number]}, blobs)["message"]
        if message is None:
            message = f"refused {len(self._refused)} of node {number}"
            self._refused.append(Received(message, number, None, "Flower refused the message"))
        else:
            self._sent[message] = number
        return str(message)

    def receive(self) -> list[Received]:
        received, self._refused = self._refused, []
        for message, number in list(self._sent.items()):
            if reason := self._why_dead(number):
                received.append(Received(message, self._sent.pop(message), None, reason))
        count = self._of_relay({"do": "pull", "messages": list(self._sent)})["replies"] if self._sent else 0
        for _ in range(count):
            facts, blobs = self._frame()
            # A reply that was asked for twice comes a second time as an error.
            if (number := self._sent.pop(facts["message"], -1)) >= 0:
                received.append(Received(facts["message"], number, blobs.get("reply"), facts.get("error", "")))
        if not received:
            time.sleep(_POLL_SECONDS)
        return received

    def _meet(self) -> None:
        """Waits until all nodes have registered, and asks them for their numbers."""
        few = f"fewer than {self.count} nodes have registered at the SuperLink"
        self._processes.wait_until(lambda: len(self.registered()) >= self.count, few)
        ids = self._ids = dict(enumerate(self.registered()))
        met = super().introductions()
        self._ids = {facts["node"]: ids[at] for at, facts in met.items()}
        self._introductions = {facts["node"]: facts for facts in met.values()}

    def registered(self) -> list[str]:
        """Returns Flower's names of the nodes that it knows."""
        names: list[str] = self._of_relay({"do": "nodes"})["nodes"]
        return names

    def _why_dead(self, number: int) -> str:
        # Before a node has said its number, it is not known which processes are its own.
        return self._processes.why_dead(number) if self._introductions else ""

    def _of_relay(self, facts: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        try:
            _relay.send(self._processes.driver, facts, blobs or {})
        except OSError as error:
            raise NodeError(f"Flower's ServerApp has ended. {self._processes.logs()}") from error
        return self._frame()[0]

    def _frame(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        try:
            return _relay.receive(self._processes.driver)
        except (EOFError, OSError) as error:
            raise NodeError(f"Flower's ServerApp has ended. {self._processes.logs()}") from error
