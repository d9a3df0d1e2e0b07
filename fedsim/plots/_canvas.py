"""Functions that all plots share: figures, colours, and the choice of clients to show."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData

# M. Okabe, K. Ito, "Color universal design", 2002.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
LIGHTNESS = "cividis"
# 7 colours times 4 dashes and 9 markers have no common divisor, so that 252 curves have different styles.
_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", (0, (1, 1)))
_MARKERS = "os^vDPX*<"
# A legend above the axes may have so many characters; inches of a line of a legend, and of a character.
_LEGEND_ABOVE, _LINE, _CHARACTER = 80, 0.19, 0.075


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches, made without pyplot, which would choose a backend for the whole process.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib, which is not installed: pip install matplotlib.") from error
    figure: Any = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.savefig = functools.partial(figure.savefig, bbox_inches="tight")  # Nothing beyond the edge is cut off.
    figure._repr_png_ = functools.partial(_png, figure)  # Notebooks display objects with this method.
    return figure


def style(number: int) -> dict[str, Any]:
    """Returns the colour, the dashes and the marker of a curve, which differ from those of up to 251 other curves.

    >>> len({str(style(number)) for number in range(252)})
    252
    """
    dashes = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": dashes, "marker": marker, "markersize": 3, "linewidth": 1.4}


def add_legend(figure: Any, axes: Any) -> None:
    """Adds a legend of the curves of ``axes``: above all axes if it is short, otherwise to their right, with space for it."""
    handles, names = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    if sum(len(name) + 8 for name in names) <= min(_LEGEND_ABOVE, width / _CHARACTER):
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False, fontsize=9)
        return
    shown = [shorten(name, 50) for name in names]
    figure.set_size_inches(width + _CHARACTER * max(map(len, shown)) + 0.6, max(height, _LINE * len(shown) + 0.4))
    figure.legend(handles, shown, loc="outside right upper", frameon=False, fontsize=9)


def whole_ticks(axis: Any) -> None:
    """Places the ticks of an axis of counts, such as rounds, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def logarithmic(axis: Any) -> None:
    """Makes an axis logarithmic, which its lines, its label and its numbers show."""
    from matplotlib.ticker import LogLocator

    def between(value: float, _: int) -> str:
        """Names the lines between powers of ten: 2 and 5 in two decades, all of them in less than one."""
        decades = np.ptp(np.log10(axis.get_view_interval()))
        named = decades < 0.7 or (decades < 2 and round(value / 10 ** np.floor(np.log10(value))) in (2, 5))
        return f"{value:g}" if named else ""

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_label_text(f"{axis.get_label_text()} (logarithmic)")
    axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=50))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(between)
    axis.grid(which="minor", alpha=0.12)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def pick_clients(data: FederatedData, clients: int | Sequence[str]) -> list[int]:
    """Returns the positions of the clients with the given ids, or of a number of clients, evenly spread over the nonempty ones.

    Raises:
      KeyError: there is no client of a given id.
      ValueError: ``clients`` is not positive, or none of the clients has examples.
    """
    if not isinstance(clients, int | np.integer):
        positions = [data.index(client_id) for client_id in clients]
        if not data.sizes[positions].any():
            raise ValueError(
                "There is nothing to draw: none of the given clients has examples. Give other ids, or a number of clients."
            )
        return positions
    checks.whole(1, clients=clients, remedy="it is the number of clients to show")
    nonempty = np.flatnonzero(data.sizes)
    if not len(nonempty):
        raise ValueError("There is nothing to draw: no client of the population has examples.")
    chosen = np.unique(np.linspace(0, len(nonempty) - 1, min(clients, len(nonempty))).round().astype(np.int64))
    return [int(i) for i in nonempty[chosen]]


def check_feature(data: FederatedData, feature: str) -> None:
    """Raises ``ValueError`` if there is no such feature."""
    if feature not in data.columns:
        raise ValueError(f"There is no feature {feature!r}: the data has the features {sorted(data.columns)}.")


def label_name(label: Any, names: Sequence[str] | None) -> str:
    """Returns the name of a label, or the label as text if ``names`` has no name for it."""
    return names[int(label)] if names is not None and 0 <= int(label) < len(names) else str(label)


def shorten(text: Any, length: int) -> str:
    """Cuts a text to ``length`` characters, ending with an ellipsis, and escapes dollars, which would begin formulas."""
    text = str(text)
    return (text if len(text) <= length else text[: length - 1] + "…").replace("$", r"\$")
