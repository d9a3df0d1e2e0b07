"""A plot of what the clients of a run are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.plots._canvas import BLUE, ORANGE, new_figure, shorten

_MOST_NAMED = 40


def plot_worth(client_ids: Sequence[str], values: np.ndarray, num_examples: np.ndarray) -> Any:
    """Plots clients in the order of their worth, and their worth against their numbers of examples.

    Args:
      client_ids, values, num_examples: see `fedsim.differentiation.ClientWorth`.

    Returns:
      A matplotlib figure.

    >>> figure = plot_worth(["ann", "bob"], np.array([-0.5, 0.25]), np.array([3, 2]))
    >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
    [0.25, -0.5]
    """
    figure = new_figure(10, 3.6)
    bars, scatter = figure.subplots(1, 2, width_ratios=[2, 1], sharey=True)
    order = np.argsort(-values, kind="stable")
    colours = np.where(values >= 0, BLUE, ORANGE)
    bars.bar(np.arange(len(order)), values[order], color=colours[order], width=0.8)
    bars.set_ylabel("fall of the objective\nper doubled weight")
    if len(order) <= _MOST_NAMED:
        names = [shorten(client_ids[int(i)], 12) for i in order]
        bars.set_xticks(np.arange(len(order)), names, rotation=90, fontsize=7)
    bars.set_xlabel("clients, by their worth")
    scatter.scatter(num_examples, values, color=colours, s=14)
    scatter.set_xlabel("examples of the client")
    for axes in (bars, scatter):
        axes.axhline(0, color="black", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, axis="y")
    return figure
