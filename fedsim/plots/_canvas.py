"""What all pictures share: a figure that belongs to no window, colours, and which clients are shown."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData

# M. Okabe, K. Ito, "Color universal design", 2002.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
LIGHTNESS = "cividis"


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches. `Figure` and not pyplot, which would choose a backend for the whole process.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures are drawn by matplotlib: pip install matplotlib.") from error
    figure: Any = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure._repr_png_ = functools.partial(_png, figure)  # A notebook shows what has this, whether pyplot was imported or not.
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def pick_clients(data: FederatedData, clients: int | Sequence[str]) -> list[int]:
    """Positions of the named clients; or of this many, evenly spread over those that hold anything.

    Raises:
      KeyError: there is no client of this name.
      ValueError: none is asked for, or none holds anything.
    """
    if not isinstance(clients, int | np.integer):
        positions = [data.index(client_id) for client_id in clients]
        if not data.sizes[positions].any():
            raise ValueError("There is nothing to draw: no client of these holds an example.")
        return positions
    checks.whole(1, clients=clients, remedy="how many to show")
    holding = np.flatnonzero(data.sizes)
    if not len(holding):
        raise ValueError("There is nothing to draw: no client holds an example.")
    chosen = np.unique(np.linspace(0, len(holding) - 1, min(clients, len(holding))).round().astype(np.int64))
    return [int(i) for i in holding[chosen]]


def check_feature(data: FederatedData, feature: str) -> None:
    """Raises ``ValueError`` if there is no such feature."""
    if feature not in data.columns:
        raise ValueError(f"There is no feature {feature!r}; the data has {sorted(data.columns)}.")


def label_name(label: Any, names: Sequence[str] | None) -> str:
    """The label's name, or itself where ``names`` has none for it."""
    return names[int(label)] if names is not None and 0 <= int(label) < len(names) else str(label)


def shorten(text: Any, length: int) -> str:
    """At most this many characters, the last of them an ellipsis if something was cut; a dollar begins no formula."""
    text = str(text)
    return (text if len(text) <= length else text[: length - 1] + "…").replace("$", r"\$")
