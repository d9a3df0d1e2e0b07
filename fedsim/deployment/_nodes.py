"""`Nodes`: processes that have the clients' data, and that answer what the server asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.deployment._encoding import decode, encode

# A message, as byte strings by name.
Blobs = Mapping[str, bytes]
# The question of the server before the first round.
WHO: Blobs = {"clients": encode([], {"ask": "who"})}


class NodeError(ConnectionError):
    """An error at a node, or of all nodes. `deploy` raises it.

    >>> raise NodeError("No node has answered in round 5: its worker has ended.")
    Traceback (most recent call last):
    ...
    fedsim.deployment._nodes.NodeError: No node has answered in round 5: its worker has ended.
    """


class Received(NamedTuple):
    """What came of a message to a node.

    Attributes:
      message: its name, as `Nodes.send` has returned it.
      node: the number of the node.
      reply: None if there is none.
      why: why there is none.

    >>> Received("7", 1, None, "its worker has ended").reply is None
    True
    """

    message: str
    node: int
    reply: bytes | None
    why: str = ""


class Replies(NamedTuple):
    """What came of a request to several nodes.

    Attributes:
      replies: by the numbers of the nodes that have answered.
      lost: why the others have not answered.

    >>> Replies({0: b"..."}, {1: "its worker has ended"}).lost
    {1: 'its worker has ended'}
    """

    replies: dict[int, bytes]
    lost: dict[int, str]


class Nodes:
    """Nodes, numbered from 0. A subclass carries the messages: it defines `send` and `receive`.

    Attributes:
      count: how many there are.
      first: of nodes with data of their own, the position in the population of each node's first client. None: a client belongs
        to the node whose number is its position modulo the number of nodes.

    Here a single node answers every message by its length:

    >>> class Near(Nodes):
    ...     count, replies = 1, []
    ...     def send(self, number, blobs):
    ...         self.replies.append(Received("m", number, encode([], {"bytes": len(blobs["clients"])})))
    ...         return "m"
    ...     def receive(self):
    ...         return [self.replies.pop()]
    >>> Near().introductions()
    {0: {'bytes': 64}}
    """

    count: int
    first: Sequence[int] | None = None

    def slots_of(self, clients: np.ndarray) -> list[np.ndarray]:
        """Returns for each node where its clients are among these positions in the population."""
        if self.first is None:
            owners = clients % self.count
        else:
            owners = np.searchsorted(np.asarray(self.first), clients, side="right") - 1
        return [np.flatnonzero(owners == number) for number in range(self.count)]

    def introductions(self) -> dict[int, dict[str, Any]]:
        """Returns what each node says of itself: its number, versions and population, and the key of its masks, if it has some.

        Raises:
          NodeError: a node does not answer.
        """
        replies, lost = self.ask(dict.fromkeys(range(self.count), WHO))
        for number, reason in lost.items():
            raise NodeError(f"Node {number} did not answer: {reason}.")
        return {number: decode(reply)[1] for number, reply in replies.items()}

    def ask(self, requests: Mapping[int, Blobs]) -> Replies:
        """Sends each node its request, and waits until every node has answered or is lost."""
        asked = {self.send(number, blobs) for number, blobs in requests.items()}
        replies: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        while len(replies) + len(lost) < len(asked):
            for message, number, reply, why in self.receive():
                if message not in asked:
                    continue
                if reply is None:
                    lost[number] = why
                else:
                    replies[number] = reply
        return Replies(replies, lost)

    def is_there(self, number: int) -> bool:
        """Returns whether a node is there, so that the server may send to it."""
        return True

    def send(self, number: int, blobs: Blobs) -> str:
        """Sends a message to a node, and returns a name that no other message has."""
        raise NotImplementedError

    def receive(self) -> list[Received]:
        """Returns what has come of messages since the last call; if nothing has, it may wait a moment."""
        raise NotImplementedError
