"""`SweepResult`: the finished runs of a sweep, as a table and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import signal
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.comparison import edge_of_grid
from fedsim.experiment import read_metrics
from fedsim.experiment.driving import (
    Line,
    LossMonitor,
    RunFolder,
    is_diverged,
    score,
    score_name,
    split_and_metric,
)
from fedsim.run_files import scalar_metrics, shown_number
from fedsim.sweeps._grid import Setting

_LOSS = "training loss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepMember:
    """One run of a sweep.

    Attributes:
      setting: the values of the varied fields.
      seed: the seed.
      folder: the run folder.
      line: the last evaluation, as in ``metrics.jsonl``; the last round if there is no evaluation.
      loss: the training loss of the last round; None if the algorithm has none, or if it is not finite.
      diverged: whether a loss of the run diverged, see `LossMonitor`.

    >>> SweepMember(setting={"mu": 0.1}, seed=0, folder=Path("runs/a"), line={"round": 1}).name
    'mu=0.1,seed=0'
    """

    setting: Setting
    seed: int
    folder: Path
    line: Line = dataclasses.field(default_factory=dict)
    loss: float | None = None
    diverged: bool = False

    @property
    def name(self) -> str:
        """Its values and its seed."""
        return ",".join(f"{name}={value}" for name, value in {**self.setting, "seed": self.seed}.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of `sweep`.

    Attributes:
      members: the runs that are finished, in the order of the settings and then of the seeds.
      folder: the folder of the sweep.
      interrupted: the signal that ended the sweep early.
      varied: the values of the varied fields, also those of runs that are not finished or failed; empty: those of the members;
        None if the settings were drawn, so that no value is at the edge of a grid.
    """

    members: Sequence[SweepMember]
    folder: Path
    interrupted: signal.Signals | None = None
    varied: Mapping[str, Sequence[Any]] | None = dataclasses.field(default_factory=dict)

    def table(self) -> str:
        """Returns a table of the last evaluations, with mean and standard deviation over seeds, and the best setting.

        The standard deviation is that of a sample (n - 1). The losses of runs that diverged, and other metrics of these that
        are enormous or not finite, are shown as "diverged". A line says if a best value is the smallest or largest of its grid.
        The best setting is one of those with the most finished seeds, because others may have the seeds that did not fail.

        >>> lines = [{"round": 9, "test_accuracy": 0.5}, {"round": 9, "test_accuracy": 0.7}, {"round": 9, "test_accuracy": 0.9}]
        >>> members = [SweepMember(setting={"mu": mu}, seed=seed, folder=Path("s"), line=line)
        ...            for (mu, seed), line in zip([(0.0, 0), (0.0, 1), (0.1, 0)], lines)]
        >>> print(SweepResult(members=members, folder=Path("s")).table())
        mu   seeds         accuracy
        0.0      2  0.6000 ± 0.1414
        0.1      1           0.9000
        <BLANKLINE>
        best  mu=0.0: accuracy 0.6000 ± 0.1414, chosen on test data, so it is optimistic: give --validation
        left out  mu=0.1: accuracy 0.9000 (1 of 2 seeds finished)
        """
        groups: dict[tuple[Any, ...], list[SweepMember]] = {}
        for member in self.members:
            groups.setdefault(tuple(member.setting.values()), []).append(member)
        if not groups:
            return "no run is finished"
        names = list(self.members[0].setting)
        metrics = list(dict.fromkeys(name for member in self.members for name in scalar_metrics(member.line)))
        validated = any(scalar_metrics(member.line, "validation") for member in self.members)
        shown = metrics if validated else [name.removeprefix("test_") for name in metrics]
        columns = [*names, "seeds", *(name.replace("_", " ", 1) if name in metrics else name for name in shown), _LOSS]
        rows = [
            [*map(str, values), str(len(own)), *(_spread(own, name) for name in [*metrics, _LOSS])]
            for values, own in groups.items()
        ]
        if all(row[-1] == "-" for row in rows):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = []
        for row in [columns, *rows]:
            cells = [
                cell.ljust(width) if i < len(names) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        if metrics and names:
            lines += ["", *self._best(groups)]
        return "\n".join(lines)

    def _best(self, groups: Mapping[tuple[Any, ...], Sequence[SweepMember]]) -> list[str]:
        name = score_name(*(member.line for member in self.members))
        if name is None:
            return ["best  none: no metric of all runs says whether higher or lower values are better"]

        def mean_score(own: Sequence[SweepMember]) -> float:
            scores = [score(member.line, name) for member in own]
            return -math.inf if None in scores else statistics.fmean(scores)  # type: ignore[arg-type]

        most = max(map(len, groups.values()))
        own = max((group for group in groups.values() if len(group) == most), key=mean_score)
        better = max(groups.values(), key=mean_score)
        split, metric = split_and_metric(name)
        left_out = []
        if mean_score(better) > mean_score(own):
            seeds = len({member.seed for member in self.members})
            shown = f"{metric} {_spread(better, name)} ({len(better)} of {seeds} seeds finished)"
            left_out = [f"left out  {_text(better[0].setting)}: {shown}"]
        if mean_score(own) == -math.inf:
            which = f"every setting with {most} finished seeds" if left_out else "every setting"
            return [f"best  none: {which} has a run whose evaluation is not finite", *left_out]
        setting = _text(own[0].setting)
        edges = []
        for key, best in () if self.varied is None else own[0].setting.items():
            tried = [*(self.varied or {}).get(key, ()), *(member.setting[key] for member in self.members)]
            if text := edge_of_grid(key, best, tried):
                edges.append(f"edge  {text}")
        if split == "validation":
            tested = f", test {metric} {_spread(own, f'test_{metric}')}" if f"test_{metric}" in own[0].line else ""
            return [*edges, f"best  {setting}: validation {metric} {_spread(own, name)}{tested}", *left_out]
        chosen = f"best  {setting}: {metric} {_spread(own, name)}, chosen on test data, so it is optimistic: give --validation"
        return [*edges, chosen, *left_out]


def _text(setting: Setting) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.items())


