"""A plot of curves with bands over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim.plots._canvas import add_legend, new_figure, shorten, style, whole_ticks


def plot_bands(
    curves: Mapping[str, tuple[Any, Any]], xlabel: str, ylabel: str, *, whole: bool = False, title: str = "",
    confidence: float = 0.95,
) -> Any:  # fmt: skip
    """Plots the mean over seeds of each group, with a band of its confidence interval by Student's t.

    Args:
      curves: for each group, the positions ``[points]`` and the values ``[seeds, points]``. With one seed there is no band.
      xlabel, ylabel: what is at the axes.
      whole: whether positions are whole numbers, such as rounds.
      title: of the figure.
      confidence: the probability that the interval at a position covers the mean, if values are normally distributed.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: there are no groups.

    >>> figure = plot_bands({"fedavg": ([1, 2], [[0.5, 0.6], [0.7, 0.8]])}, "round", "accuracy")
    >>> figure.axes[0].lines[0].get_ydata().round(2).tolist()
    [0.6, 0.7]
    """
    from scipy.special import stdtrit

    if not curves:
        raise ValueError("Expected the curves of at least one group, got none: give {name: (positions, values)}.")
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, (name, (x, of_seeds)) in enumerate(curves.items()):
        values = np.asarray(of_seeds, np.float64)
        mean = values.mean(0)
        look = style(number)
        axes.plot(x, mean, **{**look, "marker": look["marker"] if len(x) <= 40 else None}, label=shorten(name, 200))
        if (count := len(values)) > 1:
            half = stdtrit(count - 1, 0.5 + confidence / 2) * values.std(0, ddof=1) / np.sqrt(count)
            axes.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.18, linewidth=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(shorten(title, 100), fontsize=9)
    if whole:
        whole_ticks(axes.xaxis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure
