"""Running a reproduction, and its JSON file, to which rows are added as they come."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.experiment.reproductions._machine import machine
from fedsim.experiment.reproductions._reproduction import Case, Reproduction, Request
from fedsim.names import did_you_mean

Record = dict[str, Any]


def reproduce(
    reproduction: Reproduction, request: Request, *, only: Sequence[str] = (), out: Path | None = None
) -> list[Record]:
    """Runs cases of a reproduction, one after another.

    Args:
      reproduction: which.
      request: data, seeds, rounds.
      only: names of cases, ``*`` standing for anything; empty: all.
      out: a JSON file, written anew after every case. Rows of other cases that it holds by then stay, those of a run beside
        this one, too. No row takes the place of one with more seeds or rounds: nothing is lost to a quick try.

    Returns:
      The new rows as records: the fields of `Row`, with ``"id"``, the case's name, and what `machine` says.

    Raises:
      ValueError: ``only`` fits no case; ``out`` is another reproduction's file, or cannot be written.
      FileNotFoundError: the data are not there.
    """
    cases = chosen(reproduction, request, only)
    if out:
        _must_be_writable(out)
        read(out, reproduction.name)
    records: list[Record] = []
    for name, case in cases.items():
        rows = [{"id": name} | dataclasses.asdict(row) | machine() for row in case()]
        records += rows
        if out:
            _write(out, reproduction, merged(read(out, reproduction.name), rows))
    return records


def chosen(reproduction: Reproduction, request: Request, only: Sequence[str]) -> Mapping[str, Case]:
    """The cases whose names match."""
    cases = reproduction.cases(request)
    for pattern in only:
        if not fnmatch.filter(cases, pattern):
            hint = did_you_mean(pattern, cases)
            raise ValueError(f"{reproduction.name} has no case {pattern!r}.{hint} It has: {', '.join(cases)}.")
    wanted = {name for pattern in only for name in fnmatch.filter(cases, pattern)}
    return {name: case for name, case in cases.items() if not only or name in wanted}


def merged(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """Both, a new row in the place of an old one of the same case and measure, unless it is the more reduced one.

    >>> old = [{"case": case, "measure": "m", "reduced": "" if case == "a" else "x", "seeds": 3} for case in "abc"]
    >>> new = [{"case": case, "measure": "m", "reduced": "y", "seeds": seeds} for case, seeds in zip("abcd", (9, 5, 1, 1))]
    >>> [row["seeds"] for row in merged(old, new)]
    [3, 5, 3, 1]
    """

    def extent(row: Record) -> tuple[bool, float]:
        return not row["reduced"], row.get("seeds", 1) * row.get("settings", {}).get("rounds", 1)

    rows = {(row["case"], row["measure"]): row for row in old}
    for row in new:
        there = rows.get((row["case"], row["measure"]))
        if there is None or not row["reduced"] or extent(row) >= extent(there):
            rows[row["case"], row["measure"]] = row
    return list(rows.values())


def read(path: Path, name: str | None = None) -> list[Record]:
    """The rows of a JSON file; none if there is no file.

    Raises:
      ValueError: it is no such file, or of another reproduction than ``name``.

    >>> read(Path("no such file"))
    []
    """
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        there, rows = stored["name"], stored["rows"]
        for row in rows:
            row["id"], row["case"], row["measure"], row["reduced"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} holds no reproduction: give --out another file.") from None
    if name is not None and there != name:
        raise ValueError(f"{path} holds the reproduction {there!r}, not {name!r}: give --out another file.")
    return rows


def _must_be_writable(path: Path) -> None:
    """Raises ``ValueError`` before hours of rounds, and not after them."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path} cannot be written ({reason}): give --out another file.") from None


def _write(path: Path, reproduction: Reproduction, rows: Sequence[Record]) -> None:
    # In the order of the cases, whichever ran first.
    order = list(reproduction.cases(Request()))
    ordered = sorted(rows, key=lambda row: order.index(row["id"]) if row["id"] in order else len(order))
    stored = {"name": reproduction.name, "title": reproduction.title, "paper": reproduction.paper, "rows": ordered}
    text = json.dumps(_plain(stored), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _plain(value: Any) -> Any:
    """With None for NaN and infinities, which JSON does not know: a loss that ran away."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
