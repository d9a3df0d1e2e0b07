"""A plot of the clients' label distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.heterogeneity import label_emd
from fedsim.plots._canvas import BLUE, GREY, LIGHTNESS, ORANGE, check_feature, label_name, new_figure, pick_clients, shorten

_MOST_LABELS = 100
_MOST_BUBBLE_ROWS = 30


def plot_labels(
    data: FederatedData, feature: str = "y", clients: int | Sequence[str] = 10, names: Sequence[str] | None = None
) -> Any:
    """Shows the label distributions of some clients, with that of the whole population in the first row.

    Up to 30 clients are shown as bubbles whose area is the label's share of the client's examples. More clients are shown as a
    heat map, ordered by their most frequent label. If there are more than 100 labels, the 100 most frequent ones are shown.
    A hidden label, -1, has a column of its own, and does not count in the distance to the population in the title.

    Args:
      data: the population.
      feature: the feature with the labels, one per example.
      clients: the number of clients to show, spread evenly over the population, or the ids of clients.
      names: the names of the labels 0, 1, ...; default: the labels themselves.

    Returns:
      A matplotlib figure.

    Raises:
      KeyError: there is no client of a given id.
      ValueError: there is no such feature; there is not one label per example, or all are hidden; none of the clients has
        examples.

    >>> data = FederatedData.from_arrays({"y": [0, 1, 1, 2]}, sizes=[2, 2])
    >>> figure = plot_labels(data, names=["cat", "dog", "owl"])
    >>> [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    ['cat', 'dog', 'owl']
    """
    check_feature(data, feature)
    rows = len(pick_clients(data, clients))
    labels = min(_MOST_LABELS, len(np.unique(data.columns[feature][:])))
    bubbles = rows <= _MOST_BUBBLE_ROWS
    figure = new_figure(min(16, max(5.5, 1.8 + 0.19 * labels)), 1.5 + 0.29 * rows if bubbles else min(10.0, 3 + 0.05 * rows))
    draw_labels(figure.subplots(), data, feature, clients, names)
    return figure


def draw_labels(
    axes: Any, data: FederatedData, feature: str, clients: int | Sequence[str], names: Sequence[str] | None
) -> None:
    """Draws `plot_labels` into existing axes."""
    emd = label_emd(data, feature=feature)
    positions = pick_clients(data, clients)
    labels, code = np.unique(data.columns[feature][:], return_inverse=True)
    overall = np.bincount(code) / len(code)
    shown = np.sort(np.argsort(-overall, kind="stable")[:_MOST_LABELS])
    client_codes = [code[data.offsets[i] : data.offsets[i + 1]] for i in positions]
    shares = np.stack([np.bincount(codes, minlength=len(labels)) / max(1, len(codes)) for codes in client_codes])
    cut = f", the {_MOST_LABELS} most frequent of {len(labels):,} labels" if len(shown) < len(labels) else ""
    subset = f"{len(positions):,} of {data.num_clients:,} clients" if len(positions) < data.num_clients else "all clients"
    distance = f"mean L1 distance to the population {emd:.2f}"
    axes.set_title(f"Labels of {subset}; {distance}{cut}", fontsize=10)
    axes.set_xlabel(f"label {feature}")
    if len(positions) <= _MOST_BUBBLE_ROWS:
        ids = [f"{shorten(data.client_ids[i], 18)} ({data.sizes[i]:,})" for i in positions]
        _bubbles(axes, shares[:, shown], overall[shown], ["all clients", *ids])
    else:
        order = np.lexsort((-shares.max(1), shares.argmax(1)))
        _heat_map(axes, shares[order][:, shown], overall[shown])
    _name_columns(axes, [label_name(labels[i], names) for i in shown])


def _bubbles(axes: Any, shares: np.ndarray, overall: np.ndarray, rows: list[str]) -> None:
    """Draws the bubbles, the largest of them nearly as wide as a cell; the population has its own colour, above a line."""
    figure = axes.get_figure(root=True)
    figure.canvas.draw()  # The size of a cell is known only after the layout.
    box = axes.get_window_extent()
    cell = 72 / figure.dpi * min(box.width / shares.shape[1], box.height / len(rows))
    largest = min(0.95 * cell, 22.0) ** 2
    table = np.concatenate([overall[None], shares])
    row, column = np.nonzero(table)
    colours = np.where(row == 0, ORANGE, BLUE)
    scale = table.max()
    axes.scatter(column, row, s=largest * table[row, column] / scale, c=colours, linewidths=0)
    axes.axhline(0.5, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-0.8, shares.shape[1] - 0.2)
    axes.grid(alpha=0.15)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("client (examples)")
    for share in (scale, scale / 10):
        size, name = largest * share / scale, f"{float(f'{100 * share:.2g}'):g}% of a client's examples"
        axes.scatter([], [], s=size, c=BLUE, linewidths=0, label=name)
    axes.get_figure(root=False).legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False, borderpad=0.9)


def _heat_map(axes: Any, shares: np.ndarray, overall: np.ndarray) -> None:
    """Draws one thin row per client, and the population as a wider band above, because one thin row would be invisible."""
    from matplotlib.colors import PowerNorm

    band = max(1, len(shares) // 25)
    gap = np.full((max(1, band // 3), shares.shape[1]), np.nan)
    cells = np.concatenate([np.repeat(overall[None], band, 0), gap, shares])
    # The square root makes small shares visible.
    image = axes.imshow(cells, aspect="auto", cmap=LIGHTNESS, interpolation="nearest", norm=PowerNorm(0.5, vmin=0))
    first = band + len(gap)
    axes.set_yticks([(band - 1) / 2, first, first + len(shares) - 1], ["all clients", "1", f"{len(shares):,}"], fontsize=8)
    axes.set_ylabel("clients, sorted by most frequent label")
    axes.get_figure(root=False).colorbar(image, ax=axes, label="share of the client's examples", format=lambda x, _: f"{x:.0%}")


def _name_columns(axes: Any, names: list[str]) -> None:
    names = [shorten(name, 14) for name in names]
    every = max(1, -(-len(names) // 64)) if max(map(len, names)) <= 3 else 1
    rotation = 90 if max(map(len, names)) > 2 and len(names) > 12 else 0
    size = 8 if len(names) <= 40 else 7 if rotation else 6
    axes.set_xticks(range(0, len(names), every), names[::every], fontsize=size, rotation=rotation)
