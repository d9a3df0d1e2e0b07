"""Writers of metrics: a JSONL file, and TensorBoard files if tensorboardX is installed."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsim.durable_files import replace_text, sync_file, writing
from fedsim.experiment._lines import Line, split_and_metric
from fedsim.run_files import metric_lines


class MetricsFile:
    """``metrics.jsonl``, with one JSON object per line. Opening it deletes the lines of rounds after ``keep_rounds``.

    If lines cannot be read, or rounds until ``keep_rounds`` are missing, a warning says which. The file is then kept under
    another name, ``metrics.jsonl.damaged``, and the lines that can be read stay.

    Args:
      path: the file.
      keep_rounds: the number of finished rounds.
      evaluated: whether the run has an evaluation after a round. Evaluations after other rounds are deleted: there is one after
        the last round of a run that was continued with more rounds.

    Attributes:
      history: the lines that were in the file when it was opened.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> file = MetricsFile(path, keep_rounds=0)
    >>> file.write([{"round": 1, "seconds": 0.5}, {"round": 2, "seconds": 0.5}])
    >>> MetricsFile(path, keep_rounds=1).history
    [{'round': 1, 'seconds': 0.5}]
    """

    def __init__(self, path: Path, keep_rounds: int, evaluated: Callable[[int], bool] = lambda round: True) -> None:
        lines, damaged = metric_lines(path)
        kept = (line for line in lines if line["round"] <= keep_rounds)
        self.history = [line for line in kept if "seconds" in line or evaluated(line["round"])]
        text = "".join(map(_encode, self.history))
        missing = sorted(set(range(1, keep_rounds + 1)) - {line["round"] for line in self.history if "seconds" in line})
        if damaged or missing:
            warnings.warn(_problem(path, damaged, missing) + _keep_damaged(path, text), stacklevel=6)
        replace_text(path, text)
        self._path = path

    def write(self, lines: list[Line]) -> None:
        """Appends lines. They are in the file when this returns, whatever happens to the process afterwards."""
        with writing(self._path), self._path.open("a") as file:
            file.write("".join(map(_encode, lines)))

    def sync(self) -> None:
        """Synchronizes the lines to the disk."""
        with writing(self._path):
            sync_file(self._path)


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
                    split, metric = split_and_metric(name)
                    summary = self._scalar(f"{split or 'train'}/{metric}", value)
                    events.append(self._event(wall_time=now, step=line["round"], summary=summary))
        self._append(events)

    def sync(self) -> None:
        """Synchronizes the events to the disk."""
        with writing(self._path):
            sync_file(self._path)

    def _append(self, events: list[Any]) -> None:
        records = b"".join(_record(event.SerializeToString()) for event in events)
        with writing(self._path), self._path.open("ab") as file:
            file.write(records)


def read_metrics(path: str | Path) -> list[Line]:
    """Reads the lines of a metrics file, oldest first. An incomplete last line of a killed process is left out.

    Other lines that cannot be read are left out, too, and a warning gives their numbers.

    >>> read_metrics("no such file")
    []
    """
    lines, damaged = metric_lines(Path(path))
    if damaged:
        warnings.warn(_problem(Path(path), damaged, []), stacklevel=2)
    return lines


def _problem(path: Path, damaged: list[int], missing: list[int]) -> str:
    texts = [f"{path} is damaged. These lines cannot be read and are left out: {listed(damaged)}."] if damaged else []
    texts += [f"{path} lacks the rows of these finished rounds: {listed(missing)}."] if missing else []
    return " ".join(texts)


def listed(numbers: list[int]) -> str:
    """Returns increasing numbers as text.

    >>> listed([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1][1:] = [number]
        else:
            stretches.append([number])
    return ", ".join(" to ".join(map(str, stretch)) for stretch in stretches)


def _keep_damaged(path: Path, readable: str) -> str:
    """Copies a file from which more than lines of later rounds is left out; returns a sentence that names the copy."""
    if not path.exists() or (content := path.read_bytes()) == readable.encode():
        return ""
    names = (path.with_name(f"{path.name}.damaged{suffix}") for suffix in itertools.chain([""], itertools.count(2)))
    copy = next(name for name in names if not name.exists() or name.read_bytes() == content)
    with writing(copy):
        copy.write_bytes(content)
        sync_file(copy)
    return f" The file as it was found is kept as {copy}."


def _scalars(line: Line) -> Line:
    """Returns the numbers of a line, with a key for each entry of a short vector, and without other arrays.

    >>> _scalars({"test_f1": [0.5, 1.0], "test_confusion": [[1, 0], [0, 1]]})
    {'test_f1/0': 0.5, 'test_f1/1': 1.0}
    """
    scalars: Line = {}
    for name, value in line.items():
        if not isinstance(value, list | dict):
            scalars[name] = value
        elif isinstance(value, list) and len(value) <= _MOST_ENTRIES and not any(isinstance(entry, list) for entry in value):
            scalars |= {f"{name}/{i}": entry for i, entry in enumerate(value)}
    return scalars


def _record(data: bytes) -> bytes:
    """Returns a record of a TFRecord file: the length, its checksum, the data, and their checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _encode(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
