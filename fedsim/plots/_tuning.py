"""A plot of the path of `fedsim.tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.plots._canvas import BLUE, GREY, ORANGE, add_legend, logarithmic, new_figure, style, whole_ticks


def plot_tuning(numbers: Sequence[Mapping[str, float]], objectives: Sequence[float]) -> Any:
    """Plots the objective of each run, and the numbers: two of them as a path in a plane, any other count by run.

    Axes of positive numbers are logarithmic. Runs that diverged are crosses; the best run is orange.

    Args:
      numbers: the numbers of each run, by name.
      objectives: the objective of each run; infinity for a run that diverged.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: there are no runs, or not as many numbers as objectives.

    >>> figure = plot_tuning([{"client_rate": 0.1, "mu": 1.0}, {"client_rate": 0.2, "mu": 0.5}], [2.0, 1.5])
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['run', 'client rate']
    """
    if not objectives or len(numbers) != len(objectives):
        raise ValueError(
            f"Expected numbers and objectives of at least one run, one each per run, got {len(numbers)} and {len(objectives)}."
        )
    names = list(numbers[0])
    runs = range(1, len(objectives) + 1)
    finite = [math.isfinite(value) for value in objectives]
    best = min(range(len(objectives)), key=objectives.__getitem__)
    figure = new_figure(8.6, 3.6)
    left, right = figure.subplots(1, 2)
    left.plot(*_where(finite, runs, objectives), color=BLUE, marker="o", markersize=4)
    for run, good in zip(runs, finite, strict=True):
        if not good:
            left.axvline(run, color=GREY, linestyle=":", linewidth=1)
    left.plot([best + 1], [objectives[best]], color=ORANGE, marker="o", linestyle="none", label=f"best: {objectives[best]:.4g}")
    left.set_xlabel("run")
    left.set_ylabel("objective")
    whole_ticks(left.xaxis)
    left.legend(frameon=False, fontsize=9)
    if len(names) == 2:
        x, y = ([float(of_run[name]) for of_run in numbers] for name in names)
        right.plot(*_where(finite, x, y), color=BLUE, marker="o", markersize=4)
        if not all(finite):
            right.plot(*_where([not good for good in finite], x, y), color=GREY, marker="x", linestyle="none", label="diverged")
        right.plot(x[:1], y[:1], color=BLUE, marker="s", markersize=8, fillstyle="none", linestyle="none", label="start")
        at = ", ".join(f"{value[best]:.3g}" for value in (x, y))
        right.plot([x[best]], [y[best]], color=ORANGE, marker="o", linestyle="none", label=f"best: {at}")
        right.set_xlabel(_words(names[0]))
        right.set_ylabel(_words(names[1]))
        right.set_xscale("log" if min(x) > 0 else "linear")
        right.set_yscale("log" if min(y) > 0 else "linear")
        right.legend(frameon=False, fontsize=9)
    else:
        for number, name in enumerate(names):
            right.plot(runs, [of_run[name] for of_run in numbers], **style(number), label=_words(name))
        right.axvline(best + 1, color=ORANGE, linewidth=1)
        right.set_xlabel("run")
        right.set_ylabel("number")
        whole_ticks(right.xaxis)
        if all(of_run[name] > 0 for of_run in numbers for name in names):
            logarithmic(right.yaxis)
        add_legend(figure, right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _where(chosen: Sequence[bool], *values: Sequence[float]) -> list[list[float]]:
    return [[value for value, of in zip(column, chosen, strict=True) if of] for column in values]


def _words(name: str) -> str:
    return name.replace("_", " ")
