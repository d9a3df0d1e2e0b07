"""Writes the committed figures into the README: ``python -m benchmarks.readme``. No number there is typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
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
        ]
    )


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: block(), README.read_text()))
