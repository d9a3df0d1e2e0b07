"""Writers of metrics: a JSONL file, and TensorBoard files if tensorboardX is installed."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from fedsim.experiment._disk import writing
from fedsim.experiment._lines import Line


class MetricsFile:
    """``metrics.jsonl``, with one JSON object per line. Opening it deletes the lines of rounds after ``keep_rounds``.

    Attributes:
      history: the lines that were in the file when it was opened.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> file = MetricsFile(path, keep_rounds=0)
    >>> file.write([{"round": 1}, {"round": 2}])
    >>> MetricsFile(path, keep_rounds=1).history
    [{'round': 1}]
    """

    def __init__(self, path: Path, keep_rounds: int) -> None:
        self.history = [line for line in read_metrics(path) if line["round"] <= keep_rounds]
        # A new file is written and renamed, so that a process killed here loses none of the old lines.
        with writing(path):
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(map(_encode, self.history)))
            temporary.replace(path)
        self._path = path

    def write(self, lines: list[Line]) -> None:
        """Appends lines. They are in the file when this returns, whatever happens to the process afterwards."""
        with writing(self._path), self._path.open("a") as file:
            file.write("".join(map(_encode, lines)))


_MOST_ENTRIES = 32


class TensorBoard:
    """Writes scalars under ``FOLDER/tensorboard``. Opening it hides the rounds after ``keep_rounds`` of an earlier process.

    tensorboardX encodes the events. They are not written by its `SummaryWriter`, because its thread ends when the disk is full,
    and the run would then wait for it forever.

    A vector of at most 32 entries is one scalar per entry: ``test/f1_per_class/0`` and so on. Longer vectors and matrices are
    left out; the metrics file has them.
    """

    def __init__(self, folder: Path, keep_rounds: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        self._path = folder / "tensorboard" / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        start = keep_rounds + 1
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
        self._append(
            [
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)),
            ]
        )

    def write(self, lines: list[Line]) -> None:
        events, now = [], time.time()
        for line in lines:
            for name, value in _scalars(line).items():
                if name != "round" and value is not None:
                    kind, metric = ("test", name.removeprefix("test_")) if name.startswith("test_") else ("train", name)
                    summary = self._scalar(f"{kind}/{metric}", value)
                    events.append(self._event(wall_time=now, step=line["round"], summary=summary))
        self._append(events)

    def _append(self, events: list[Any]) -> None:
        records = b"".join(_record(event.SerializeToString()) for event in events)
        with writing(self._path), self._path.open("ab") as file:
            file.write(records)


def read_metrics(path: str | Path) -> list[Line]:
    """Reads the lines of a metrics file, oldest first. An incomplete last line of a killed process is left out.

    >>> read_metrics("no such file")
    []
    """
    path, lines = Path(path), []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _scalars(line: Line) -> Line:
    """Returns the line with a key for each entry of a short vector, and without other arrays.

    >>> _scalars({"test_f1": [0.5, 1.0], "test_confusion": [[1, 0], [0, 1]]})
    {'test_f1/0': 0.5, 'test_f1/1': 1.0}
    """
    scalars: Line = {}
    for name, value in line.items():
        if not isinstance(value, list):
            scalars[name] = value
        elif len(value) <= _MOST_ENTRIES and not any(isinstance(entry, list) for entry in value):
            scalars |= {f"{name}/{i}": entry for i, entry in enumerate(value)}
    return scalars


def _record(data: bytes) -> bytes:
    """Returns a record of a TFRecord file: the length, its checksum, the data, and their checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _encode(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
