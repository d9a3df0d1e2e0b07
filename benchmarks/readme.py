"""Writes the README's section on speed from the committed results: ``python -m benchmarks.readme``."""

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
    "fedsim, one round a dispatch": "fedsim, one round per dispatch",
    "floor": "SGD steps alone, nothing federated",
    "fedjax": "FedJAX",
    "drjax": "DrJAX",
    "pfl": "pfl-research (PyTorch)",
    "flower": "Flower (Ray, PyTorch)",
}


def block(device: str = "cpu") -> str:
    """Returns the README's text between the two ``speeds`` markers, from ``results/<device>-*.json``."""
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
        "Microseconds per client step, and in parentheses the ratio to fedsim's time. Whole rounds are measured: sampling, "
        "shuffling, batching, training, aggregation and server step. Examples have the shapes of Federated EMNIST; 10 clients "
        f"per round, batch size 20, Adam on the server. {table['cpu']}, {table['cores']} cores, {table['date'][:10]}; {named}.",
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
        f"{row['us_per_step']:.2f} ({row['model']})"
        for part in tables["scale"]["parts"]
        for row in part["rows"]
        if row["clients"] == "ratio"
    )
    rounds = tables["data"]["parts"][1]["rows"]
    large = next(row["relative_to_smallest"] for row in rounds if row["population"] == 10**6 and row["memory"] == "stream")
    return "\n".join(
        [
            "- Evaluating the dense model on 77,483 examples of 3,400 clients takes "
            f"{evaluation['fedsim']['seconds']:.2f} s; with FedJAX, {evaluation['fedjax']['seconds']:.2f} s "
            f"({evaluation['fedjax']['relative_to_fedsim']:.1f}×).",
            f"- With 1,000 clients per round instead of 10, the time per client step is multiplied by {scale}.",
            "- With a population of 1,000,000 clients instead of 1,000, streamed from a file, the time per round is multiplied "
            f"by {large:.2f}.",
            _gpu(tables.get("gpu")),
        ]
    )


def _gpu(table: dict[str, Any] | None) -> str:
    if table is None:
        return "- GPUs have not been measured yet; `python -m benchmarks.gpu` measures fedsim on one in six minutes."
    rows = "; ".join(
        f"{row['model']}, {row['clients']:,} clients: {row['ms a round']:.3g} ms"
        + (" (deterministic)" if row["deterministic"] else "")
        for row in table["rows"]
    )
    return f"- {table['device']} (jax {table['jax']}, {table['date'][:10]}), time per round: {rows}."


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: block(), README.read_text()))
