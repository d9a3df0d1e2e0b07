"""A plot of the loss of privacy of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.plots._canvas import BLUE, new_figure, whole_ticks


def plot_epsilon(rounds: Sequence[int], epsilons: Sequence[float], *, delta: float) -> Any:
    """Plots ε of differential privacy against the number of rounds.

    Args:
      rounds: numbers of rounds.
      epsilons: ε after these, see `fedsim.privacy.Guarantee.epsilon`.
      delta: δ.

    Returns:
      A matplotlib figure.

    >>> figure = plot_epsilon([1, 50, 100], [0.4, 1.2, 1.7], delta=1e-5)
    >>> figure.axes[0].get_ylabel()
    'ε with δ = 1e-05'
    """
    figure = new_figure(6, 3.4)
    axes = figure.subplots()
    axes.plot(rounds, epsilons, color=BLUE, marker="o", markersize=3)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"ε with δ = {delta:g}")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    whole_ticks(axes.xaxis)
    return figure
