"""Runs a reproduction and writes its rows to a JSON file."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.durable_files import atomic_write
from fedsim.names import did_you_mean
from fedsim.reproductions._machine import machine
from fedsim.reproductions._reproduction import Case, Reproduction, Request
from fedsim.text_files import read_json

Record = dict[str, Any]


def reproduce(
    reproduction: Reproduction, request: Request, *, only: Sequence[str] = (), out: Path | None = None
) -> list[Record]:
    """Runs cases of a reproduction, one after another.

    Args:
      reproduction: the reproduction.
      request: the data, seeds and rounds.
      only: names of cases, in which ``*`` matches any characters; empty runs all cases.
      out: a JSON file that is written after every case. Rows of other cases remain in it, including those that another process
        has written in the meantime (unless both write at the same moment). The old rows of a case remain if they have more
        seeds, or if the new ones are reduced or quick and the old ones are not; ``request.log`` reports this.

    Returns:
      The new rows as records: the fields of `Row`, the name of the case as ``"id"``, and the fields of `machine`.

    Raises:
      ValueError: ``only`` matches no case, or ``out`` belongs to another reproduction or cannot be written.
      FileNotFoundError: the data cannot be found.
    """
    cases = select_cases(reproduction, request, only)
    if out:
        _check_writable(out)
        read(out, reproduction.name)
    records: list[Record] = []
    for name, case in cases.items():
        rows = [{"id": name, "quick": request.quick} | dataclasses.asdict(row) | machine() for row in case()]
        records += rows
        if out and rows:
            before = read(out, reproduction.name)
            after = merged(before, rows)
            if after == before:
                request.log(f"The old rows of {name} remain in {out}, because they have more seeds or are less reduced.")
            else:
                _write(out, reproduction, after)
    return records


def select_cases(reproduction: Reproduction, request: Request, only: Sequence[str]) -> Mapping[str, Case]:
    """Returns the cases whose names match one of the patterns; without a pattern, all cases.

    Raises:
      ValueError: a pattern matches no case.

    >>> from fedsim import reproductions
    >>> list(select_cases(reproductions.get("fedprox"), Request(), ["iid-*"]))
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
    """Returns the old rows, in which new rows replace those of the same case unless the old ones are more complete.

    >>> def case(id, seeds, reduced="", quick=False):
    ...     return {"id": id, "seeds": seeds, "reduced": reduced, "quick": quick}
    >>> old = [case("a", 3), case("b", 1, "x"), case("c", 3, "x"), case("d", 1, "x")]
    >>> new = [case("a", 9, "y"), case("b", 5, "y"), case("c", 1, "y"), case("d", 1, "y", quick=True), case("e", 1)]
    >>> [(row["id"], row["seeds"], row["reduced"]) for row in merged(old, new)]
    [('a', 3, ''), ('c', 3, 'x'), ('d', 1, 'x'), ('b', 5, 'y'), ('e', 1, '')]
    >>> len(merged([case("a", 3)], [case("a", 3), case("a", 1)]))  # another row of the case may have fewer seeds
    2
    >>> old = [case("a", 3, "300 of 3,400 writers") | {"settings": {"rounds": 1000}}]
    >>> merged(old, [case("a", 3, "300 of 3,400 writers, 10 rounds") | {"settings": {"rounds": 10}}]) == old
    True
    >>> merged(old, [case("a", 3)]) == [case("a", 3)]  # all writers, in no more rounds than the paper has
    True
    """

    def of_case(rows: Sequence[Record], name: str) -> list[Record]:
        return [row for row in rows if row["id"] == name]

    def extent(rows: Sequence[Record]) -> tuple[int, bool, bool, float]:
        whole = not any(row["reduced"] for row in rows)
        rounds = math.inf if whole else max(row.get("settings", {}).get("rounds", 0) for row in rows)
        return max(row["seeds"] for row in rows), whole, not any(row.get("quick") for row in rows), rounds

    rows = list(old)
    for name in dict.fromkeys(row["id"] for row in new):
        before, after = of_case(rows, name), of_case(new, name)
        if not before or all(a <= b for a, b in zip(extent(before), extent(after), strict=True)):
            rows = [row for row in rows if row["id"] != name] + after
    return rows


def read(path: Path, name: str | None = None) -> list[Record]:
    """Reads the rows of a JSON file. Returns an empty list if there is no file.

    Raises:
      ValueError: the file has another format, or belongs to another reproduction than ``name``.

    >>> read(Path("no such file"))
    []
    """
    if not path.exists():
        return []
    try:
        stored = read_json(path)
        stored_name, rows = stored["name"], stored["rows"]
        for row in rows:
            row["id"], row["case"], row["measure"], row["reduced"], row["seeds"]
    except (ValueError, KeyError, TypeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise ValueError(f"{path} is not a file of a reproduction{reason}. Choose another file with --out.") from None
    if name is not None and stored_name != name:
        raise ValueError(f"{path} belongs to the reproduction {stored_name!r}, not {name!r}. Choose another file with --out.")
    return rows


def _check_writable(path: Path) -> None:
    """Raises ``ValueError`` now, and not after hours of training."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"Cannot write {path} ({reason}). Choose another file with --out.") from None


def _write(path: Path, reproduction: Reproduction, rows: Sequence[Record]) -> None:
    # In the order of the cases, not in that of the runs.
    order = list(reproduction.cases(Request()))
    ordered = sorted(rows, key=lambda row: order.index(row["id"]) if row["id"] in order else len(order))
    stored = {"name": reproduction.name, "title": reproduction.title, "paper": reproduction.paper, "rows": ordered}
    text = json.dumps(_plain(stored), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Replaces NaN and infinities, for example of a loss that diverged, by None, because JSON does not have them."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
