"""`Nodes`: processes that have the clients' data, and that answer what the server asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    """Nodes, numbered from 0. A subclass carries the messages.

    Attributes:
      count: how many there are.

    Here a single node answers every message by its length:

    >>> class Near(Nodes):
    ...     count = 1
    ...     def ask(self, requests):
    ...         return Replies({number: encode([], {"bytes": len(blobs["clients"])}) for number, blobs in requests.items()}, {})
    >>> Near().introductions()
    {0: {'bytes': 64}}
    """

    count: int

    def introductions(self) -> dict[int, dict[str, Any]]:
        """Returns what each node says of itself: its number, versions and population.

        Raises:
          NodeError: a node does not answer.
        """
        replies, lost = self.ask(dict.fromkeys(range(self.count), WHO))
        for number, reason in lost.items():
            raise NodeError(f"Node {number} did not answer: {reason}.")
        return {number: decode(reply)[1] for number, reply in replies.items()}

    def ask(self, requests: Mapping[int, Blobs]) -> Replies:
        """Sends each node its request, and waits until every node has answered or is lost."""
        raise NotImplementedError
