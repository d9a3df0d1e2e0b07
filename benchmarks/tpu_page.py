"""The table and the picture of docs/scale.md, from what ``python -m benchmarks.tpu`` has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tpu import CHIPS, RESULT, TOPOLOGIES, seconds

Rows = list[dict[str, Any]]


def rows(table: str, **values: Any) -> Rows:
    """Returns the results of a table in which there are these values, the smallest cohort first."""
    found = [row for row in json.loads(RESULT.read_text())["rows"] if row["table"] == table]
    return sorted((row for row in found if values.items() <= row.items()), key=lambda row: row["cohort"])


def section() -> str:
    """Returns the text between the two ``tpu`` markers."""
    found = [row for row in rows("topologies") if "failed" not in row]
    models = list(dict.fromkeys(row["model"] for row in found))
    found.sort(key=lambda row: (models.index(row["model"]), list(TOPOLOGIES).index(row["topology"])))
    lines = [
        f"{_about(found)} A cohort has two clients for each chip, and a client takes two local steps. Batches have 4 sequences "
        "of 1,024 tokens (language models), 20 images (CNN) or 16 sentences (LSTM).",
        "",
        "| model | chips | mesh | clients of a round | compilation | FLOPs of the program | memory of a chip | all-reduced | "
        "estimate |",
        "| --- " * 9 + "|",
    ]
    for row in found:
        mesh = f"clients={row['clients']}" + f", model={row['chips']}" * (row["chips"] > 1)
        compiled = f"{row['compile_s']:.0f} s" + (
            f" ({row['compile_processor_s']:.0f} s)" if "compile_processor_s" in row else ""
        )
        reduced = f"{row['all_reduced_over_clients'] / row['bytes_of_share']:.3f}" if row["clients"] > 1 else "–"
        cells = (
            row["model"], row["topology"], mesh, f"{row['cohort']:,}", compiled, f"{row['flops_of_program'] / 1e9:,.3f} G",
            f"{row['bytes_of_chip'] / 1e6:,.1f} MB", reduced, f"{1e3 * seconds(row):,.3g} ms",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_bullets(found), ""])


def _bullets(found: Rows) -> list[str]:
    lines = []
    for model in dict.fromkeys(row["model"] for row in found):
        same = [row for row in found if row["model"] == model and row["topology"].startswith("v5e") and row["clients"] > 1]
        if len(same) < 2:
            continue
        spreads = (max(row[name] for row in same) / min(row[name] for row in same) for name in _CONSTANT)
        flops, memory = (f"{100 * (spread - 1):.2f} %" for spread in spreads)
        chips = f"{TOPOLOGIES[same[0]['topology']]} to {TOPOLOGIES[same[-1]['topology']]}"
        lines.append(f"- {model} on v5e, {chips} chips: FLOPs of the program differ by {flops}, memory of a chip by {memory}.")
    same = [row for row in rows("cohorts") if "failed" not in row]
    counts, times = _listed(same, "cohort"), _listed(same, "compile_processor_s")
    lines.append(f"- lm_350m on v5e:4x8, rounds of {counts} clients: the compiler takes {times} s of the processor.")
    for loop, name in _LOOPS.items():
        same = [row for row in rows("loops", loop=loop) if "failed" not in row]
        counts, times = _listed(same, "cohort"), _listed(same, "compile_processor_s")
        flops = ", ".join(f"{row['flops_of_program'] / 1e9:.2f}" for row in same)
        lines.append(
            f"- EMNIST's CNN on one chip, rounds of {counts} clients by {name}: the compiler takes {times} s of the processor, "
            f"and the program has {flops} GFLOP."
        )
    return lines


_CONSTANT = ("flops_of_program", "bytes_of_chip")
_LOOPS = {"fedsim": "fedsim", "python": "two Python loops"}


def _listed(of: Rows, name: str) -> str:
    return ", ".join(f"{row[name]:,.0f}" for row in of)


def _about(found: Rows) -> str:
    first = found[0]
    days = " to ".join(sorted({row["date"][:10] for row in found}))
    busy = ", beside other work on the machine" if any(row["beside other work"] for row in found) else ""
    chips = "; ".join(
        f"{name} {chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:,.0f} GB/s" for name, chip in CHIPS.items()
    )
    return (
        f"{first['cpu']}, {first['cores']} cores, {days}, jax {first['jax']}, libtpu {first['libtpu']}{busy}; in parentheses "
        f"the time of the processor. The estimate of a round is that of a roofline with published figures ({chips})."
    )


def draw(file: Path) -> None:
    """Draws chips, loops and the round of Stack Overflow's LSTM."""
    from fedsim.plots._canvas import logarithmic, new_figure, style

    figure = new_figure(11, 3.4)
    chips, loops, times = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["model"] for row in rows("topologies")))
    for number, model in enumerate(names):
        same = [row for row in rows("topologies", model=model) if row["topology"].startswith("v5e") and "failed" not in row]
        if len(same) < 2:
            continue
        for at, (name, label) in enumerate(zip(_CONSTANT, ("FLOPs", "memory"), strict=True)):
            look = style(number) | {"linestyle": "-" if at == 0 else ":"}
            x, y = [TOPOLOGIES[row["topology"]] for row in same], [row[name] / same[0][name] for row in same]
            chips.plot(x, y, label=f"{model}, {label}", **look)
    chips.set(title="program of a v5e chip", xlabel="chips, two clients for each", ylabel="relative to 8 chips", ylim=(0, 1.5))
    for number, (loop, label) in enumerate(_LOOPS.items()):
        same = [row for row in rows("loops", loop=loop) if "failed" not in row]
        loops.plot([row["cohort"] for row in same], [row["compile_processor_s"] for row in same], label=label, **style(number))
    loops.set(title="compilation, EMNIST's CNN", xlabel="clients of a round, on one chip", ylabel="seconds of the processor")
    loops.set_ylim(bottom=0)
    for number, (topology, clients) in enumerate([("cpu", 1), ("cpu", 8), ("v5e:2x4", 1), ("v5e:2x4", 8)]):
        same = [row for row in rows("FedJAX", topology=topology, clients=clients) if "failed" not in row]
        if not same:
            continue
        y = [min(row["round_s"]) if topology == "cpu" else seconds(row) for row in same]
        label = f"virtual CPU devices: {clients}, measured" if topology == "cpu" else f"chips of v5e: {clients}, estimate"
        times.plot([row["cohort"] for row in same], y, label=label, **style(number))
    times.set(title="a round, Stack Overflow's LSTM", xlabel="clients of a round", ylabel="seconds")
    for axes in (chips, times):
        logarithmic(axes.xaxis)
    logarithmic(times.yaxis)
    for axes in (chips, loops, times):
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(file)
