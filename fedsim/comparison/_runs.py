"""`RecordedRun`: what the folder of a run says of it, and the table of several."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.names import better_by_name
from fedsim.run_files import SPLITS, USUAL_METRICS, History, metric_lines, scalar_metrics, shown_number, with_present_names

# They differ between seeds, also in runs that were started in Python.
_OF_THE_SEED = ("seed", "root_key", "cohorts (hash)")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRun:
    """A run as its folder describes it.

    Attributes:
      folder: the run folder.
      fields: its configuration by name, with the hyperparameters of the algorithm, without the seed; and ``code``, a hash of
        the user's own code, if it has some.
      seed: the seed; of a run that was started in Python, a text with its root key.
      rounds: how many rounds it has when it is finished; None if this cannot be read.
      history: the lines of ``metrics.jsonl``.
      problem: why files of the folder cannot be read; empty if they can.
      grid: the values of each varied field of its sweep; empty for a run of its own and for one of a random search.
      drawn: whether its sweep is a random search.
      sweep_size: how many runs its sweep has when all have begun; 0 for a run of its own.
      data: a text that identifies its training, validation and test data; empty if it is not recorded.
      versions: the versions of packages.
      ended: the last ``round``, and the ``rule`` and its ``reason`` if one ended the run. None: it has not ended. Empty if
        this is not known, because an earlier version of fedsim wrote the folder.

    >>> run = RecordedRun(folder=Path("runs/a"), fields={}, seed=0, rounds=2, history=[{"round": 1, "seconds": 0.5}])
    >>> run.state, run.is_finished
    ('round 1 of 2', False)
    """

    folder: Path
    fields: Mapping[str, Any]
    seed: int | str
    rounds: int | None
    history: History
    problem: str = ""
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    drawn: bool = False
    sweep_size: int = 0
    data: str = ""
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ended: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return int(self.history[-1]["round"]) if self.history else 0

    @property
    def ended_early(self) -> bool:
        """Whether a rule (``stop_when``) or a callback has ended the run before its last round.

        If this is not known, a run with a rule whose last line is an evaluation seems to have ended by it.
        """
        if not self.history or self.rounds is None or self.round >= self.rounds:
            return False
        if self.ended is None or self.ended:
            return bool(self.ended and self.ended.get("rule") and self.ended.get("round") == self.round)
        return bool(self.fields.get("stop_when") and scalar_metrics(self.history[-1]))

    @property
    def is_finished(self) -> bool:
        """Whether all rounds have lines in the metrics, or a rule has ended the run, and its last evaluation has one, too.

        If the folder says how a run ended, it also has to say that the run has.
        """
        has_rounds = bool(self.history) and (self.rounds is None or self.round >= self.rounds or self.ended_early)
        return not self.problem and has_rounds and self.ended is not None and not self._lacks_evaluation

    @property
    def _lacks_evaluation(self) -> bool:
        """Whether the run has evaluations, and its last line is none: it was killed after its last round."""
        return any("seconds" not in line for line in self.history) and "seconds" in self.history[-1]

    @property
    def state(self) -> str:
        """How far the run is, in a few words."""
        if self.problem:
            return self.problem
        if self.is_finished and not self.ended_early:
            return "finished"
        if not self.ended_early:
            lacks = "its evaluation" if self._lacks_evaluation else "its last files"
            return f"round {self.round} of {self.rounds}" + f", without {lacks}" * (self.round == self.rounds)
        rule = self.ended["rule"] if self.ended else f"{self.fields['stop_when']}, or interrupted"
        return f"round {self.round} of {self.rounds}: stopped by {rule}"

    def better(self, metric: str) -> str | None:
        """Returns which values of a metric are better, "higher" or "lower"; None if this is not known.

        >>> RecordedRun(folder=Path("a"), fields={}, seed=0, rounds=1, history=[]).better("test_loss")
        'lower'
        """
        said = next((line["better"][metric] for line in self.history if metric in line.get("better", {})), None)
        return said or better_by_name(metric.partition("_")[2])

    @functools.cached_property
    def last(self) -> dict[str, Any]:
        """The last value of each metric of the evaluations; None if it was not finite."""
        return {name: line[name] for line in self.history for name in scalar_metrics(line)}


def read_runs(*folders: str | Path) -> list[RecordedRun]:
    """Returns the runs in folders of runs, of sweeps, or of any of them, each run once.

    Args:
      folders: where to look. Below a folder without a run, all folders are searched.

    Raises:
      ValueError: a folder does not exist, or has no run.

    >>> read_runs("no such folder")
    Traceback (most recent call last):
    ...
    ValueError: Expected a folder with runs, got no such folder, which does not exist: give the folder of a run or a sweep.
    """
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(
                f"Expected a folder with runs, got {folder}, which does not exist: give the folder of a run or a sweep."
            )
        paths = list(_run_folders(folder))
        if not paths:
            raise ValueError(
                f"Expected a folder with runs, got {folder}, in which no folder has a config.json: give the folder of a run or "
                "a sweep."
            )
        for path in paths:
            found.setdefault(path.resolve(), path)
    sweeps = {parent: _sweep(parent) for parent in {path.parent for path in found.values()}}
    return [_read_run(path, sweeps[path.parent]) for path in found.values()]


def runs_table(runs: Sequence[RecordedRun], folder: str | Path = ".") -> str:
    """Returns a table with a line per run: its folder, state, last metrics, seed, and what not all share.

    Args:
      runs: from `read_runs`.
      folder: to which the names of folders are relative.

    >>> runs = [RecordedRun(folder=Path(f"runs/{rate}"), fields={"algorithm": "fedavg", "rate": rate}, seed=0, rounds=1,
    ...                     history=[{"round": 1, "test_accuracy": rate}]) for rate in (0.1, 0.2)]
    >>> print(runs_table(runs, "runs"))
    run  state     test_accuracy  algorithm  seed  setting
    0.1  finished         0.1000  fedavg        0  rate=0.1
    0.2  finished         0.2000  fedavg        0  rate=0.2
    """
    always = ("dataset", "algorithm")
    metrics = _most_important([name for run in runs for name in run.last])
    shared = [name for name in always if any(name in run.fields for run in runs)]
    differing = [name for name in differing_fields(runs) if name not in always]
    rows = [
        [os.path.relpath(run.folder, folder), run.state]
        + [_metric_text(run, name) for name in metrics]
        + [shown_value(run.fields.get(name, "")) for name in shared]
        + [str(run.seed), setting_text({name: run.fields[name] for name in differing if name in run.fields})]
        for run in runs
    ]
    rows = [row if row[-1] else [*row[:-1], ""] for row in rows]
    return aligned(["run", "state", *metrics, *shared, "seed", "setting"], rows, right={*metrics, "seed"})


def differing_fields(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the names of fields with different values. A field that is missing in a run equals None.

    >>> runs = [RecordedRun(folder=Path("a"), fields={"mu": mu, "clip": None}, seed=0, rounds=1, history=[]) for mu in (0, 1)]
    >>> differing_fields(runs)
    ['mu']
    """
    names = dict.fromkeys(name for run in runs for name in run.fields)
    return [name for name in names if len({key_of(run.fields.get(name)) for run in runs}) > 1]


