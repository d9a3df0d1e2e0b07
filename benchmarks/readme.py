"""Writes the committed figures into the README: ``python -m benchmarks.readme``. No number there is typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"(?<=<!-- speeds -->\n).*?(?=<!-- /speeds -->)", re.DOTALL)
_NAMES = {
    "fedsim": "**fedsim**",
    "fedsim, one round a dispatch": "fedsim, one round a dispatch",
    "floor": "bare SGD steps, nothing federated",
    "fedjax": "FedJAX",
    "drjax": "DrJAX",
    "pfl": "pfl-research (PyTorch)",
    "flower": "Flower (Ray, PyTorch)",
}


def block(device: str = "cpu") -> str:
    """The README's text between its two marks, from ``results/<device>-*.json``."""
    tables = {path.stem.partition("-")[2]: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{device}-*.json"))}
    return f"{_rounds(tables['rounds'])}\n\n{_others(tables)}\n"


def _rounds(table: dict[str, Any]) -> str:
    models = {part["rows"][0]["model"]: {row["contender"]: row for row in part["rows"]} for part in table["parts"]}
    versions: dict[str, str] = {}
    for part in table["parts"]:
        for about in part["about"].values():
            versions = about.get("versions", {}) | versions
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    rows = [
        "Microseconds per client step, whole rounds counted (sampling, shuffling, batching, training, aggregation, server "
        f"step), and in brackets how many times fedsim's. Federated EMNIST shapes, 10 clients a round, batch 20, server Adam. "
        f"{table['cpu']}, {table['cores']} cores, {table['date'][:10]}; {named}.",
        "",
        "| | " + " | ".join(models) + " |",
        "| --- " * (len(models) + 1) + "|",
    ]
    for contender, name in _NAMES.items():
        cells = []
        for by_contender in models.values():
            row = by_contender.get(contender, {})
            time, times = row.get("us_per_step"), row.get("relative_to_fedsim")
            cells.append("–" if time is None else f"{time:,.0f}" + ("" if contender == "fedsim" else f" ({times:.3g}×)"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _others(tables: dict[str, Any]) -> str:
    scale = "; ".join(
        f"{row['model']} {row['us_per_step']:.2f}× time a step, {row['peak_mib']:.2f}× peak memory"
        for part in tables["scale"]["parts"]
        for row in part["rows"]
        if row["clients"] == "ratio"
    )
    (mnist,) = tables["mnist"]["parts"][0]["rows"]
    femnist = {row["contender"]: row for row in tables["femnist"]["parts"][0]["rows"]}
    evaluation = {row["contender"]: row for row in tables["evaluation"]["parts"][0]["rows"]}
    ours, theirs = femnist["fedsim"], femnist["fedjax"]
    return "\n".join(
        [
            f"- 1,000 clients a round against 10: {scale}.",
            f"- Softmax regression, 1,000 clients of 69 examples, 10 a round, 100 rounds: {mnist['seconds']:.2f} s.",
            f"- Real FEMNIST (300 writers), dense, {ours['rounds']} rounds, {ours['seeds']} seeds: test accuracy "
            f"{ours['accuracy']:.3f} in {ours['seconds']:.1f} s; FedJAX {theirs['accuracy']:.3f} in {theirs['seconds']:.1f} s.",
            f"- Evaluation of 77,483 examples of 3,400 clients, dense: {evaluation['fedsim']['seconds']:.2f} s; FedJAX "
            f"{evaluation['fedjax']['seconds']:.2f} s ({evaluation['fedjax']['relative_to_fedsim']:.1f}×).",
            *_catalogues(tables),
            *_keeping(tables),
            *_large(tables),
        ]
    )


def _catalogues(tables: dict[str, Any]) -> list[str]:
    """The tables over whole registries, of those that have been measured: the rows that have a bound."""
    heads = {
        "algorithms": ("per_gradient", "Every algorithm that trains: time of a round per gradient, of FedAvg's"),
        "aggregators": (
            "to_mean",
            "Every streaming aggregator and compressor: time of a round, of the plain mean's",
        ),
        "fedjax-algorithms": (
            "times_as_fast",
            "FedJAX's own algorithms and quantizers, time of a step, of fedsim's",
        ),
    }
    lines = []
    for table, (figure, what) in heads.items():
        # Each table was measured by itself, and not always on the machine of the others.
        what = f"{what} ({tables[table]['cpu']})" if table in tables else what
        measured = [row for part in tables.get(table, {"parts": []})["parts"] for row in part["rows"]]
        for model in dict.fromkeys(row["model"] for row in measured):
            bound = (row for row in measured if row["model"] == model and "holds" in row)
            rows = sorted(bound, key=lambda row: row[figure])
            named = [f"{row.get('algorithm') or row['aggregator']} {row[figure]:.2f}×" for row in rows]
            if not rows:
                continue
            if table != "fedjax-algorithms":
                middle = f"{median(row[figure] for row in rows):.2f}× in the middle, most:"
                named = [f"{middle} {named[-1]}", *named[-2:-4:-1]]
            lines.append(f"- {what}, {model}: {', '.join(named)}.")
    return lines


def _keeping(tables: dict[str, Any]) -> list[str]:
    """Clients that keep something, if that has been measured."""
    rows = tables["memory"]["parts"][0]["rows"] if "memory" in tables else []
    return [
        f"- SCAFFOLD over {row['clients']:,} clients that keep {row['row_mb']:.2f} MB each, {row['cohort']} a round, stopped "
        f"and resumed half way: {row['ms_per_round']:.0f} ms a round, {row['peak_mb']:,.0f} MB of memory at most, and "
        f"{row['disk_mb'] / 1e3:.1f} GB of disk for the {row['seen']:,} that came."
        for row in rows[:1]
    ]


def _large(tables: dict[str, Any]) -> list[str]:
    lstm = {row["contender"]: row for row in tables["lstm"]["parts"][0]["rows"]}
    (tokens,), rounds, memory = (part["rows"] for part in tables["data"]["parts"])
    conversion = {row["contender"]: row for row in tables["conversion"]["parts"][0]["rows"]}
    large = " and ".join(f"{row['relative_to_smallest']:.2f} ({row['memory']})" for row in rounds if row["population"] == 10**6)
    streamed = ", ".join(f"{row['stream_to_resident']:.2f} ({row['what']})" for row in memory if row["what"] != "both")
    on = tables["data"]
    return [
        "",
        f"Text and large populations, on another machine ({on['cpu']}, {on['cores']} cores, {on['date'][:10]}):",
        "",
        f"- Next word, LSTM of 670, 10 clients a round, batch 16: {lstm['fedsim']['us_per_step'] / 1e3:.0f} ms a client step; "
        f"bare SGD steps {lstm['floor']['relative_to_fedsim']:.2f}×, FedJAX {lstm['fedjax']['relative_to_fedsim']:.2f}×.",
        f"- A file of {tokens['clients']:,} clients and {tokens['sequences']:,} sequences opens in "
        f"{1e3 * tokens['seconds']:.0f} ms and {tokens['resident_mb']:.0f} MB; a cohort of 1,000 of it is sampled in "
        f"{tokens['sample_ms']:.1f} ms and gathered in {tokens['gather_ms']:.1f} ms ({tokens['gb_per_s']:.1f} GB/s).",
        f"- A round of 100 clients of 1,000,000 takes, against one of 1,000, times {large}.",
        f"- EMNIST's true client sizes, CNN, streamed cohort by cohort against resident on the device: {streamed}.",
        f"- Conversion of FedJAX's SQLite into a packed file: {conversion['fedsim']['seconds']:.2f} s, at most "
        f"{conversion['fedsim']['peak_mib']:.0f} MiB; FedJAX reads it in {conversion['fedjax']['seconds']:.2f} s "
        f"({conversion['fedjax']['relative_to_fedsim']:.2f}×).",
    ]


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: block(), README.read_text()))
