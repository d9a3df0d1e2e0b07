"""`report`: runs as one HTML page, which needs neither other files nor a network."""

from __future__ import annotations

import csv
import html
import json
import math
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedsim.comparison._outcome import Outcome, outcome_of
from fedsim.comparison._runs import RecordedRun, differing_fields, preferred_metric
from fedsim.run_files import SPLITS, megabytes_of, rounds_of, scalar_metrics, simulated_seconds_of, wall_seconds_of

_MOST_POINTS = 400  # of a curve with a value per round
_MOST_CLIENTS = 200  # points of a distribution over clients
_COSTS = ("megabytes", "simulated_seconds", "seconds")


def report(runs: Sequence[RecordedRun], title: str = "fedsim: report of runs") -> str:
    """Returns an HTML page of runs: what differs between them, their metrics and costs, curves, and results of clients.

    The page shows values under the pointer, follows the light or dark mode of the browser, and loads nothing from elsewhere.

    Args:
      runs: those of `read_runs`.
      title: of the page.

    Raises:
      ValueError: there are no runs.

    >>> run = RecordedRun(folder=Path("runs/a"), fields={"mu": 1}, seed=0, rounds=1, history=[{"round": 1, "test_loss": 0.5}])
    >>> page = report([run])
    >>> "<h1>fedsim: report of runs</h1>" in page, "https:" in page
    (True, False)
    """
    if not runs:
        raise ValueError("Expected at least one run, got none: give the folder of a run or a sweep.")
    differing = differing_fields(runs)
    names = [_name(run, differing) for run in runs]
    data = [_data(number, name, run) for number, (name, run) in enumerate(zip(names, runs, strict=True))]
    parts = [f'<p class="note">{_summary(runs)}</p>', "<h2>Runs</h2>", _runs_table(runs, names, differing)]
    parts += [
        '<p class="note">Best: the round that is best by validation data if the run has some, and otherwise by test data, '
        "which makes the value optimistic. Last ten: the mean of the last ten evaluations.</p>",
        "<h2>Curves</h2>",
        '<div class="controls"><label>Metric <select id="metric"></select></label>'
        '<label>Against <select id="axis"></select></label></div><div id="curves" class="plot"></div>',
    ]
    if any(each["clients"] for each in data):
        parts += [
            "<h2>Clients</h2>",
            '<p class="note">The values of the last evaluation for each client, in increasing order: the worst tenth is at one '
            "end.</p>",
            '<div class="controls"><label>Metric <select id="client-metric"></select></label></div>'
            '<div id="clients" class="plot"></div>',
        ]
    if any(each["staleness"] for each in data):
        parts += ["<h2>Staleness</h2>", '<div id="staleness" class="plot"></div>']
    parts.append(_configuration(runs, differing))
    template = string.Template(resources.files("fedsim.comparison").joinpath("report.html").read_text(encoding="utf-8"))
    # "<" would end the script in which the data are.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.substitute(title=html.escape(title), body="\n".join(parts), data=text)


def _name(run: RecordedRun, differing: Sequence[str]) -> str:
    values = [f"{name}={run.fields.get(name)}" for name in differing]
    return ", ".join([*values, f"seed={run.seed}"])


def _summary(runs: Sequence[RecordedRun]) -> str:
    finished = sum(run.is_finished for run in runs)
    return html.escape(f"{len(runs)} run{'s' * (len(runs) > 1)}, {finished} finished.")


