"""A plot of a test metric against the communicated bits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim import checks
from fedsim.plots._canvas import add_legend, logarithmic, new_figure, shorten, style
from fedsim.plots._progress import curve


def plot_bits(
    histories: Mapping[str, Sequence[Mapping[str, Any]]], metric: str = "test_accuracy", direction: str = "up"
) -> Any:
    """Plots a test metric against the total megabytes that all clients have sent or received so far, one curve per run.

    These are the aggregated updates, or the models for them, after compression. On a virtual clock there are other messages,
    which were lost, late or repeated: `plot_progress` has all of them, in the sizes that the clock uses.

    Args:
      histories: the metrics of each run, by its name: ``result.history``, or the return value of
        `fedsim.experiment.read_metrics`.
      metric: the name of a metric of the evaluations.
      direction: ``"up"`` for bits that clients send, ``"down"`` for bits that they receive.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: the direction is unknown; or a run has no evaluations with this metric, or no counts of bits.

    >>> run = [{"round": 1, "bits_up": 8e6}, {"round": 1, "test_accuracy": 0.5}, {"round": 2, "bits_up": 8e6},
    ...        {"round": 2, "test_accuracy": 0.6}]
    >>> figure = plot_bits({"FedAvg": run})
    >>> figure.axes[0].lines[0].get_xdata().tolist()
    [1.0, 2.0]
    """
    checks.one_of("up", "down", direction=direction)
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for number, (name, history) in enumerate(histories.items()):
        megabytes, values = _curve(name, history, metric, f"bits_{direction}")
        axes.plot(megabytes, values, **style(number), label=shorten(name, 200))
    axes.set_xlabel(f"megabytes {'sent in aggregated updates' if direction == 'up' else 'received for them'} so far")
    axes.set_ylabel(metric.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    logarithmic(axes.xaxis)
    if histories:
        add_legend(figure, axes)
    return figure


def _curve(name: str, history: Sequence[Mapping[str, Any]], metric: str, bits: str) -> tuple[list[float], list[float]]:
    megabytes = list(itertools.accumulate((record.get(bits) or 0) / 8e6 for record in history))
    if not any(megabytes):
        raise ValueError(f"The run {name!r} has no {bits} in its metrics, so there is nothing to draw: leave the run out.")
    return curve(name, history, metric, megabytes)
