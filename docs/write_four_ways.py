"""Writes the tables and pictures of docs/four_ways.md from docs/reproductions: ``python docs/write_four_ways.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import reproductions
from fedsim.plots._canvas import new_figure
from fedsim.reproductions import _data_parallel as parallel
from fedsim.reproductions import _four_ways as four
from fedsim.reproductions._four_ways_costs import PLACES, Costs

HERE = Path(__file__).parent
PAGE = HERE / "four_ways.md"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666")  # M. Okabe, K. Ito, "Color universal design", 2002
MARKERS = "os^vD"
CASES = {
    "iid": "digits, IID",
    "skewed": "digits, skewed labels",
    "stragglers-dropped": "skewed, stragglers dropped",
    "stragglers-partial": "skewed, partial work",
    "imbalance": "10,000 examples and 10,000 × 1",
    "femnist": "FEMNIST, 50 writers",
}


def records(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a reproduction that have details."""
    rows = reproductions.read(HERE / "reproductions" / f"{name}.json", name)
    return [row for row in rows if row["details"]]


def page() -> str:
    """Returns the page with new tables, each between ``<!-- table: NAME -->`` and ``<!-- end of table -->``."""
    tables = {"words": _words, "accuracy": _accuracy, "costs": _costs, "data_parallel": _data_parallel}
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(?=<!-- end of table -->)",
        lambda match: f"{match[1]}\n{tables[match[2]]()}\n\n",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _words() -> str:
    return _table(
        ["way", "the examples are", "the model is", "what leaks, and to whom"],
        [[f"**{name}**", way.data, way.model, way.leaks] for name, way in four.WAYS.items()],
    )


def _of_case(name: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a case by way, in the order of the ways."""
    return {way: row for row, way in zip([each for each in records("four_ways") if each["id"] == name], four.WAYS, strict=True)}


def _accuracy() -> str:
    rows = {case: _of_case(case) for case in CASES}
    cells = [[f"{_mean(rows[case][way])} ({_mean(rows[case][way], 'worst')})" for case in CASES] for way in four.WAYS]
    return _table(["", *CASES.values()], [[f"**{way}**", *line] for way, line in zip(four.WAYS, cells, strict=True)])


def _mean(row: Mapping[str, Any], curve: str = "accuracy") -> str:
    return f"{np.mean([values[-1] for values in row['details'][curve]]):.1f}"


def _costs() -> str:
    head = ["", "way", "a device sends", "and receives", "all through the server"]
    head += [f"{place}: time, energy" for place in PLACES]
    rows = []
    for case, title in {"iid": "digits", "femnist": "FEMNIST", "imbalance": "10,001 devices"}.items():
        for way, row in _of_case(case).items():
            ends = {place: Costs(**points[-1]) for place, points in row["details"]["costs"].items()}
            moved = [four.in_bytes(number) for number in ends["phone"][:3]]
            paid = [f"{four.figure(each.seconds)} s, {four.figure(each.joules)} J" for each in ends.values()]
            rows.append([title if way == "offloading" else "", f"**{way}**", *moved, *paid])
    return _table(head, rows)


def _data_parallel() -> str:
    rows = reproductions.read(HERE / "reproductions" / "data_parallel.json", "data_parallel")
    cases = list(dict.fromkeys(row["id"] for row in rows))
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:  # three rows of a method: seconds per epoch, accuracy, seconds to the target
        reached = [value for value in row["values"] if value is not None]
        text = f"{np.mean(reached):.1f}" if len(reached) == len(row["values"]) else "not reached"
        cells.setdefault((row["case"].split(": ")[1], row["id"]), []).append(text)
    head = ["", *(f"{case.split('-')[1]} slow" for case in cases)]
    return _table(head, [[method, *("; ".join(cells[method, case]) for case in cases)] for method in parallel.METHODS])


def _lines(axes: Any, curves: Mapping[str, tuple[Any, Any]]) -> None:
    for (name, (x, y)), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        axes.plot(x, y, color=colour, marker=marker, markersize=2.5, linewidth=1.2, label=name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _legend(figure: Any, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False, fontsize=9)


def draw_progress() -> Any:
    """Draws the accuracy against bytes and against time on both kinds of links, a row per case."""
    cases = ("iid", "skewed", "femnist")
    figure = new_figure(11.0, 8.2)
    grid = figure.subplots(len(cases), 3, sharey="row")
    for row, case in zip(grid, cases, strict=True):
        of_way = {way: record["details"] for way, record in _of_case(case).items()}
        accuracy = {way: np.mean(each["accuracy"], axis=0) for way, each in of_way.items()}
        positions = {
            "kilobytes that a device has sent and received": ("phone", lambda at: (at["up"] + at["down"]) / 1e3),
            "simulated seconds in a data centre": ("data centre", lambda at: at["seconds"]),
            "simulated seconds on phone links": ("phone", lambda at: at["seconds"]),
        }
        for axes, (label, (place, position)) in zip(row, positions.items(), strict=True):
            _lines(axes, {way: ([position(at) for at in each["costs"][place]], accuracy[way]) for way, each in of_way.items()})
            axes.set_xscale("log")
            axes.set_xlabel(f"{label} (logarithmic)", fontsize=8)
        row[0].set_ylabel(f"{CASES[case]}\ntest accuracy, %")
    _legend(figure, grid[0, 0])
    return figure


def draw_worst() -> Any:
    """Draws the accuracy and that of the worst tenth of the devices, by case and way."""
    figure = new_figure(11.0, 4.0)
    axes = figure.subplots()
    for place, case in enumerate(CASES):
        for number, (way, row) in enumerate(_of_case(case).items()):
            at, shown = place + (number - 1.5) * 0.2, {"label": way} if not place else {}
            worst = np.mean([each[-1] for each in row["details"]["worst"]])
            axes.bar(at, np.mean(row["values"]), 0.18, color=COLOURS[number], alpha=0.35)
            axes.bar(at, worst, 0.18, color=COLOURS[number], **shown)
    titles = [title.replace(" and ", "\nand ").replace(", ", ",\n") for title in CASES.values()]
    axes.set_xticks(range(len(CASES)), titles, fontsize=9)
    axes.set_ylabel("test accuracy, %\n(dark: worst tenth of the devices)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    _legend(figure, axes)
    return figure


def draw_data_parallel() -> Any:
    """Draws the accuracy of data-parallel SGD against simulated seconds, a panel per number of slow workers."""
    rows = records("data_parallel")
    cases = list(dict.fromkeys(row["id"] for row in rows))
    figure = new_figure(11.0, 3.8)
    panels = figure.subplots(1, len(cases), sharey=True)
    for axes, case in zip(panels, cases, strict=True):
        curves = {}
        for row in (each for each in rows if each["id"] == case):
            details, number = row["details"], min(map(len, row["details"]["seconds"]))
            means = [np.mean([values[:number] for values in details[name]], axis=0) for name in ("seconds", "accuracy")]
            curves[row["case"].split(": ")[1]] = (means[0], means[1])
        _lines(axes, curves)
        axes.set_xscale("log")
        axes.set_title(f"{case.split('-')[1]} of {parallel.WORKERS} workers slow", fontsize=9)
        axes.set_xlabel("simulated seconds (logarithmic)", fontsize=8)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].set_ylim(70, 97)
    _legend(figure, panels[0])
    return figure


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, draw in {"progress": draw_progress, "worst": draw_worst, "data_parallel": draw_data_parallel}.items():
        draw().savefig(PAGE.with_suffix("") / f"{name}.png", dpi=90)
