"""A plot of the clients of a schedule over the simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.plots._canvas import BLUE, GREY, LIGHTNESS, ORANGE, new_figure, shorten
from fedsim.systems import OUTCOMES, Schedule

_MARKS = {"aggregated": ("o", BLUE), "late": (">", GREY), "lost": ("x", ORANGE), "dropped": ("s", GREY)}
_STEPS, _NUMBERED_STEPS = 40, 15


def plot_timeline(
    schedule: Schedule, *, clients: int = 20, seconds: float | None = None, client_ids: Sequence[str] | None = None
) -> Any:
    """Plots who trained when, from which version of the model, and what became of it.

    Each bar is a dispatch to a client, from the sending of the model until its update arrived or was lost. Its colour is the
    version that the client started from, and the mark at its end the outcome. Vertical lines are server steps.

    Args:
      schedule: a schedule, for example ``result.schedule`` of `fedsim.experiment.simulate`.
      clients: the number of clients: those that were sent a model first.
      seconds: the end of the plot; None: that of the first 40 server steps.
      client_ids: the names of all clients of the population, ``data.client_ids``; None: their positions.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: the schedule has no dispatch whose outcome is known.

    >>> import fedsim, numpy as np
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1, 1, 1, 1])
    >>> schedule = fedsim.systems.schedule(fedsim.UniformSampler(data, clients=2, seed=0), 3, steps=np.array([1, 2, 3, 4]))
    >>> plot_timeline(schedule).axes[0].get_xlabel()
    'simulated seconds'
    """
    checks.whole(1, clients=clients)
    checks.positive(or_none=True, seconds=seconds)
    times, timeline = schedule.steps.time, schedule.timeline
    if not len(timeline.client):
        raise ValueError(
            "The schedule has no dispatch whose outcome is known, so there is nothing to draw: simulate more steps."
        )
    end = float(times[min(len(times), _STEPS) - 1] if len(times) else timeline.stop.max())
    end = min(seconds or end, schedule.seconds)
    order = np.argsort(timeline.number)
    order = order[timeline.start[order] < end]
    _, first = np.unique(timeline.client[order], return_index=True)
    shown = [int(client) for client in timeline.client[order][np.sort(first)[:clients]]]
    rows = {client: row for row, client in enumerate(shown)}
    order = order[np.isin(timeline.client[order], shown)]
    y = np.array([rows[int(client)] for client in timeline.client[order]])
    start, stop, version, outcome = (
        column[order] for column in (timeline.start, timeline.stop, timeline.version, timeline.outcome)
    )

    figure = new_figure(9.0, 1.6 + 0.2 * len(shown))
    axes = figure.subplots()
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    scale = ScalarMappable(Normalize(0, max(1, int(version.max()))), colormaps[LIGHTNESS])
    axes.barh(y, stop - start, left=start, height=0.72, color=scale.to_rgba(version), edgecolor="white", linewidth=0.6)
    for index, name in enumerate(OUTCOMES):
        if np.any(ends := outcome == index):
            marker, color = _MARKS[name]
            axes.plot(stop[ends], y[ends], marker, color=color, markersize=4.5, linestyle="none", label=name, clip_on=True)
    steps = times[times <= end]
    axes.vlines(steps, -0.7, len(shown) - 0.3, color="black", linewidth=0.5, alpha=0.5, label="server step", zorder=0)
    if len(steps) <= _NUMBERED_STEPS:
        for number, time in enumerate(steps):
            axes.annotate(f"{number + 1}", (time, -0.75), ha="center", va="bottom", fontsize=7, annotation_clip=False)
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(len(shown) - 0.3, -0.7)
    axes.set_yticks(range(len(shown)), [shorten(client_ids[c] if client_ids is not None else c, 16) for c in shown], fontsize=8)
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("client")
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    ticks = MaxNLocator(integer=True, min_n_ticks=1)
    figure.colorbar(scale, ax=axes, label="version that it started from", pad=0.01, fraction=0.04, ticks=ticks)
    return figure
