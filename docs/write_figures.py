"""Draws the pictures of docs/figures from committed results: ``python docs/write_figures.py``.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ by their markers. Each picture
has a hash of the results that it shows, which a test compares with the present ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import runpy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
REPRODUCTIONS = HERE / "reproductions"
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000"]
MARKERS = "os^DvPX"
HATCHES = ["", "//", "..", "\\\\", "xx"]
_MOST_ROWS = 30
PEERS = {"fedsim": "fedsim", "fedjax": "FedJAX", "drjax": "DrJAX", "pfl": "pfl-research", "flower": "Flower"}


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def _stamp(table: dict[str, Any]) -> str:
    return f"{table['cpu']}, {table['cores']} cores, {table['date'][:10]}, commit {table['commit'][:7]}"


def _axes(columns: int = 1, width: float = 7.5, height: float = 3.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def speed() -> Figure:
    """Bars: the time of a client step beside other libraries, for three models."""
    table = json.loads((RESULTS / "cpu-rounds.json").read_text(encoding="utf-8"))
    figure, axes = _axes()
    for place, part in enumerate(table["parts"]):
        times = {row["contender"]: row["us_per_step"] for row in part["rows"]}
        ratios = {row["contender"]: row["relative_to_fedsim"] for row in part["rows"]}  # measured in alternation
        for at, (peer, name) in enumerate(PEERS.items()):
            x = place + (at - 2) * 0.16
            axes.bar(
                x,
                times[peer],
                0.15,
                color=COLOURS[at],
                label=name if place == 0 else None,
                hatch=["", "//", "..", "\\\\", "xx"][at],
            )
            if peer != "fedsim":
                axes.text(x, times[peer] * 1.1, f"{ratios[peer]:.2g}×", ha="center", fontsize=8)
    names = {"logistic": "logistic regression", "dense": "dense, 784-200-200-62", "cnn": "CNN"}
    axes.set_xticks(range(len(table["parts"])), [names[part["rows"][0]["model"]] for part in table["parts"]])
    axes.set(
        yscale="log",
        ylabel="microseconds per client step",
        title="Time of a client step, and its ratio to fedsim's (lower is better)",
    )
    axes.legend(ncols=5, fontsize=8, loc="upper left")
    axes.set_ylim(50, 1.5e7)
    figure.supxlabel(f"{_stamp(table)}; shapes of EMNIST, 10 clients a round", fontsize=8)
    return figure


def clients() -> Figure:
    """Lines: the time of a round against the clients of a round, on one and two devices."""
    table = json.loads((RESULTS / "cpu-cohorts.json").read_text(encoding="utf-8"))
    figure, axes = _axes(width=6)
    for place, part in enumerate(part for part in table["parts"] if "model" in part["rows"][0]):
        rows = [row for row in part["rows"] if row["clients"] != "ratio"]
        axes.plot(
            [row["clients"] for row in rows],
            [row["ms_per_round"] / 1e3 for row in rows],
            color=COLOURS[place],
            marker=MARKERS[place],
            label=f"{rows[0]['model']}, {rows[0]['devices']} device{'s' * (rows[0]['devices'] > 1)}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="clients per round",
        ylabel="seconds per round",
        title="Time of a round against its clients (20 images each)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.supxlabel(_stamp(table), fontsize=8)
    return figure


def bytes_() -> Figure:
    """Points: test accuracy against the bits that a client sends per parameter."""
    rows = _rows(REPRODUCTIONS / "compression.json")
    cases: dict[str, dict[str, Any]] = {}
    for row in rows:
        cases.setdefault(row["case"], {"id": row["id"]})[row["measure"]] = row["values"]
    figure, axes = _axes(width=8, height=4.2)
    names = {"none": "not compressed", "uniform": "uniform", "rotated": "rotated uniform", "drive": "DRIVE", "eden": "EDEN"}

    def kind_of(case: dict[str, Any]) -> str:
        return names.get(
            case["id"].partition("-")[0], "top 1 %, error feedback" if case["id"].endswith("feedback") else "top 1 %"
        )

    kinds = list(dict.fromkeys(kind_of(case) for case in cases.values()))
    drawn = set()
    for case in cases.values():
        kind = kind_of(case)
        accuracy, bits = case.get("test accuracy, %"), case.get("bits up per parameter")
        if not accuracy or not bits:
            continue
        at = kinds.index(kind)
        mean = sum(accuracy) / len(accuracy)
        low, high = mean - min(accuracy), max(accuracy) - mean
        axes.errorbar(
            [sum(bits) / len(bits)], [mean], [[low], [high]], color=COLOURS[at % 7], marker=MARKERS[(at + at // 7) % 7], ls="",
            markersize=6, label=None if kind in drawn else kind,
        )  # fmt: skip
        drawn.add(kind)
    axes.set(
        xscale="log",
        xlabel="bits that a client sends per parameter",
        ylabel="test accuracy, % (least and most of 3 seeds)",
        title="Accuracy against bits: FEMNIST, 300 writers",
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def nmse() -> Figure:
    """Points: the error of a compressed vector against the bytes of its message; open markers for biased compressors."""
    figure, axes = _axes(width=8, height=4.2)
    # By the id of a case or its first word: a name, and the colour and marker, which a biased and an unbiased kind may share.
    kinds = {
        "drive-biased": ("DRIVE, biased", 0),
        "drive": ("DRIVE", 0),
        "eden": ("EDEN", 1),
        "top": ("top k, biased", 2),
        "random": ("random k", 2),
        "qsgd": ("QSGD", 3),
        "terngrad": ("TernGrad", 4),
        "uniform": ("uniform", 5),
        "rotated": ("rotated uniform", 6),
    }
    points: dict[tuple[str, int], list[tuple[float, float]]] = {kind: [] for kind in kinds.values()}
    for row in _rows(REPRODUCTIONS / "nmse_and_bytes.json"):
        if row["measure"] == "NMSE":
            kind = kinds.get(row["id"]) or kinds[row["id"].partition("-")[0]]
            points[kind].append((row["details"]["bytes"], sum(row["values"]) / len(row["values"])))
    for (name, at), pairs in points.items():
        style: dict[str, Any] = {"color": COLOURS[at], "marker": MARKERS[at], "zorder": 10 - at}  # DRIVE's above EDEN's
        if name.endswith("biased"):
            style["markerfacecolor"] = "none"
        axes.plot(*zip(*pairs, strict=True), ls="", markersize=6, label=name, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of a message of 4,096 numbers (16,384 bytes as float32)",
        ylabel="normalized mean squared error",
        title="Error against bytes: vectors from LogNormal(0, 1)",
    )
    axes.set_xticks([200, 500, 1000, 2000], ["200", "500", "1,000", "2,000"])
    axes.set_xticks([], minor=True)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def attacks() -> Figure:
    """Heat map: test accuracy of aggregators under attacks."""
    grid: dict[str, dict[str, float]] = {}
    for row in _rows(REPRODUCTIONS / "robustness.json"):
        if row["measure"] == "test accuracy, %":
            aggregator, _, attack = row["case"].partition("; ")
            grid.setdefault(aggregator, {})[attack] = sum(row["values"]) / len(row["values"])
    columns = list(dict.fromkeys(attack for cells in grid.values() for attack in cells))
    figure, axes = _axes(width=7.5, height=0.45 * len(grid) + 1.6)
    values = [[cells.get(attack, float("nan")) for attack in columns] for cells in grid.values()]
    image = axes.imshow(values, cmap="cividis", aspect="auto", vmin=0, vmax=100)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color="white" if value < 55 else "black")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(grid)), list(grid))
    axes.set(title="Test accuracy in %: aggregators against attacks, FEMNIST, 300 writers")
    figure.colorbar(image, label="test accuracy, %")
    return figure


def papers() -> Figure:
    """Points: our result against the paper's, a point for each row with a number in both columns."""
    figure, axes = _axes(width=6.5, height=5)
    at = 0
    for path in FIGURES["papers"][1]:
        pairs = [
            (paper, ours)
            for row in _rows(path)
            if "(" not in (row["paper"] or "")
            and not row["measure"].startswith("bytes")  # which are far larger than all other numbers
            and (paper := first_number(row["paper"]))
            and (ours := first_number(row["ours"]))
        ]
        if pairs:
            axes.plot(
                *zip(*pairs, strict=True),
                color=COLOURS[at % 7],
                marker=MARKERS[(at + at // 7) % 7],
                ls="",
                alpha=0.7,
                label=path.stem,
            )
            at += 1
    low, high = 0.2, 3000
    axes.plot([low, high], [low, high], color="gray", lw=1, label="equal")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="paper (accuracy, rounds, loss or error)",
        ylabel="ours, in the same unit",
        title="Results of papers and of fedsim, a point for each row",
    )
    axes.legend(fontsize=8, loc="upper left")
    return figure


def first_number(text: str | None) -> float | None:
    """Returns the number with which a text begins; None if it begins with something else.

    >>> first_number("1,474 (2 of 3)"), first_number("in 3 of 3 seeds"), first_number(".658")
    (1474.0, None, 0.658)
    """
    found = re.match(r"\d[\d,]*\.?\d*|\.\d+", text or "")
    return float(found[0].replace(",", "")) if found else None


def results(path: Path) -> Figure:
    """Points: the rows of a reproduction with their least and most over seeds, beside the paper's; a panel for each measure."""
    source = runpy.run_path(str(HERE / "write_reproductions.py"))["SOURCES"].get(path.stem, "paper")
    measures: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(path):
        if first_number(row["ours"].removeprefix("> ")) is not None:
            measures.setdefault(row["measure"], []).append(row)
    # The measures that the paper has come first, then those with most rows.
    order = sorted(measures, key=lambda name: (-sum(map(_is_published, measures[name])), -len(measures[name])))
    # A measure with the results of the first one, such as that of the client which is the worst, would repeat its panel.
    cells = {name: [row["ours"] for row in rows] for name, rows in measures.items()}
    distinct = [name for name in order if cells[name] != cells[order[0]]]
    shown = [(name, _most_telling(measures[name])) for name in [*order[:1], *distinct[:1]]]
    heights = [len(rows) + 2.5 for _, rows in shown]
    figure = Figure(figsize=(8, 0.24 * sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(panels, shown, strict=True):
        drawn: list[float] = []
        for at, row in enumerate(rows):
            ours = first_number(row["ours"].removeprefix("> "))
            assert ours is not None
            if row["ours"].startswith("> "):
                axes.plot(ours, at, marker=">", color=COLOURS[0], mfc="none", ls="")
                axes.annotate(
                    f"more than {ours:,g}", (ours, at), (-6, 0), textcoords="offset points", fontsize=8, ha="right", va="center"
                )
                drawn.append(ours)
                continue
            values = [value for value in row["values"] or [] if value is not None] or [ours]
            # The text may be in per cent. It may also begin with the median, or with the first of two numbers.
            scale = 100 if ours > 50 * sum(values) / len(values) else 1
            axes.plot([scale * min(values), scale * max(values)], [at, at], color=COLOURS[0], lw=2, alpha=0.5)
            axes.plot(
                ours,
                at,
                marker="o",
                color=COLOURS[0],
                ls="",
                label=None if at else "fedsim (line: least and most of the seeds)",
            )
            drawn += [scale * min(values), scale * max(values)]
            if (paper := first_number(row["paper"])) is not None:
                label = None if source in [line.get_label() for line in axes.lines] else source
                axes.plot(paper, at, marker="D", color=COLOURS[4], mfc="none", ls="", label=label)
                drawn.append(paper)
        axes.set_yticks(range(len(rows)), [textwrap.shorten(row["case"], 64, placeholder=" …") for row in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
        if min(drawn) > 0 and max(drawn) > 20 * min(drawn):
            axes.set_xscale("log")
        rest = len(measures[name]) - len(rows)
        axes.set_xlabel(name + (f" ({len(rows)} of {len(rows) + rest} rows)" if rest else ""), fontsize=9)
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return figure


def _is_published(row: dict[str, Any]) -> bool:
    return first_number(row["paper"]) is not None


def _most_telling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns as many rows as a panel has, those with a paper's number before the others, in their order."""
    kept = sorted(range(len(rows)), key=lambda at: not _is_published(rows[at]))[:_MOST_ROWS]
    return [rows[at] for at in sorted(kept)]


def simulated_time() -> Figure:
    """Bars: simulated seconds to a target; points: accuracy against simulated time with faults."""
    figure, (left, right) = _axes(2, width=10, height=4)
    rows = [row for row in _rows(REPRODUCTIONS / "unus_staleness.json") if row["id"].endswith("-methods")]
    for place, data in enumerate(("digits", "FEMNIST")):
        timed = [row for row in rows if row["case"].startswith(data) and row["measure"].startswith("simulated seconds")]
        for at, row in enumerate(timed):
            values = [value for value in row["values"] if value is not None]
            mean = sum(values) / len(values)
            errors = [[mean - min(values)], [max(values) - mean]]
            name = row["case"].partition(": ")[2] if place == 0 else None
            left.bar(
                place + (at - 1.5) * 0.2, mean, 0.18, yerr=errors, capsize=2, color=COLOURS[at], hatch=HATCHES[at], label=name
            )
    targets = ["digits, to 93 %", "FEMNIST, 300 writers, to 60 %"]
    left.set_xticks(range(2), targets)
    left.set(ylabel="simulated seconds (least and most of 3 seeds)", title="Time to a target accuracy")
    left.legend(fontsize=8)
    cases: dict[str, dict[str, list[float]]] = {}
    for row in _rows(REPRODUCTIONS / "unus_faults.json"):
        cases.setdefault(row["case"], {})[row["measure"]] = row["values"]
    drawn: dict[str, int] = {}
    for case, measures in cases.items():
        accuracy, times = measures.get("test accuracy, %"), measures.get("simulated time, multiple of that without faults")
        if case.startswith("digits") and accuracy and times:
            kind = " and ".join(word for word in ("messages", "clients", "repetitions") if word in case)
            at = drawn.setdefault(kind, len(drawn))
            label = None if kind in [line.get_label() for line in right.lines] else kind
            right.plot(
                sum(times) / len(times),
                sum(accuracy) / len(accuracy),
                color=COLOURS[at % 7],
                marker=MARKERS[at % 7],
                ls="",
                markersize=7,
                label=label,
            )
    right.set(
        xlabel="simulated time, as a multiple of that without faults", ylabel="test accuracy, %", title="Digits with faults"
    )
    right.legend(fontsize=8, title="faults of")
    return figure


def round_() -> Figure:
    """A drawing of one round."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(-0.6, 4))
    style: dict[str, Any] = {"boxstyle": "round,pad=0.5", "facecolor": "white", "linewidth": 1.5}
    arrow: dict[str, Any] = {"arrowstyle": "->", "color": "gray", "linewidth": 1.3}

    def box(x: float, y: float, text: str, colour: str) -> None:
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox={**style, "edgecolor": colour})

    box(0.9, 2, "server state\nof round r", COLOURS[0])
    box(2.9, 2, "broadcast\n(downlink compressor)", COLOURS[4])
    box(8.1, 2, "aggregate\n(mean, median, ...)", COLOURS[4])
    axes.annotate("", (2.0, 2), (1.5, 2), arrowprops=arrow)
    for y, name in ((3.4, "client 1"), (2, "client 2"), (0.6, "client n")):
        box(5.5, y, f"{name}: local steps on its\nexamples, then compressor", COLOURS[2])
        axes.annotate("", (4.4, y), (3.85, 2), arrowprops=arrow)
        axes.annotate("", (7.2, 2), (6.6, y), arrowprops=arrow)
    box(4.5, -0.4, "server_update: the server state of round r + 1, and info", COLOURS[0])
    axes.annotate("", (6.9, -0.4), (8.1, 1.5), arrowprops={**arrow, "connectionstyle": "angle,angleA=90,angleB=0"})
    axes.annotate("", (0.9, 1.5), (2.1, -0.4), arrowprops={**arrow, "connectionstyle": "angle,angleA=0,angleB=90"})
    axes.set_title("One round: algorithm.apply(state, cohort)")
    return figure


FIGURES: dict[str, tuple[Callable[[], Figure], list[Path]]] = {
    "speed": (speed, [RESULTS / "cpu-rounds.json"]),
    "clients": (clients, [RESULTS / "cpu-cohorts.json"]),
    "bytes": (bytes_, [REPRODUCTIONS / "compression.json"]),
    "nmse": (nmse, [REPRODUCTIONS / "nmse_and_bytes.json"]),
    "attacks": (attacks, [REPRODUCTIONS / "robustness.json"]),
    # The column *paper* of nmse_and_bytes has laws of theory.
    "papers": (papers, sorted(path for path in REPRODUCTIONS.glob("*.json") if path.stem != "nmse_and_bytes")),
    "simulated_time": (simulated_time, [REPRODUCTIONS / "unus_staleness.json", REPRODUCTIONS / "unus_faults.json"]),
    "round": (round_, []),
}
# A picture for each reproduction that none of these shows alone.
_SHOWN = {path for name, (_, paths) in FIGURES.items() if name != "papers" for path in paths}
FIGURES |= {
    f"results_{path.stem}": (functools.partial(results, path), [path])
    for path in sorted(REPRODUCTIONS.glob("*.json"))
    if path not in _SHOWN
}


def hash_of(name: str) -> str:
    """Returns the hash of the results that a picture shows."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in FIGURES[name][1])).hexdigest()


def main(*names: str) -> None:
    mpl.rcParams["hatch.linewidth"] = 0.5
    (HERE / "figures").mkdir(exist_ok=True)
    for name in names or FIGURES:
        figure = FIGURES[name][0]()
        figure.savefig(HERE / "figures" / f"{name}.png", dpi=110, metadata={"Software": None, "Description": hash_of(name)})


if __name__ == "__main__":
    main(*sys.argv[1:])
