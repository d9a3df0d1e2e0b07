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
        this one, too (unless both end a case at the same moment). A case keeps its rows if they are of more seeds, or the new
        ones are reduced where they are not, or quick where they are not; ``request.say`` is told so.

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
        rows = [{"id": name, "quick": request.quick} | dataclasses.asdict(row) | machine() for row in case()]
        records += rows
        if out:
            there = read(out, reproduction.name)
            kept = merged(there, rows)
            if kept == there:
                request.say(f"{out} keeps its rows of {name}, which are of more seeds, or less reduced.")
            else:
                _write(out, reproduction, kept)
    return records


def chosen(reproduction: Reproduction, request: Request, only: Sequence[str]) -> Mapping[str, Case]:
    """The cases whose names match one of the patterns; without a pattern, all.

    Raises:
      ValueError: a pattern fits no case.

    >>> from fedsim.experiment import reproductions
    >>> list(chosen(reproductions.get("fedprox"), Request(), ["iid-*"]))
    ['iid-0', 'iid-50', 'iid-90']
    """
    cases = reproduction.cases(request)
    for pattern in only:
        if not fnmatch.filter(cases, pattern):
            hint = did_you_mean(pattern, cases)
            raise ValueError(f"{reproduction.name} has no case {pattern!r}.{hint} It has: {', '.join(cases)}.")
    wanted = {name for pattern in only for name in fnmatch.filter(cases, pattern)}
    return {name: case for name, case in cases.items() if not only or name in wanted}


def merged(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """Both, the new rows of a case in the place of its old ones, unless it was run with less than these.

    >>> def case(id, seeds, reduced="", quick=False):
    ...     return {"id": id, "seeds": seeds, "reduced": reduced, "quick": quick}
    >>> old = [case("a", 3), case("b", 1, "x"), case("c", 3, "x"), case("d", 1, "x")]
    >>> new = [case("a", 9, "y"), case("b", 5, "y"), case("c", 1, "y"), case("d", 1, "y", quick=True), case("e", 1)]
    >>> [(row["id"], row["seeds"], row["reduced"]) for row in merged(old, new)]
    [('a', 3, ''), ('c', 3, 'x'), ('d', 1, 'x'), ('b', 5, 'y'), ('e', 1, '')]
    >>> len(merged([case("a", 3)], [case("a", 3), case("a", 1)]))  # A row beside may be of fewer seeds.
    2
    """

    def of(rows: Sequence[Record], name: str) -> list[Record]:
        return [row for row in rows if row["id"] == name]

    def extent(rows: Sequence[Record]) -> tuple[int, bool, bool]:
        whole = not any(row["reduced"] for row in rows)
        return max(row["seeds"] for row in rows), whole, not any(row.get("quick") for row in rows)

    rows = list(old)
    for name in dict.fromkeys(row["id"] for row in new):
        there, come = of(rows, name), of(new, name)
        if not there or all(a <= b for a, b in zip(extent(there), extent(come), strict=True)):
            rows = [row for row in rows if row["id"] != name] + come
    return rows


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
            row["id"], row["case"], row["measure"], row["reduced"], row["seeds"]
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
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as beside:
        beside.write(text)
    os.chmod(beside.name, 0o644)  # and not the owner's alone
    os.replace(beside.name, path)


def _plain(value: Any) -> Any:
    """With None for NaN and infinities, which JSON does not know: a loss that ran away."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