def key_of(value: Any) -> str:
    """Returns a text that is equal for equal values.

    >>> key_of([1, 2]), key_of(1.0) == key_of(1)
    ('[1, 2]', True)
    """
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True, default=str)


def shown_value(value: Any) -> str:
    """Returns a value of a field as tables show it.

    >>> shown_value(0.1 + 0.2), shown_value("fedavg"), shown_value([1, 2])
    ('0.3', 'fedavg', '[1, 2]')
    """
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def setting_text(setting: Mapping[str, Any]) -> str:
    """Returns a setting as tables show it.

    >>> setting_text({"mu": 0.1, "clients": 5})
    'mu=0.1 clients=5'
    """
    return " ".join(f"{name}={shown_value(value)}" for name, value in setting.items())


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], right: set[str]) -> str:
    """Returns a table in which columns have equal widths; those in ``right`` are aligned there.

    >>> print(aligned(["name", "size"], [["a", "10"], ["bcdef", "5"]], {"size"}))
    name   size
    a        10
    bcdef     5
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in [columns, *rows]
    )


def preferred_metric(names: Sequence[str]) -> str | None:
    """Returns the first of those metrics by which runs are usually compared, without the split; None if there is none of them.

    >>> preferred_metric(["test_loss", "test_accuracy"])
    'accuracy'
    """
    metrics = [name.partition("_")[2] for name in names]
    return next((name for name in USUAL_METRICS if name in metrics), None)


def _most_important(names: Sequence[str]) -> list[str]:
    """Returns the names of losses and accuracies, test data first; all names if there are none."""
    different = list(dict.fromkeys(names))
    known = [f"{split}_{metric}" for split in reversed(SPLITS) for metric in USUAL_METRICS]
    return [name for name in known if name in different] or different


def _metric_text(run: RecordedRun, name: str) -> str:
    value = run.last.get(name, math.nan)
    return "not finite" if value is None else "-" if math.isnan(value) else shown_number(value)


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yields the folders with a config.json, without looking into them."""
    for path, folders, files in os.walk(folder):
        if "config.json" in files:
            folders.clear()
            yield Path(path)
        folders.sort(key=_natural)


