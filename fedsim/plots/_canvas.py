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
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
LIGHTNESS = "cividis"


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
    figure._repr_png_ = functools.partial(_png, figure)  # Notebooks display objects with this method.
    return figure


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
