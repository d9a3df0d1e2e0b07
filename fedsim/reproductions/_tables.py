"""Tables of results, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("case", "measure", "paper", "ours", "seeds", "time", "")


def cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a record, in the order of `HEAD`.

    >>> cells({"case": "2NN", "measure": "rounds", "paper": "87", "ours": "90", "seeds": 3, "seconds": 75.0,
    ...        "reduced": "", "note": "why"})
    ('2NN', 'rounds', '87', '90', '3', '1 min 15 s', 'why')
    """
    reduced = f"REDUCED: {record['reduced']}" if record["reduced"] else ""
    remarks = ". ".join(part.rstrip(".") for part in (reduced, record["note"]) if part)
    named = (record["case"], record["measure"], record["paper"] or "–", record["ours"])
    return (*named, str(record["seeds"]), duration(record["seconds"]), remarks)


def text_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with aligned columns; remarks are numbered and printed below it.

    >>> row = {"case": "2NN", "measure": "rounds", "paper": "", "ours": "90", "seeds": 1, "seconds": 0}
    >>> print(text_table([row | {"reduced": "1 of 3 seeds", "note": ""}]))
    case  measure  paper  ours  seeds  time
    2NN   rounds   –      90    1      –     [1]
    <BLANKLINE>
    [1] REDUCED: 1 of 3 seeds
    """
    remarks: dict[str, int] = {}
    lines: list[tuple[str, ...]] = [HEAD]
    for record in records:
        *first, remark = cells(record)
        lines.append((*first, f"[{remarks.setdefault(remark, len(remarks) + 1)}]" if remark else ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*table, *([""] if remarks else []), *(f"[{number}] {text}" for text, number in remarks.items())])


def markdown_table(records: Sequence[Mapping[str, Any]], source: str = "paper") -> str:
    """Returns the table as Markdown, with the remarks in the last column.

    Args:
      records: the rows.
      source: where the numbers come from that ours are compared with, the name of their column.

    >>> print(markdown_table([], source="scikit-learn"))
    | case | measure | scikit-learn | ours | seeds | time | remarks |
    | --- | --- | --- | --- | --- | --- | --- |
    """
    head = [source if name == "paper" else name for name in HEAD[:-1]]
    lines = [(*head, "remarks"), ("---",) * len(HEAD), *map(cells, records)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def duration(seconds: float) -> str:
    """Returns a time in seconds as text; a dash for less than half a second.

    >>> duration(0), duration(59.6), duration(3725), duration(75)
    ('–', '1 min', '1 h 2 min', '1 min 15 s')
    """
    whole = round(seconds)
    if not whole:
        return "–"
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    parts = [(hours, "h"), (minutes, "min"), (0 if hours else rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)
