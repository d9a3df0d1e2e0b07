"""What examples look like."""

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
    """The first examples of some clients, a row or a paragraph each: images, text, sequences or plain numbers.

    Images are ``[height, width]``, with 1, 3 or 4 channels behind or none; strings and bytes are text, and so is whatever
    ``decode`` reads; all else is drawn as a strip of numbers.

    Args:
      data: the population.
      feature: the column to show.
      label: the column to write beside each example; left out if there is none with one value per example.
      clients: how many, spread evenly over the population, or their names.
      examples: how many of each.
      names: names of the labels 0, 1, ...
      decode: one example (token ids, say) to text.

    Raises:
      KeyError: there is no client of this name.
      ValueError: no such feature, nothing to draw, ``examples`` not positive.

    >>> data = FederatedData.from_arrays({"x": np.zeros([4, 8, 8, 1], np.uint8), "y": [0, 1, 1, 2]}, sizes=[2, 2])
    >>> len(plot_examples(data).axes)
    4
    """
    check_feature(data, feature)
    checks.whole(1, examples=examples, remedy="how many of each client")
    people = [data.client(i) for i in pick_clients(data, clients)]
    kind = kind_of(data, feature, decode)
    columns = min(examples, max(len(person) for person in people))
    if kind == "image":
        figure = new_figure(1.3 + 0.95 * columns, 0.5 + 1.15 * len(people))
    else:
        figure = new_figure(9, 0.7 + len(people) * ((0.35 + 0.19 * columns) if kind == "text" else 1.2))
    draw_examples(figure, people, feature, label, columns, names, decode, kind)
    return figure


def kind_of(data: FederatedData, feature: str, decode: Callable[[np.ndarray], str] | None) -> str:
    """``image``, ``text`` or ``numbers``."""
    column = data.columns[feature]
    if decode is not None or column.dtype.kind in "OSU":
        return "text"
    shape = column.shape[1:]
    image = len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4))
    return "image" if image and min(shape[:2]) > 1 else "numbers"


def draw_examples(
    figure: Any,
    people: Sequence[ClientDataset],
    feature: str,
    label: str,
    examples: int,
    names: Sequence[str] | None,
    decode: Callable[[np.ndarray], str] | None,
    kind: str,
) -> None:
    """`plot_examples` into a figure (or part of one) that is there."""
    beside = f", {label} above each" if kind == "image" and any(_labels(people[0], label, names, 1)) else ""
    figure.suptitle(f"first examples ({feature}) of {len(people)} client{'s' if len(people) > 1 else ''}{beside}", fontsize=10)
    if kind == "image":
        _images(figure, people, feature, label, examples, names)
    elif kind == "text":
        _text(figure, people, feature, label, examples, names, decode)
    else:
        _strips(figure, people, feature, examples)


def _labels(person: ClientDataset, label: str, names: Sequence[str] | None, examples: int) -> list[str]:
    values = person.examples.get(label)
    if values is None or values.ndim != 1:
        return [""] * min(examples, len(person))
    written = [f"{v:.3g}" if values.dtype.kind == "f" else label_name(v, names) for v in values[:examples]]
    return [shorten(name, 12) for name in written]


def _images(
    figure: Any, people: Sequence[ClientDataset], feature: str, label: str, examples: int, names: Sequence[str] | None
) -> None:
    for person, line in zip(people, figure.subplots(len(people), examples, squeeze=False), strict=True):
        images, captions = np.asarray(person[feature][:examples]), _labels(person, label, names, examples)
        for column, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if column == 0:
                axes.set_ylabel(f"{shorten(person.client_id, 16)}\n({len(person):,})", fontsize=8, rotation=0, ha="right")
            if column < len(images):
                # One range for all of a client's images; colours must lie between 0 and 1.
                image, low, high = images[column], float(images.min()), float(images.max())
                if image.ndim == 3 and image.shape[-1] > 1:
                    image = image if image.dtype == np.uint8 else (image - low) / max(high - low, 1e-9)
                axes.imshow(np.squeeze(image), cmap="gray", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest")
                axes.set_title(captions[column], fontsize=8, pad=2, color=GREY)


def _text(
    figure: Any,
    people: Sequence[ClientDataset],
    feature: str,
    label: str,
    examples: int,
    names: Sequence[str] | None,
    decode: Callable[[np.ndarray], str] | None,
) -> None:
    axes = figure.subplots()
    axes.set_axis_off()
    at = 0.0
    lines: list[tuple[float, str, dict[str, Any]]] = []
    for person in people:
        lines.append((at, f"{shorten(person.client_id, 60)} ({len(person):,} examples)", {"fontweight": "bold"}))
        at += 1
        for value, caption in zip(person[feature][:examples], _labels(person, label, names, examples), strict=True):
            written = decode(value) if decode is not None else value
            written = written.decode("utf-8", "replace") if isinstance(written, bytes) else str(written)
            written = " ".join(written.split()) or "(empty)"
            line = shorten(f"{caption}: {written}" if caption else written, _LINE)
            lines.append((at, "  " + line, {"family": "monospace"}))
            at += 1
        at += 0.7
    axes.set_ylim(at, -0.5)
    for y, line, style in lines:
        axes.text(0, y, line, fontsize=8, va="center", **style)


def _strips(figure: Any, people: Sequence[ClientDataset], feature: str, examples: int) -> None:
    """Examples as rows of cells, zero in the middle of the colours."""
    rows = [np.asarray(person[feature][:examples], np.float64) for person in people]
    # A client without examples has a strip, too: a zero, which is white.
    blocks = [block.reshape(len(block), -1) if block.size else np.zeros([1, 1]) for block in rows]
    most = max(1e-9, *(float(np.abs(block).max(initial=0, where=np.isfinite(block))) for block in blocks))
    lines = figure.subplots(len(people), 1, squeeze=False)[:, 0]
    for person, block, axes in zip(people, blocks, lines, strict=True):
        image = axes.imshow(block, aspect="auto", cmap="PuOr", vmin=-most, vmax=most, interpolation="nearest")
        axes.set_yticks([])
        axes.set_ylabel(f"{shorten(person.client_id, 16)}\n({len(person):,})", fontsize=8, rotation=0, ha="right", va="center")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8, labelbottom=axes is lines[-1])
    lines[-1].set_xlabel("component; a row is an example", fontsize=8)
    figure.colorbar(image, ax=list(lines), label="value")
