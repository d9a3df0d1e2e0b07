"""`Comparison`: settings over seeds and tests between groups, as text, CSV, LaTeX and a figure."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from fedsim.comparison._outcome import AT, Against, At, Cost, Outcome, curve_of
from fedsim.comparison._runs import RecordedRun, aligned, setting_text, shown_value
from fedsim.comparison._statistics import Interval, PairedTest, interval

OPTIMISTIC = "selected on test data: these figures are optimistic"
_TITLES = {"last": "last", "best": "best", "last10": "last 10"}
# Beyond these, a backslash before a character of LaTeX's own is enough.
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SettingResult:
    """The runs of one setting, one for each seed.

    Attributes:
      group: the values of the fields by which runs are grouped, such as ``{"algorithm": "fedavg"}``.
      context: the values of those fields of the task and the budget that are not the same in all runs: dataset, validation,
        rounds. Only groups with equal contexts are tested against each other.
      setting: the values of what else differs within the group.
      runs: the runs by seed.
      outcomes: what they have reached, by seed.
      selected: whether it is the best setting of its group and context.

    >>> SettingResult(group={"algorithm": "fedavg"}, context={}, setting={}, runs={}, outcomes={}, selected=True).name
    'fedavg'
    """

    group: Mapping[str, Any]
    context: Mapping[str, Any]
    setting: Mapping[str, Any]
    runs: Mapping[int | str, RecordedRun]
    outcomes: Mapping[int | str, Outcome]
    selected: bool

    @property
    def name(self) -> str:
        """The name of the group, with its context."""
        values = [shown_value(value) for value in self.group.values()]
        named = values if len(values) == 1 and isinstance(next(iter(self.group.values())), str) else [setting_text(self.group)]
        return " ".join([*named, *([setting_text(self.context)] if self.context else [])])

    def values(self, at: At) -> dict[int | str, float]:
        """Returns the value of each seed."""
        return {seed: outcome.at(at) for seed, outcome in self.outcomes.items()}

    def interval(self, at: At) -> Interval:
        """Returns the mean over seeds and its 95 % interval."""
        return interval(list(self.values(at).values()))

    @property
    def costs(self) -> list[Cost]:
        """What the target has cost, of those runs that have reached it."""
        return [outcome.to_target for outcome in self.outcomes.values() if outcome.to_target]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupTest:
    """A test between the selected settings of two groups.

    Attributes:
      first, second: the settings.
      paired: the difference, first minus second, over the common seeds, and its p-value.
      p_holm: the p-value corrected for the number of tests; None without a test.
      better: the name of the group that is better at the 5 % level after the correction; None if no difference is shown.
      seeds_needed: the number of common seeds with which a difference of the observed size, or of the size that was asked for,
        would be found with 80 % probability, in every case after the correction; None if it is not known or more than 10,000.

    >>> [field.name for field in dataclasses.fields(GroupTest)][:3]
    ['first', 'second', 'paired']
    """

    first: SettingResult
    second: SettingResult
    paired: PairedTest
    p_holm: float | None
    better: str | None
    seeds_needed: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """The result of `compare`.

    Attributes:
      settings: the settings, by group.
      tests: of all pairs of groups with the same context.
      metric: what is reported, such as ``test_accuracy``.
      higher: whether higher values of it are better.
      selection: by which settings and best rounds are selected, such as ``validation_accuracy``.
      at: which value of a run is compared.
      target: a metric and the value it has to reach; None if there is none.
      difference: the size for which ``seeds_needed`` is given; None for the observed one.
      simulated: whether seconds are simulated ones.
      notes: what has to be known about the runs, one sentence each.

    >>> from pathlib import Path
    >>> from fedsim.comparison import compare
    >>> runs = [RecordedRun(folder=Path("a"), fields={"algorithm": "fedavg"}, seed=seed, rounds=1,
    ...                     history=[{"round": 1, "test_accuracy": 0.5 + seed / 10}]) for seed in range(2)]
    >>> print(compare(runs).table())  # doctest: +ELLIPSIS
    metric   test_accuracy, higher is better; mean ± 95 % interval (Student's t) over seeds
    ...
    group      seeds             last             best          last 10
    fedavg  *      2  0.5500 ± 0.6353  0.5500 ± 0.6353  0.5500 ± 0.6353
    """

    settings: Sequence[SettingResult]
    tests: Sequence[GroupTest]
    metric: str
    higher: bool
    selection: str
    at: At
    target: tuple[str, float] | None
    difference: float | None
    simulated: bool
    notes: Sequence[str]

    @property
    def selected(self) -> list[SettingResult]:
        """The best setting of each group."""
        return [result for result in self.settings if result.selected]

    def table(self) -> str:
        """Returns what the terminal shows: all settings, the tests between groups, and the notes."""
        return _text_of(self)

    def csv(self) -> str:
        """Returns a row for each setting as CSV, with the columns ``<last, best, last10>_<mean, interval, std>``."""
        return _csv_of(self)

    def latex(self) -> str:
        """Returns a table of the selected settings, for the package booktabs."""
        return _latex_of(self)

    def plot(self, against: Against = "rounds") -> Any:
        """Returns a matplotlib figure: the mean over seeds of the selected settings, with 95 % bands.

        The points of a curve are the rounds in which all seeds have an evaluation. Their numbers of bytes and seconds, which
        may differ between seeds, are averaged like the metric.

        Args:
          against: ``"rounds"``, ``"bytes"`` (megabytes sent in both directions) or ``"seconds"``.

        Raises:
          ValueError: ``against`` is something else, the runs have no such numbers, or the seeds no evaluations in common.
        """
        from fedsim.plots import plot_bands

        if against not in get_args(Against):
            raise ValueError(f"Expected against to be rounds, bytes or seconds, got against={against!r}: give one of these.")
        curves = {}
        for result in self.selected:
            of_seeds = [curve_of(run, self.metric, against, simulated=self.simulated) for run in result.runs.values()]
            rounds = sorted(set.intersection(*map(set, of_seeds)))
            points = np.array([[curve[round] for round in rounds] for curve in of_seeds]).reshape(len(of_seeds), -1, 2)
            if not points[:, :, 0].any():
                raise ValueError(
                    f"Expected runs with {against}, and evaluations in the same rounds with every seed, got {result.name} "
                    "without: give another value of against, or leave runs out."
                )
            setting = f" {setting_text(result.setting)}" if result.setting else ""
            seeds = f"{len(of_seeds)} seeds" if len(of_seeds) > 1 else "1 seed, no band"
            curves[f"{result.name}{setting} ({seeds})"] = points[:, :, 0].mean(0), points[:, :, 1]
        kind = "simulated" if self.simulated else "wall time"
        labels = {"rounds": "round", "bytes": "megabytes sent so far", "seconds": f"seconds ({kind})"}
        title = OPTIMISTIC if self.is_optimistic else ""
        ylabel = f"{self.metric.replace('_', ' ')}, mean and 95 % band"
        return plot_bands(curves, labels[against], ylabel, whole=against == "rounds", title=title)

    @property
    def is_optimistic(self) -> bool:
        """Whether the reported values have decided which setting or round is reported."""
        several = len(self.settings) > len({(result.name) for result in self.settings})
        return self.selection == self.metric and (several or self.at == "best")


def _text_of(comparison: Comparison) -> str:
    """Returns the table of `Comparison.table`."""
    on_test = comparison.selection == comparison.metric
    which = {
        "last": "after the last round",
        "best": f"after the round with the best {comparison.selection}{' (optimistic)' * on_test}",
        "last10": "mean of the last ten evaluations (of all, if a run has fewer)",
    }
    direction = "higher" if comparison.higher else "lower"
    lines = [
        f"metric   {comparison.metric}, {direction} is better; mean ± 95 % interval (Student's t) over seeds",
        *(f"{_TITLES[at]:<9}{text}" for at, text in which.items()),
        f"*        the best setting of its group by {comparison.selection}, column {_TITLES[comparison.at]!r}",
    ]
    costs = _cost_titles(comparison)
    if comparison.target:
        lines.append(f"target   {_target_text(comparison)}: mean over the runs that reach it, if not all do with their number")
    columns = ["group", "setting", "", "seeds", *_TITLES.values(), *costs]
    rows = []
    for result in comparison.settings:
        cells = [result.name, setting_text(result.setting), "*" if result.selected else "", str(len(result.runs))]
        rows.append([*cells, *(str(result.interval(at)) for at in AT), *_cost_cells(comparison, result)])
    if not any(row[1] for row in rows):
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    lines += ["", aligned(columns, rows, right={"seeds", *_TITLES.values(), *costs})]
    if comparison.tests:
        columns = ["first", "second", "seeds", "first - second", "p", "p (Holm)", "result", _needed_title(comparison)]
        right = {"seeds", "first - second", "p", "p (Holm)", _needed_title(comparison)}
        number = sum(test.p_holm is not None for test in comparison.tests)
        level = "5 % level" + (f", Holm's correction for {number} tests" if number > 1 else "")
        lines += ["", f"paired t tests of {comparison.metric} ({_TITLES[comparison.at]}) over common seeds, {level}", ""]
        lines.append(aligned(columns, [_test_cells(test) for test in comparison.tests], right))
    if comparison.notes:
        lines += ["", *(f"note     {note}" for note in comparison.notes)]
    return "\n".join(lines)


def _csv_of(comparison: Comparison) -> str:
    """Returns the CSV of `Comparison.csv`."""
    first = comparison.settings[0]
    fields = list(dict.fromkeys(name for result in comparison.settings for name in result.setting))
    columns = [*first.group, *first.context, *fields, "metric", "selected", "selected_by", "seeds"]
    columns += [f"{at}_{name}" for at in AT for name in ("mean", "interval", "std")]
    if comparison.target:
        columns += ["target", "reached_by", "rounds_to_target", "megabytes_to_target"]
        columns += ["simulated_seconds_to_target" if comparison.simulated else "seconds_to_target"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for result in comparison.settings:
        row = [*result.group.values(), *result.context.values(), *(result.setting.get(name) for name in fields)]
        row += [comparison.metric, int(result.selected), comparison.selection, len(result.runs)]
        for at in AT:
            of = result.interval(at)
            row += [None if math.isnan(of.mean) else of.mean, of.half_width, of.deviation]
        if comparison.target:
            costs = [[cost.rounds, cost.megabytes, cost.seconds] for cost in result.costs]
            means = [interval(values).mean for values in zip(*costs, strict=True)] if costs else [None] * 3
            row += [_target_text(comparison), len(costs), *means]
        writer.writerow(row)
    return text.getvalue()


def _latex_of(comparison: Comparison) -> str:
    """Returns the table of `Comparison.latex`, narrow enough for a page; comments say what a caption has to say."""
    metric = comparison.metric.replace("_", " ").capitalize()
    columns = ["Group", "Setting", metric, *(["Rounds", "MB", "Seconds"] if comparison.target else [])]
    rows = []
    for result in comparison.selected:
        row = [result.name, setting_text(result.setting), str(result.interval(comparison.at))]
        rows.append([latex_escaped(cell) for cell in (*row, *_cost_cells(comparison, result))])
    if not any(row[1] for row in rows):
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    texts = 1 + ("Setting" in columns)
    said = [
        "needs \\usepackage{booktabs}",
        f"{metric} ({_TITLES[comparison.at]}): mean ± 95 % interval over seeds.",
        f"The best setting of each group by {comparison.selection}.",
        f"Seeds: {', '.join(f'{result.name} {len(result.runs)}' for result in comparison.selected)}.",
    ]
    if comparison.target:
        kind = "simulated time" if comparison.simulated else "wall time"
        said.append(f"Rounds, megabytes and seconds ({kind}) until {_target_text(comparison)}.")
    remark = [rf"\multicolumn{{{len(columns)}}}{{l}}{{\footnotesize {OPTIMISTIC.capitalize()}.}} \\"]
    lines = [
        *(f"% {sentence}" for sentence in said),
        rf"\begin{{tabular}}{{{'l' * texts}{'r' * (len(columns) - texts)}}}",
        r"\toprule",
        " & ".join(map(latex_escaped, columns)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        *(remark if comparison.is_optimistic else []),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def latex_escaped(text: str) -> str:
    """Returns a text as LaTeX has it.

    >>> print(latex_escaped("client_learning_rate=0.1 ± 5 % of {a}"))
    client\\_learning\\_rate=0.1 $\\pm$ 5 \\% of \\{a\\}
    """
    escaped = "".join(_LATEX.get(letter, f"\\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
    return escaped.replace("±", r"$\pm$")


def _target_text(comparison: Comparison) -> str:
    assert comparison.target is not None
    return f"{comparison.target[0]}={comparison.target[1]:g}"


def _cost_titles(comparison: Comparison) -> list[str]:
    if not comparison.target:
        return []
    kind = "simulated" if comparison.simulated else "wall time"
    return ["rounds to target", "MB to target", f"seconds to target ({kind})"]


def _cost_cells(comparison: Comparison, result: SettingResult) -> list[str]:
    if not comparison.target:
        return []
    if not (costs := result.costs):
        return ["not reached", "-", "-"]
    of = "" if len(costs) == len(result.runs) else f" ({len(costs)} of {len(result.runs)})"
    mean = [interval(values).mean for values in zip(*((c.rounds, c.megabytes, c.seconds) for c in costs), strict=True)]
    return [f"{mean[0]:.1f}{of}", f"{mean[1]:.4g}", f"{mean[2]:.4g}"]


def _needed_title(comparison: Comparison) -> str:
    size = "this difference" if comparison.difference is None else f"a difference of {comparison.difference:g}"
    return f"more seeds to find {size} (80 % power)"


def _test_cells(test: GroupTest) -> Sequence[str]:
    paired = test.paired
    common = paired.difference.count
    cells = [test.first.name, test.second.name, str(common), str(paired.difference)]
    if paired.p is None or test.p_holm is None:
        reason = "no spread over seeds" if common > 1 else "fewer than two common seeds"
        return [*cells, "-", "-", f"no test: {reason}", "-"]
    result = "no difference shown"
    if test.better:
        result = f"{'first' if test.better == test.first.name else 'second'} is better"
    needed = "more than 10,000" if test.seeds_needed is None else str(max(0, test.seeds_needed - common))
    return [*cells, _p_text(paired.p), _p_text(test.p_holm), result, needed]


def _p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"
