"""How many examples clients hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.heterogeneity import gini
from fedsim.plots._canvas import BLUE, GREY, ORANGE, new_figure

_MOST_BARS = 40
# Beyond this ratio of the largest size to the median a linear axis would show one bar and a tail.
_LONG_TAIL = 12


def plot_sizes(data: FederatedData) -> Any:
    """A histogram of the clients' numbers of examples, with their median and mean.

    The axis is logarithmic where the largest client is far from the median. Clients without examples are counted in the
    legend.

    >>> figure = plot_sizes(FederatedData.from_arrays({"x": np.zeros(9)}, sizes=[4, 3, 2]))
    >>> figure.axes[0].get_xlabel()
    'examples per client'
    """
    figure = new_figure(6.4, 3.6)
    draw_sizes(figure.subplots(), data)
    return figure


def draw_sizes(axes: Any, data: FederatedData, name: str = "") -> None:
    """`plot_sizes` into axes that are there; ``name`` goes before the title."""
    sizes = data.sizes
    held = sizes[sizes > 0]
    empty = len(sizes) - len(held)
    axes.set_title(f"{name}{data.num_clients:,} clients, {data.num_examples:,} examples (Gini {gini(data):.2f})", fontsize=10)
    axes.set_xlabel("examples per client")
    axes.set_ylabel("clients")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    if len(held):
        low, high = int(held.min()), int(held.max())
        edges, logarithmic = _edges(held)
        axes.hist(held, bins=edges, color=BLUE, edgecolor="white", linewidth=0.5)
        if logarithmic:
            axes.set_xscale("log")
            axes.set_xlabel("examples per client (logarithmic)")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            if len(edges) < 4:  # A bar or two would fill the picture.
                axes.set_xlim(low - 4, high + 4)
        median, mean = float(np.median(held)), float(held.mean())
        axes.axvline(median, color=ORANGE, linewidth=1.8, label=f"median {median:,.4g}")
        axes.axvline(mean, color=ORANGE, linewidth=1.8, linestyle=(0, (2, 2)), label=f"mean {mean:,.4g}")
        axes.plot([], [], " ", label=f"least {low:,}, most {high:,}")
    if empty:
        axes.plot([], [], " ", label=f"{empty:,} without examples")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, frameon=False, labelcolor=GREY, handlelength=1.6)


def _edges(held: np.ndarray) -> tuple[np.ndarray, bool]:
    """Borders of the bars between whole numbers, and whether the axis is logarithmic."""
    low, high = int(held.min()), int(held.max())
    if high > _LONG_TAIL * np.median(held):
        edges = np.geomspace(low, high + 1, _MOST_BARS + 1).round()
        return np.unique(edges) - 0.5, True
    step = -(-(high - low + 1) // _MOST_BARS)
    return np.arange(low, high + step + 1, step) - 0.5, False
