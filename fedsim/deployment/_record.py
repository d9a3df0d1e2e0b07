"""The record of a deployment, ``deliveries.jsonl``: which nodes have answered in a round, or which updates have arrived."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.deployment._nodes import Blobs, Nodes
from fedsim.durable_files import replace_durably, replace_text, writing
from fedsim.systems import Schedule


class _Lines:
    """The lines of the record before a round. Lines of later ones are of rounds that run again."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._path, self._round = folder / "deliveries.jsonl", rounds + 1
        self._lines: list[dict[str, Any]] = []
        if self._path.exists():
            # A process that was killed may have left a part of a line.
            whole = [line for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            self._lines = [json.loads(line) for line in whole]
        self._lines = [line for line in self._lines if line["round"] < self._round]

    def _replace(self) -> None:
        replace_text(self._path, "".join(json.dumps(line) + "\n" for line in self._lines))


class Deliveries(_Lines):
    """The record of rounds: which nodes have answered.

    Args:
      folder: of the run.
      rounds: the number of rounds before this one.
    """

    def answered(self, number: int) -> list[int]:
        """Returns the rounds in which the answer of this node has arrived, counted from 1."""
        return [line["round"] for line in self._lines if number in line["answered"]]

    def write(
        self, nodes: Nodes, answers: Iterable[int], lost: Mapping[int, str], seconds: float, of_nodes: Mapping[int, float],
        requests: Mapping[int, Blobs], replies: Mapping[int, bytes],
    ) -> None:  # fmt: skip
        """Writes the line of this round before its result is used."""
        line = {
            "round": self._round,
            "nodes": nodes.count,
            **_first(nodes.first),
            "answered": sorted(answers),
            "lost": {str(number): reason for number, reason in lost.items()},
            "seconds": round(seconds, 3),
            "seconds_of_nodes": {str(number): round(own, 3) for number, own in of_nodes.items()},
            "bytes_down": sum(len(blob) for blobs in requests.values() for blob in blobs.values()),
            "bytes_up": sum(map(len, replies.values())),
        }
        self._lines.append(line)
        self._replace()


def _first(first: Sequence[int] | None) -> dict[str, list[int]]:
    """Returns what a line says of nodes with clients of their own."""
    return {} if first is None else {"first": list(first)}


class Record(_Lines):
    """The record of server steps: which updates they have aggregated.

    Args:
      folder: of the run.
      rounds: the number of server steps before this process.
      synchronization: the class of the synchronization model, which determines how a server step uses the updates.
      first: see `Nodes`.

    Attributes:
      bytes_down, bytes_up: of the messages since the last line.
    """

    def __init__(self, folder: Path, rounds: int, synchronization: str, first: Sequence[int] | None) -> None:
        super().__init__(folder, rounds)
        self._synchronization = synchronization
        self._first = _first(first)
        self._replace()
        self.bytes_down = self.bytes_up = 0
        # For each client, the server steps that have counted an update of it, from 1, with the number of its dispatch.
        self._counted: dict[int, list[tuple[int, int]]] = {}
        for line in self._lines:
            self._count(line)

    def rows(self, clients: np.ndarray, saved: Sequence[int]) -> dict[str, Any]:
        """Returns what nodes need to know of what clients keep.

        Args:
          clients: their positions.
          saved: the server steps after which there is a checkpoint.

        Returns:
          For each client, the ``row`` that it goes on with: the number of the dispatch that has made it, -1 before its first
          update; and in ``kept`` the rows that a later process may go on with.
        """
        rows, kept = [], []
        for client in clients.tolist():
            counted = self._counted.get(client, [])
            rows.append(counted[-1][1] if counted else -1)
            ends = [max((at for at, (step, _) in enumerate(counted) if step <= end), default=-1) for end in saved]
            later = {number for step, number in counted if step > max(saved, default=0)}
            kept.append(sorted(later | {counted[at][1] for at in ends if at >= 0}))
        return {"row": rows, "kept": kept}

    def write(self, taken: Schedule, counts: Sequence[bool], lost: Sequence[Mapping[str, Any]]) -> None:
        """Writes the line of a server step before its result is used.

        Args:
          taken: the schedule of the step.
          counts: whether each of its updates counts.
          lost: the dispatches whose updates were lost since the last step.
        """
        columns = taken.updates._asdict().items()
        updates = {name: column.tolist() for name, column in columns if name not in ("step", "staleness")}
        line = {
            "round": self._round,
            "synchronization": self._synchronization,
            **self._first,
            "updates": updates | {"counts": list(counts)},
            "steps": {name: column.tolist()[0] for name, column in taken.steps._asdict().items()},
            "lost": list(lost),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
        }
        self._count(line)
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._round += 1
        self.bytes_down = self.bytes_up = 0

    def _count(self, line: Mapping[str, Any]) -> None:
        of = line["updates"]
        for client, number, counts in zip(of["client"], of["number"], of["counts"], strict=True):
            if counts:
                self._counted.setdefault(client, []).append((line["round"], number))


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes a file. After an error, a killed process or a power failure, it has the old content or the new one."""
    part = path.with_suffix(".tmp")
    with writing(path):
        part.write_bytes(content)
        replace_durably(part, path)
