"""`FlowerNodes`: nodes whose messages Flower's network carries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Set
from typing import Any

from fedsim.deployment import _relay
from fedsim.deployment._encoding import decode
from fedsim.deployment._nodes import WHO, Blobs, NodeError, Nodes, Received

_POLL_SECONDS = 0.1
_MORE_SECONDS = 3.0  # for the numbers of nodes beyond those that a run needs


class FlowerNodes(Nodes):
    """Nodes that exchange messages with this process over Flower's network, within the context.

    A node whose process has ended is started again, unless it has not answered since its last start. Until it has said again
    who it is, it is away, and so is a node that Flower reports as unavailable.

    Args:
      processes: those of the network and of the nodes, which the context starts and ends: `FlowerProcesses`, or an object with
        the same methods for nodes that others start.

    Raises:
      NodeError: a process has ended, or a node has not come in time; later, no node is left, or one comes back with other data.
    """

    def __init__(self, processes: Any) -> None:
        self.count, self._processes = processes.count, processes
        self._introductions: dict[int, dict[str, Any]] = {}
        self._ids: dict[int, str] = {}  # Flower's, by the nodes' numbers
        self._sent: dict[str, int] = {}  # the nodes of the messages without a reply
        self._refused: list[Received] = []
        self._answered: set[int] = set()  # since their last start
        self._away: set[int] = set()
        self._ended: dict[int, str] = {}  # nodes that do not come back, and why
        self._asked: dict[str, str] = {}  # the messages that ask who a node is, and Flower's name of the node
        self._known: set[str] = set()  # of the nodes that were asked, or have ended
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

    def is_there(self, number: int) -> bool:
        return number not in self._away and number not in self._ended

    def send(self, number: int, blobs: Blobs) -> str:
        message = None
        if self.is_there(number):
            message = self._of_relay({"do": "send", "node": self._ids[number]}, blobs)["message"]
        if message is None:
            message = f"refused {len(self._refused)} of node {number}"
            why = "Flower refused the message" if self.is_there(number) else self._ended.get(number, "it is not back yet")
            self._refused.append(Received(message, number, None, why))
        else:
            self._sent[message] = number
        return str(message)

    def receive(self) -> list[Received]:
        for number in range(self.count):
            if number not in self._ended and (reason := self._why_dead(number)):
                self._start_again(number, reason)
        self._look_for_nodes()
        for reply in self._replies([*self._sent, *self._asked]):
            self._take(*reply)
        received, self._refused = self._refused, []
        if not received:
            time.sleep(_POLL_SECONDS)
        return received

    def _take(self, facts: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        """Takes a reply. One that was asked for twice comes a second time as an error, which has no meaning."""
        message, error = facts["message"], facts.get("error", "")
        if (number := self._sent.pop(message, None)) is not None:
            self._refused.append(Received(message, number, blobs.get("reply"), error))
            if error:
                self._leave(number)
            else:
                self._answered.add(number)
        elif (name := self._asked.pop(message, None)) is not None and error:
            self._known.discard(name)
        elif name is not None:
            facts = decode(blobs["reply"])[1]
            known = self._introductions[facts["node"]]
            if facts | {"key": None} != known | {"key": None}:  # A process that was started again has another key.
                raise NodeError(
                    f"Node {facts['node']} came back with other versions or other data: use those that it had at the beginning."
                )
            self._ids[facts["node"]], self._introductions[facts["node"]] = name, facts
            self._away.discard(facts["node"])

    def _start_again(self, number: int, reason: str) -> None:
        """Reports the messages of a node whose process has ended as lost, and starts it again."""
        for message in [message for message, of in self._sent.items() if of == number]:
            self._refused.append(Received(message, self._sent.pop(message), None, reason))
        if number in self._answered:
            self._answered.discard(number)
            self._leave(number)
            self._processes.restart(number)
            return
        self._ended[number] = reason
        if len(self._ended) == self.count:
            raise NodeError(f"No node is left: {reason}. {self._processes.logs()}")

    def _leave(self, number: int) -> None:
        self._away.add(number)
        self._known.discard(self._ids[number])  # A node with a key of its own comes back under the same name.

    def _look_for_nodes(self) -> None:
        """Asks nodes that have registered since the last call who they are, if some are away."""
        if not any(self._processes.is_ready(number) for number in self._away):
            return
        self._ask_others({self._ids[number] for number in range(self.count) if self.is_there(number)})

    def _ask_others(self, there: Set[str]) -> None:
        """Asks who they are: the nodes that Flower knows, except those that are there or have been asked."""
        for name in self.registered():
            if name in there or name in self._known:
                continue
            self._known.add(name)
            if message := self._of_relay({"do": "send", "node": name}, WHO)["message"]:
                self._asked[message] = name

    def _meet(self) -> None:
        """Waits until all nodes have registered and have said their numbers.

        All that Flower knows are asked. It also knows a node whose process has ended, until its heartbeat is missed; when it is
        started again, it has another name.
        """
        few = f"fewer than {self.count} nodes have registered at the SuperLink"
        self._processes.wait_until(lambda: len(self.registered()) >= self.count, few)
        met: dict[str, dict[str, Any]] = {}
        errors: list[str] = []
        numbers: list[int] = []
        until: float | None = None
        while len(set(numbers)) == len(numbers) and (until is None or time.monotonic() < until):
            self._ask_others(set())
            if not self._asked:
                break
            replies = self._replies(list(self._asked))
            for facts, blobs in replies:
                name = self._asked.pop(facts["message"])
                if "error" in facts:
                    errors.append(facts["error"])
                else:
                    met[name] = decode(blobs["reply"])[1]
            numbers = sorted(facts["node"] for facts in met.values())
            if not replies:
                time.sleep(_POLL_SECONDS)
            if numbers == list(range(self.count)) and until is None:  # Others may have a number that another one has.
                until = time.monotonic() + _MORE_SECONDS
        self._asked = {}
        if len(set(numbers)) < self.count and errors:
            raise NodeError(f"A node did not answer: {errors[0]}.")
        if numbers != list(range(self.count)):
            raise NodeError(
                f"Expected nodes with the numbers from 0 to {self.count - 1}, each once, got {numbers}: give each SuperNode "
                "its own partition-id, and end those that do not belong to this federation."
            )
        self._ids = {facts["node"]: name for name, facts in met.items()}
        self._introductions = {facts["node"]: facts for facts in met.values()}
        self._answered, self._known = set(self._introductions), set(self._ids.values())

    def _replies(self, messages: list[str]) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
        """Returns the replies to these messages that have come."""
        count = self._of_relay({"do": "pull", "messages": messages})["replies"] if messages else 0
        return [self._frame() for _ in range(count)]

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
