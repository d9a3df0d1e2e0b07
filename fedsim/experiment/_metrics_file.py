"""``metrics.jsonl``, the metrics of a run folder."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path

from fedsim.durable_files import replace_text, sync_file, writing
from fedsim.experiment._lines import Line
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


def _encode(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
