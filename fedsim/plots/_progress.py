"""A plot of a test metric against rounds, simulated time and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.plots._canvas import add_legend, new_figure, shorten, style, whole_ticks
from fedsim.run_files import megabytes_of, rounds_of, simulated_seconds_of


def plot_progress(histories: Mapping[str, Sequence[Mapping[str, Any]]], metric: str = "test_accuracy") -> Any:
    """Plots a test metric against rounds, the simulated time and the megabytes that were sent so far, one curve per run.

    The simulated time is shown if all runs have one (see `fedsim.experiment.simulate`). The megabytes are those of all
    messages, in both directions; those of a run on a virtual clock include messages that were lost or sent again.

    Args:
      histories: the metrics of each run, by its name: ``result.history``, or the return value of
        `fedsim.experiment.read_metrics`.
      metric: the name of a metric of the evaluations.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: there are no runs, or a run has no evaluations with this metric.

    >>> run = [{"round": 1, "simulated_seconds": 3.0, "bits_up": 8e6}, {"round": 1, "test_accuracy": 0.5},
    ...        {"round": 2, "simulated_seconds": 7.0, "bits_up": 8e6}, {"round": 2, "test_accuracy": 0.6}]
    >>> figure = plot_progress({"FedBuff": run})
    >>> [axes.lines[0].get_xdata().tolist() for axes in figure.axes]
    [[1, 2], [3.0, 7.0], [1.0, 2.0]]
    """
    if not histories:
        raise ValueError("Expected the history of at least one run, got none: give {name: result.history}.")
    panels = {
        "server steps (rounds)": rounds_of,
        "simulated seconds": simulated_seconds_of,
        "megabytes sent so far": megabytes_of,
    }
    curves = {
        label: {name: curve(name, history, metric, position(history)) for name, history in histories.items()}
        for label, position in panels.items()
        if all(any(position(history)) for history in histories.values())
    }
    figure = new_figure(3.6 * len(curves) + 0.6, 3.6)
    all_axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (label, of_runs) in zip(all_axes, curves.items(), strict=True):
        for number, (name, points) in enumerate(of_runs.items()):
            axes.plot(*points, **style(number), label=shorten(name, 200))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    all_axes[0].set_ylabel(metric.replace("_", " "))
    whole_ticks(all_axes[0].xaxis)
    add_legend(figure, all_axes[0])
    return figure


def curve(
    name: str, history: Sequence[Mapping[str, Any]], metric: str, positions: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Returns the positions and the values of the lines that have a metric.

    Raises:
      ValueError: there is none.
    """
    points = [(x, line[metric]) for x, line in zip(positions, history, strict=True) if line.get(metric) is not None]
    if not points:
        raise ValueError(f"The run {name!r} has no {metric} in its metrics, so there is nothing to draw: leave the run out.")
    return [x for x, _ in points], [y for _, y in points]
