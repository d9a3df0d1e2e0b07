"""A histogram of the clients' numbers of examples."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.heterogeneity import gini
from fedsim.plots._canvas import BLUE, GREY, ORANGE, new_figure

_MOST_BARS = 40
# If the largest size exceeds the median by this factor, a linear axis would show little more than one bar.
_LONG_TAIL = 12


def plot_sizes(data: FederatedData) -> Any:
    """Shows a histogram of the clients' numbers of examples, with their median and mean.

    The horizontal axis is logarithmic if the largest client has more than 12 times as many examples as the median. Clients
    without examples are counted in the legend only.

    Args:
      data: the population.

    Returns:
      A matplotlib figure.

    >>> figure = plot_sizes(FederatedData.from_arrays({"x": np.zeros(9)}, sizes=[4, 3, 2]))
    >>> figure.axes[0].get_xlabel()
    'examples per client'
    """
    figure = new_figure(6.4, 3.6)
    draw_sizes(figure.subplots(), data)
    return figure


def draw_sizes(axes: Any, data: FederatedData, name: str = "") -> None:
    """Draws `plot_sizes` into existing axes; ``name`` precedes the title."""
    sizes = data.sizes
    nonempty = sizes[sizes > 0]
    empty = len(sizes) - len(nonempty)
    axes.set_title(f"{name}{data.num_clients:,} clients, {data.num_examples:,} examples (Gini {gini(data):.2f})", fontsize=10)
    axes.set_xlabel("examples per client")
    axes.set_ylabel("clients")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    if len(nonempty):
        low, high = int(nonempty.min()), int(nonempty.max())
        edges, logarithmic = _edges(nonempty)
        axes.hist(nonempty, bins=edges, color=BLUE, edgecolor="white", linewidth=0.5)
        if logarithmic:
            axes.set_xscale("log")
            axes.set_xlabel("examples per client (logarithmic)")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            if len(edges) < 4:  # One or two bars would fill the whole width.
                axes.set_xlim(low - 4, high + 4)
        median, mean = float(np.median(nonempty)), float(nonempty.mean())
        axes.axvline(median, color=ORANGE, linewidth=1.8, label=f"median {median:,.4g}")
        axes.axvline(mean, color=ORANGE, linewidth=1.8, linestyle=(0, (2, 2)), label=f"mean {mean:,.4g}")
        axes.plot([], [], " ", label=f"min {low:,}, max {high:,}")
    if empty:
        axes.plot([], [], " ", label=f"{empty:,} client{'s' if empty > 1 else ''} without examples")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, frameon=False, labelcolor=GREY, handlelength=1.6)


def _edges(nonempty: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns the edges of the bars, halfway between whole numbers, and whether the axis is logarithmic."""
    low, high = int(nonempty.min()), int(nonempty.max())
    if high > _LONG_TAIL * np.median(nonempty):
        edges = np.geomspace(low, high + 1, _MOST_BARS + 1).round()
        return np.unique(edges) - 0.5, True
    step = -(-(high - low + 1) // _MOST_BARS)
    return np.arange(low, high + step + 1, step) - 0.5, False
