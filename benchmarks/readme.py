"""Writes the sections of ``PAGES``, all of which are about measured times, from the committed results.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks import tpu_page

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
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
    """Returns the table of ``docs/speed.md`` between the two ``speeds`` markers, from ``results/<device>-*.json``."""
    tables = {path.stem.partition("-")[2]: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{device}-*.json"))}
    if (gpu := RESULTS / "gpu-fedsim.json").exists():
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
        f"per round, batch size 20, Adam on the server. {_machine(table)}; {named}.",
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
    by_clients: dict[str, dict[Any, float]] = {}
    for part in tables["scale"]["parts"]:
        for row in part["rows"]:
            by_clients.setdefault(row["model"], {})[row["clients"]] = row["us_per_step"]
    scale = ", ".join(f"{model} {times[10]:,.0f} and {times[1000]:,.0f}" for model, times in by_clients.items())
    return "\n".join(
        [
            "- Evaluating the dense model on 77,483 examples of 3,400 clients takes "
            f"{evaluation['fedsim']['seconds']:.2f} s; with FedJAX, {evaluation['fedjax']['seconds']:.2f} s "
            f"({evaluation['fedjax']['relative_to_fedsim']:.1f}×; {_machine(tables['evaluation'])}).",
            f"- Microseconds per client step with 10 and with 1,000 clients per round, measured together: {scale} "
            f"({_machine(tables['scale'])}).",
            f"- A round over 1,000,000 clients, streamed from a file, takes {_streamed(tables['data']):.2f} times as "
            f"long as over 1,000 ({_machine(tables['data'])}).",
            _gpu(tables.get("gpu")),
        ]
    )


def _gpu(table: dict[str, Any] | None) -> str:
    if table is None:
        return "- This version has not been measured on a GPU; `python -m benchmarks.gpu` does it."
    rows = "; ".join(
        f"{row['model']}, {row['clients']:,} clients: {row['ms a round']:.3g} ms"
        + (" (deterministic)" if row["deterministic"] else "")
        for row in table["rows"]
    )
    return f"- {table['device']} (jax {table['jax']}, {table['date'][:10]}), time per round: {rows}."


def primitives() -> str:
    """Returns the table of ``docs/primitives.md`` between the two ``measured`` markers, from ``cpu-primitives.json``."""
    table = json.loads((RESULTS / "cpu-primitives.json").read_text())
    derivative = next(row for row in table["rows"] if "derivative" in row)
    measured: dict[str, set[int]] = {}
    for row in table["rows"]:
        measured.setdefault(_machine(row["stamp"]), set()).add(row.get("devices", 1))
    machines = "; ".join(
        f"{name} ({' and '.join(map(str, sorted(own)))} device{'s' * (own != {1})})" for name, own in measured.items()
    )
    rows = [
        f"{machines}. Milliseconds per round, the shortest of seven.",
        "",
        "| model, sizes of the clients, devices | program | DrJAX | `FedAvg` |",
        "| --- | --- | --- | --- |",
    ]
    for row in sorted((row for row in table["rows"] if "devices" in row), key=lambda row: row["devices"]):
        sizes = "equal" if row["clients"] == "equal" else "different"
        times = " | ".join(f"{row[name]:.1f}" for name in ("primitives", "DrJAX", "FedAvg"))
        rows.append(f"| {row['model']}, {sizes}, {row['devices']} | {times} |")
    forward, backward = derivative["forward"], derivative["backward"]
    rows += [
        "",
        f"Ten rounds of FedAvg (dense, 10 clients of 20 steps) take {forward:,.0f} ms, and with the derivative by the learning "
        f"rate {backward:,.0f} ms ({backward / forward:.1f}×). Temporary memory is {derivative['forward MB']:.1f} and "
        f"{derivative['backward MB']:.1f} MB.",
    ]
    return "\n".join(rows) + "\n"


def decentralized() -> str:
    """Returns the measured times of ``benchmarks/README.md``, from ``cpu-decentralized.json``."""
    table = json.loads((RESULTS / "cpu-decentralized.json").read_text())
    ratios = {
        name: statistics.median(ring["torch"]["seconds"]) / statistics.median(ring["fedsim"]["Pmap"])
        for name, ring in table["ring"].items()
    }
    named = " and ".join(f"{ratio:.1f} times as fast with {name}" for name, ratio in ratios.items())
    return (
        f"{_machine(table)}: fedsim is {named} (medians of five). A round of 10,000 nodes of the logistic model on a random\n"
        f"4-regular graph takes {table['many']['ratio']:.1f} times as long as a round of FedAvg of the same clients.\n"
    )


def notebooks() -> str:
    """Returns the table of ``docs/notebooks.md`` with the seconds of ``cpu-notebooks.json`` in its last column."""
    table = json.loads((RESULTS / "cpu-notebooks.json").read_text())
    text = section("docs/notebooks.md", "times").group()
    for name, seconds in table["processor_seconds"].items():
        text = re.sub(rf"(?m)(/{name}\.ipynb\).*\|)[^|\n]*\|$", rf"\1 {seconds:.0f} s |", text)
    return re.sub(
        r"(?m)^Measured .*$", f"Measured by `python -m benchmarks.notebooks`: {_machine(table)}; jax {table['jax']}.", text
    )


def _machine(stamp: dict[str, Any]) -> str:
    commit, _, changed = stamp["commit"].partition(" ")
    return f"{stamp['cpu']}, {stamp['cores']} cores, {stamp['date'][:10]}, commit {commit[:7]}{' ' * bool(changed)}{changed}"


def numbers() -> str:
    """Returns the measured reasons for fedsim in the README, each with the machine, the date and the commit of its result."""
    tables = {name: json.loads((RESULTS / f"cpu-{name}.json").read_text()) for name in ("rounds", "evaluation", "data")}
    models = [part["rows"] for part in tables["rounds"]["parts"]]
    named = ", ".join(rows[0]["model"].replace("cnn", "CNN") for rows in models)
    ratios = []
    for contender in ("fedjax", "drjax", "pfl", "flower"):
        times = [row["relative_to_fedsim"] for rows in models for row in rows if row["contender"] == contender]
        ratios.append(f"{_NAMES[contender].partition(' ')[0]} {', '.join(f'{ratio:.3g}' for ratio in times)}")
    fedjax = next(row for row in tables["evaluation"]["parts"][0]["rows"] if row["contender"] == "fedjax")
    return (
        f"- **Fast.** Other libraries take these multiples of fedsim's time for the same rounds ({named}): "
        f"{'; '.join(ratios)}.\n"
        f"  Evaluation with FedJAX takes {fedjax['relative_to_fedsim']:.3g} times as long ({_machine(tables['rounds'])}). "
        f"[Speed](docs/speed.md) has all numbers.\n"
        "- **Large populations.** A round over 1,000,000 clients, streamed from a file, takes "
        f"{_streamed(tables['data']):.2f} times as long as over 1,000\n  ({_machine(tables['data'])}).\n"
    )


def _streamed(table: dict[str, Any]) -> float:
    """Returns the time of a round over a million clients whose examples are streamed, relative to one over a thousand."""
    rows = table["parts"][1]["rows"]
    return next(row["relative_to_smallest"] for row in rows if row["population"] == 10**6 and row["memory"] == "stream")


PAGES = {
    ("README.md", "numbers"): numbers,
    ("docs/speed.md", "speeds"): block,
    ("docs/primitives.md", "measured"): primitives,
    ("benchmarks/README.md", "decentralized"): decentralized,
    ("docs/scale.md", "tpu"): tpu_page.section,
    ("docs/notebooks.md", "times"): notebooks,
}


def section(page: str, name: str) -> re.Match[str]:
    """Returns the text between the two markers of a page, without them."""
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found, (page, name)
    return found


def main() -> None:
    for (page, name), text in PAGES.items():
        old = section(page, name)
        (ROOT / page).write_text(old.string[: old.start()] + text() + old.string[old.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