def with_result(member: SweepMember, monitor: LossMonitor) -> SweepMember:
    """Returns a member with the last lines of the metrics in its folder, and whether they diverge according to the monitor."""
    history = read_metrics(RunFolder(member.folder).metrics)
    evaluated = [line for line in history if scalar_metrics(line)]
    losses = [line.get("loss") for line in history if "seconds" in line]
    for line in history:
        monitor.add(line)
    loss = losses[-1] if losses else None
    return dataclasses.replace(member, line=(evaluated or history)[-1], loss=loss, diverged=monitor.diverged)


def csv_of(result: SweepResult) -> str:
    """Returns a row per member: the varied values, the seed, the folder, the training loss and the last evaluation."""
    rows = [
        {**member.setting, "seed": member.seed, "folder": member.folder.name, "training_loss": member.loss}
        | {name: value for name, value in member.line.items() if not isinstance(value, list | dict)}
        for member in result.members
    ]
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)  # Personal metrics, for example, only some algorithms have.
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _spread(members: Sequence[SweepMember], name: str) -> str:
    """Returns the mean of a metric, or of the training loss, and, of several members, its standard deviation.

    It is "-" if a value is not finite or missing, and says how many values are of members that diverged.
    """
    values = [member.loss if name == _LOSS else member.line.get(name) for member in members]
    large = [
        (member.diverged and "loss" in name) or is_diverged(value, member.diverged)
        for member, value in zip(members, values, strict=True)
    ]
    if any(large):
        return "diverged" if all(large) else f"{sum(large)} of {len(large)} diverged"
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return "-"
    mean = statistics.fmean(numbers)
    if len(numbers) == 1:
        return shown_number(mean)
    deviation = statistics.stdev(numbers)
    return f"{shown_number(mean, beside=deviation)} ± {shown_number(deviation, beside=mean)}"
