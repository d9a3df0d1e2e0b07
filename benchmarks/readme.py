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
    if (gpu := RESULTS / "gpu-rounds.json").exists():
        tables["gpu"] = json.loads(gpu.read_text())
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
    evaluation = {row["contender"]: row for row in tables["evaluation"]["parts"][0]["rows"]}
    scale = ", ".join(
        f"{row['model']} {row['us_per_step']:.2f}×"
        for part in tables["scale"]["parts"]
        for row in part["rows"]
        if row["clients"] == "ratio"
    )
    rounds = tables["data"]["parts"][1]["rows"]
    large = next(row["relative_to_smallest"] for row in rounds if row["population"] == 10**6 and row["memory"] == "stream")
    return "\n".join(
        [
            f"- Evaluation of 77,483 examples of 3,400 clients, dense: {evaluation['fedsim']['seconds']:.2f} s; FedJAX "
            f"{evaluation['fedjax']['seconds']:.2f} s ({evaluation['fedjax']['relative_to_fedsim']:.1f}×).",
            f"- Scale: with 1,000 clients a round instead of 10, a client step takes {scale} as long. With a population of "
            f"1,000,000 clients instead of 1,000, streamed from a file, a round takes {large:.2f}× as long.",
            _gpu(tables.get("gpu")),
        ]
    )


def _gpu(table: dict[str, Any] | None) -> str:
    if table is None:
        return "- GPUs: not measured yet; `python -m benchmarks.gpu` prints the table in six minutes."
    rows = ", ".join(
        f"{row['model']} {row['clients']:,} clients {row['ms a round']:.3g} ms"
        + (" (deterministic)" if row["deterministic"] else "")
        for row in table["rows"]
    )
    return f"- {table['device']} (jax {table['jax']}, {table['date'][:10]}), a round: {rows}."


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: block(), README.read_text()))