def _runs_table(runs: Sequence[RecordedRun], names: Sequence[str], differing: Sequence[str]) -> str:
    """Returns the table of the runs: state, what differs, the values of each metric, and what the run took."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.last))
    heads = ["run", *differing, "seed", "state"]
    cells = [f'<th class="text">{html.escape(head.replace("_", " "))}</th>' for head in heads]
    cells += [f"<th>{html.escape(name.replace('_', ' '))}<br>last / best / last ten</th>" for name in metrics]
    cells += ["<th>best round</th>", "<th>MB</th>", "<th>simulated s</th>", "<th>s</th>"]
    rows = [f"<thead><tr>{''.join(cells)}</tr></thead><tbody>"]
    for number, run in enumerate(runs):
        outcomes = _outcomes(run)
        best = next((each.best_round for each in outcomes.values()), None)
        row = [f'<td class="text"><span class="key" data-number="{number}"></span>{html.escape(run.folder.name)}</td>']
        row += [f'<td class="text">{html.escape(str(run.fields.get(name, "")))}</td>' for name in differing]
        row += [f'<td class="text">{html.escape(str(value))}</td>' for value in (run.seed, run.state)]
        for name in metrics:
            reached = outcomes.get(name)
            values = (reached.last, reached.best, reached.last10) if reached else (run.last.get(name), None, None)
            row.append(f"<td>{' / '.join(map(_number, values))}</td>")
        row.append(f"<td>{'-' if best is None else best}</td>")
        totals = _axes(run)
        row += [f"<td>{_number(totals[axis][-1] if axis in totals else None)}</td>" for axis in _COSTS]
        rows.append(f"<tr>{''.join(row)}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</tbody></table></div>'


def _outcomes(run: RecordedRun) -> dict[str, Outcome]:
    """Returns what a run has reached in each metric; rounds are selected by validation data, if there are any."""
    for split in SPLITS:
        if names := [name for name in run.last if run.better(name) and name.startswith(f"{split}_")]:
            return {name: outcome_of(run, name, _first(names)) for name in run.last}
    return {}


def _first(names: Sequence[str]) -> str:
    """Returns the name of the metric by which runs are usually compared."""
    metric = preferred_metric(names)
    return next(name for name in names if metric is None or name.partition("_")[2] == metric)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _axes(run: RecordedRun) -> dict[str, list[float]]:
    """Returns for each line of the history the round, and what the run had sent and taken until then, where it has this."""
    found = {
        "round": rounds_of(run.history),
        "megabytes": megabytes_of(run.history),
        "simulated_seconds": simulated_seconds_of(run.history),
        "seconds": wall_seconds_of(run.history),
    }
    return {name: values for name, values in found.items() if any(values)}


def _data(number: int, name: str, run: RecordedRun) -> dict[str, Any]:
    """Returns what the page draws of a run, of values that JSON has."""
    curves: dict[str, list[tuple[int, Any]]] = {}
    evaluated = list(run.last)
    losses = [at for at, line in enumerate(run.history) if "loss" in line and "seconds" in line]
    shown = set(losses[:: -(-len(losses) // _MOST_POINTS)] if losses else [])
    kept = sorted(shown | {at for at, line in enumerate(run.history) if scalar_metrics(line)})
    for place, at in enumerate(kept):
        line = run.history[at]
        for metric in evaluated:
            if metric in line:
                curves.setdefault(metric, []).append((place, _rounded(line[metric])))
                for kind in ("mean", "worst10"):
                    if (key := f"{metric}_clients_{kind}") in line:
                        curves.setdefault(key, []).append((place, _rounded(line[key])))
        if at in shown:
            curves.setdefault("training_loss", []).append((place, _rounded(line["loss"])))
    axes = {key: [_rounded(values[at]) for at in kept] for key, values in _axes(run).items()}
    ages: list[int] = []
    for line in run.history:
        counts = line.get("staleness_counts") or []
        ages += [0] * (len(counts) - len(ages))
        ages = [total + (counts[age] if age < len(counts) else 0) for age, total in enumerate(ages)]
    return {"number": number, "name": name, "axes": axes, "curves": curves, "clients": _clients(run.folder), "staleness": ages}


def _clients(folder: Path) -> dict[str, list[tuple[float, float | None]]]:
    """Returns for each metric of ``clients.csv`` the percent of the clients with at most each of some values."""
    try:
        with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return {}
    found = {}
    for name in rows[0] if rows else ():
        if name in ("id", "num_examples"):
            continue
        values = sorted(float(row[name]) for row in rows if row[name])
        places = sorted({round(i * (len(values) - 1) / _MOST_CLIENTS) for i in range(_MOST_CLIENTS + 1)}) if values else []
        found[name] = [(round(100 * (at + 1) / len(values), 2), _rounded(values[at])) for at in places]
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _configuration(runs: Sequence[RecordedRun], differing: Sequence[str]) -> str:
    """Returns the fields that all runs have in common, and the versions of packages of the first run."""
    same = {name: value for name, value in runs[0].fields.items() if name not in differing}
    rows = [
        f'<tr><td class="text">{html.escape(name)}</td><td class="text">{html.escape(str(value))}</td></tr>'
        for name, value in {**same, **{f"version of {name}": value for name, value in runs[0].versions.items()}}.items()
    ]
    return (
        "<h2>Configuration</h2><details><summary>What all runs have in common</summary>"
        f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div></details>'
    )
