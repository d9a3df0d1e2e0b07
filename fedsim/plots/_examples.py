"""A plot of examples of some clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import ClientDataset, FederatedData
from fedsim.plots._canvas import GREY, check_feature, label_name, new_figure, pick_clients, shorten

_LINE = 116


def plot_examples(
    data: FederatedData,
    feature: str = "x",
    label: str = "y",
    clients: int | Sequence[str] = 4,
    examples: int = 8,
    names: Sequence[str] | None = None,
    decode: Callable[[np.ndarray], str] | None = None,
) -> Any:
    """Shows the first examples of some clients, as images, text or strips of numbers.

    A feature is shown as images if its examples have shape ``[height, width]`` or ``[height, width, channels]`` with 1, 3 or 4
    channels; as text if it has strings or bytes, or if ``decode`` is given; and otherwise as strips of numbers.

    Args:
      data: the population.
      feature: the feature to show.
      label: the feature whose value is written next to each example, if it has one value per example.
      clients: the number of clients to show, spread evenly over the population, or the ids of clients.
      examples: the number of examples to show per client.
      names: the names of the labels 0, 1, ...
      decode: a function from one example, such as an array of token ids, to text.

    Returns:
      A matplotlib figure.

    Raises:
      KeyError: there is no client of a given id.
      ValueError: there is no such feature; none of the clients has examples; ``examples`` is not positive.

    >>> data = FederatedData.from_arrays({"x": np.zeros([4, 8, 8, 1], np.uint8), "y": [0, 1, 1, 2]}, sizes=[2, 2])
    >>> len(plot_examples(data).axes)
    4
    """
    check_feature(data, feature)
    checks.whole(1, examples=examples, remedy="it is the number of examples per client")
    datasets = [data.client(i) for i in pick_clients(data, clients)]
    kind = kind_of(data, feature, decode)
    columns = min(examples, max(len(dataset) for dataset in datasets))
    if kind == "image":
        figure = new_figure(1.3 + 0.95 * columns, 0.5 + 1.15 * len(datasets))
    else:
        figure = new_figure(9, 0.7 + len(datasets) * ((0.35 + 0.19 * columns) if kind == "text" else 1.2))
    draw_examples(figure, datasets, feature, label, columns, names, decode, kind)
    return figure


def kind_of(data: FederatedData, feature: str, decode: Callable[[np.ndarray], str] | None) -> str:
    """Returns how to show a feature: as ``image``, ``text`` or ``numbers``."""
    column = data.columns[feature]
    if decode is not None or column.dtype.kind in "OSU":
        return "text"
    shape = column.shape[1:]
    image = len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4))
    return "image" if image and min(shape[:2]) > 1 else "numbers"


def draw_examples(
    figure: Any,
    datasets: Sequence[ClientDataset],
    feature: str,
    label: str,
    examples: int,
    names: Sequence[str] | None,
    decode: Callable[[np.ndarray], str] | None,
    kind: str,
) -> None:
    """Draws `plot_examples` into an existing figure or subfigure."""
    caption = f", with {label} above each" if kind == "image" and any(_labels(datasets[0], label, names, 1)) else ""
    clients = f"{len(datasets)} client{'s' if len(datasets) > 1 else ''}"
    counts = "" if kind == "text" else " (number of examples in parentheses)"
    figure.suptitle(f"First examples ({feature}) of {clients}{counts}{caption}", fontsize=10)
    if kind == "image":
        _images(figure, datasets, feature, label, examples, names)
    elif kind == "text":
        _text(figure, datasets, feature, label, examples, names, decode)
    else:
        _strips(figure, datasets, feature, examples)


def _labels(dataset: ClientDataset, label: str, names: Sequence[str] | None, examples: int) -> list[str]:
    values = dataset.examples.get(label)
    if values is None or values.ndim != 1:
        return [""] * min(examples, len(dataset))
    captions = [f"{v:.3g}" if values.dtype.kind == "f" else label_name(v, names) for v in values[:examples]]
    return [shorten(name, 12) for name in captions]


def _images(
    figure: Any, datasets: Sequence[ClientDataset], feature: str, label: str, examples: int, names: Sequence[str] | None
) -> None:
    for dataset, row in zip(datasets, figure.subplots(len(datasets), examples, squeeze=False), strict=True):
        images, captions = np.asarray(dataset[feature][:examples]), _labels(dataset, label, names, examples)
        for column, axes in enumerate(row):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if column == 0:
                axes.set_ylabel(f"{shorten(dataset.client_id, 16)}\n({len(dataset):,})", fontsize=8, rotation=0, ha="right")
            if column < len(images):
                # All images of a client share one range; matplotlib expects colours in [0, 1].
                image, low, high = images[column], float(images.min()), float(images.max())
                if image.ndim == 3 and image.shape[-1] > 1:
                    image = image if image.dtype == np.uint8 else (image - low) / max(high - low, 1e-9)
                axes.imshow(np.squeeze(image), cmap="gray", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest")
                axes.set_title(captions[column], fontsize=8, pad=2, color=GREY)


def _text(
    figure: Any,
    datasets: Sequence[ClientDataset],
    feature: str,
    label: str,
    examples: int,
    names: Sequence[str] | None,
    decode: Callable[[np.ndarray], str] | None,
) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    y = 0.0
    lines: list[tuple[float, str, dict[str, Any]]] = []
    for dataset in datasets:
        lines.append((y, f"{shorten(dataset.client_id, 60)} ({len(dataset):,} examples)", {"fontweight": "bold"}))
        y += 1
        for value, caption in zip(dataset[feature][:examples], _labels(dataset, label, names, examples), strict=True):
            text = decode(value) if decode is not None else value
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            text = " ".join(text.split()) or "(empty)"
            line = shorten(f"{caption}: {text}" if caption else text, _LINE)
            lines.append((y, "  " + line, {"family": "monospace"}))
            y += 1
        y += 0.7
    axes.set_ylim(y, -0.5)
    for position, line, style in lines:
        axes.text(0, position, line, fontsize=8, va="center", **style)


def _strips(figure: Any, datasets: Sequence[ClientDataset], feature: str, examples: int) -> None:
    """Shows each example as a row of cells; zero is in the middle of the colour map."""
    rows = [np.asarray(dataset[feature][:examples], np.float64) for dataset in datasets]
    # A client without examples is shown as a single zero, which is white.
    blocks = [block.reshape(len(block), -1) if block.size else np.zeros([1, 1]) for block in rows]
    largest = max(1e-9, *(float(np.abs(block).max(initial=0, where=np.isfinite(block))) for block in blocks))
    all_axes = figure.subplots(len(datasets), 1, squeeze=False)[:, 0]
    for dataset, block, axes in zip(datasets, blocks, all_axes, strict=True):
        image = axes.imshow(block, aspect="auto", cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest")
        axes.set_yticks([])
        axes.set_ylabel(
            f"{shorten(dataset.client_id, 16)}\n({len(dataset):,})", fontsize=8, rotation=0, ha="right", va="center"
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8, labelbottom=axes is all_axes[-1])
    all_axes[-1].set_xlabel("component (one row per example)", fontsize=8)
    figure.colorbar(image, ax=list(all_axes), label="value")
