"""A plot of runs without a server: the nodes' own models, how far they are apart, and what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.plots._canvas import add_legend, logarithmic, new_figure, shorten, style, whole_ticks
from fedsim.plots._progress import curve
from fedsim.run_files import megabytes_of, rounds_of

_DASHES = {"_clients_mean": "-", "_clients_worst10": ":"}


def plot_nodes(histories: Mapping[str, Sequence[Mapping[str, Any]]], metric: str = "accuracy") -> Any:
    """Plots the nodes' own models and their distance from consensus over rounds, and their metric against megabytes sent.

    In the first and the last panel, the solid line is the mean over nodes, and the dotted one the mean of the worst tenth.

    Args:
      histories: the metrics of each run, by its name: ``result.history``, or the return value of
        `fedsim.experiment.read_metrics`.
      metric: a metric of the model, as in ``test_personal_accuracy_clients_mean`` of the evaluations.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: there are no runs, or a run has no evaluation of its nodes with this metric.

    >>> run = [
    ...     {"round": 1, "consensus_distance": 2.0, "bits_up": 8e6},
    ...     {"round": 1, "test_personal_accuracy_clients_mean": 0.6, "test_personal_accuracy_clients_worst10": 0.4}]
    >>> figure = plot_nodes({"D-PSGD": run})
    >>> [float(axes.lines[0].get_ydata()[0]) for axes in figure.axes]
    [0.6, 2.0, 0.6]
    """
    if not histories:
        raise ValueError("Expected the history of at least one run, got none: give {name: result.history}.")
    figure = new_figure(11.4, 3.6)
    over_rounds, distance, over_bytes = figure.subplots(1, 3)
    over_bytes.sharey(over_rounds)
    for number, (name, history) in enumerate(histories.items()):
        own = style(number)
        for axes, positions in ((over_rounds, rounds_of(history)), (over_bytes, megabytes_of(history))):
            for kind, dashes in _DASHES.items():  # The marker and the colour say which run it is.
                if kind == "_clients_worst10" and not any(f"test_personal_{metric}{kind}" in line for line in history):
                    continue  # The metric does not say which values are the worst.
                points = curve(name, history, f"test_personal_{metric}{kind}", positions)
                label = shorten(name, 200) if dashes == "-" else None
                axes.plot(*points, **own | {"linestyle": dashes}, label=label)
        rounds, distances = curve(name, history, "consensus_distance", rounds_of(history))
        distance.plot(rounds, distances, **own | {"linestyle": "-"}, markevery=-(-len(rounds) // 10))
    for axes in (over_rounds, over_bytes):
        axes.set_ylabel(f"{metric} of the nodes' own models\nmean, and worst tenth (dotted)")
    distance.set_ylabel("consensus distance")
    for axes, label in zip(figure.axes, ("rounds", "rounds", "megabytes sent by all nodes so far"), strict=True):
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    logarithmic(distance.yaxis)
    for axes in (over_rounds, distance):
        whole_ticks(axes.xaxis)
    add_legend(figure, over_rounds)
    return figure
