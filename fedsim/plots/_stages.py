"""A picture of the stages of a federated program."""

from __future__ import annotations

import textwrap
from typing import Any

from fedsim.plots._canvas import BLUE, GREY, ORANGE, new_figure
from fedsim.primitives import Program, Stage

_WIDTH = 46  # characters of a line of text


def plot_stages(program: Program) -> Any:
    """Draws a program of `fedsim.primitives.stages`: server on the left, clients on the right, arrows for messages.

    The stages run from top to bottom. A reduction has its name at its arrow.

    Args:
      program: the program.

    Returns:
      A matplotlib figure.

    >>> import jax.numpy as jnp
    >>> from fedsim import primitives as fed
    >>> clients = fed.Placement("clients", 3)
    >>> program = fed.stages(lambda x: fed.mean(fed.map(jnp.square, x)), fed.place(jnp.arange(3.0), clients))
    >>> [text.get_text() for text in plot_stages(program).axes[0].texts][:2]
    ['server', 'clients']
    """
    figure = new_figure(8.6, 1.0 + 0.75 * len(program.stages))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(program.stages) + 0.4, -1)
    axes.text(0.22, -0.6, "server", ha="center", fontweight="bold")
    axes.text(0.78, -0.6, "clients", ha="center", fontweight="bold")
    for row, stage in enumerate(program.stages):
        if stage.kind in ("broadcast", "reduction"):
            _arrow(axes, stage, row)
        else:
            x, color = (0.22, GREY) if stage.kind == "server" else (0.78, BLUE)
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": color, "linewidth": 1.5}
            axes.text(x, row, _text(stage), ha="center", va="center", fontsize=7, bbox=box)
    return figure


def _arrow(axes: Any, stage: Stage, row: int) -> None:
    down = stage.kind == "broadcast"
    ends = (0.1, 0.9) if down else (0.9, 0.1)
    axes.annotate("", xy=(ends[1], row), xytext=(ends[0], row), arrowprops={"arrowstyle": "->", "color": ORANGE})
    assert stage.placement is not None
    label = f"to each of {stage.placement.size} {stage.placement.name}" if down else stage.name
    sent = _shortened(", ".join(stage.writes if down else stage.reads))
    axes.text(0.5, row - 0.08, f"{label}: {sent}", ha="center", va="bottom", fontsize=7)


def _text(stage: Stage) -> str:
    title = "" if stage.placement is None else f"each of {stage.placement.size} {stage.placement.name}\n"
    return f"{title}{_shortened(', '.join(stage.writes))}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _WIDTH, placeholder=" …") or "nothing"