def _natural(name: str) -> list[tuple[str, float]]:
    """Returns a key by which "seed=10" comes after "seed=9"."""
    parts = [*_NUMBER.split(name), ""]
    return [(text, float(number or 0)) for text, number in zip(parts[::2], parts[1::2], strict=True)]


def _read_run(folder: Path, sweep: Mapping[str, Any]) -> RecordedRun:
    """Returns the run in a folder, with the fields of its sweep."""
    try:
        stored = json.loads((folder / "config.json").read_bytes().decode("utf-8-sig"))
        config = dict(with_present_names(stored)["config"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"config.json cannot be read ({type(error).__name__})"
        return RecordedRun(folder=folder, fields={}, seed="-", rounds=None, history=[], problem=problem)
    problem = ""
    history: History = []
    try:
        history, damaged = metric_lines(folder / "metrics.jsonl")
        problem = f"metrics.jsonl has {len(damaged)} lines that cannot be read" if damaged else ""
    except OSError as error:
        problem = f"metrics.jsonl cannot be read ({type(error).__name__})"
    hyperparameters = config.pop("hyperparameters", None)
    fields = {**config, **(hyperparameters if isinstance(hyperparameters, dict) else {})}
    seed = fields.get("seed", f"key {fields['root_key']}" if "root_key" in fields else "-")
    for name in _OF_THE_SEED:
        fields.pop(name, None)
    if code := stored.get("code"):
        fields["code"] = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:8]
    data = {name: stored[name] for name in ("population", "test population", "validation population") if name in stored}
    rounds, versions = fields.get("rounds"), stored.get("versions") or {}
    return RecordedRun(
        folder=folder, fields=fields, seed=seed, rounds=rounds if isinstance(rounds, int) else None, history=history,
        problem=problem, **sweep, data=json.dumps(data, sort_keys=True) if data else "", versions=versions,
        ended=stored.get("ended", {}),
    )  # fmt: skip


def _sweep(folder: Path) -> dict[str, Any]:
    """Returns what a run knows of the sweep in its folder; empty if there is no sweep, or none that can be read."""
    try:
        stored = json.loads((folder / "sweep.json").read_bytes())
        varied, seeds = stored["varied"], len(stored["seeds"])
        if isinstance(varied, list):
            return {"drawn": True, "sweep_size": len(varied) * seeds}
        if all(isinstance(values, list) for values in varied.values()):
            return {"grid": varied, "sweep_size": math.prod(map(len, varied.values())) * seeds}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}
