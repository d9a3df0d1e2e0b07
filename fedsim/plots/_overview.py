"""A dataset at a glance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.plots._canvas import new_figure, pick_clients
from fedsim.plots._examples import draw_examples, kind_of
from fedsim.plots._labels import draw_labels
from fedsim.plots._sizes import draw_sizes

_CLIENTS, _EXAMPLES = 4, 8


def plot_overview(
    splits_or_data: Any,
    *,
    title: str = "",
    feature: str = "x",
    label: str = "y",
    names: Sequence[str] | None = None,
    decode: Callable[[np.ndarray], str] | None = None,
) -> Any:
    """Sizes, labels of a few clients, and sample examples in one figure; what the data does not have is left out.

    Args:
      splits_or_data: a population; or what `fedsim.datasets.load` gives: sizes of its ``train`` and ``test``, the rest of
        ``train``.
      title: above everything.
      feature, label, names, decode: see `plot_labels` and `plot_examples`.

    >>> data = FederatedData.from_arrays({"x": np.zeros([4, 8, 8, 1], np.uint8), "y": [0, 1, 1, 2]}, sizes=[2, 2])
    >>> len(plot_overview(data, title="four examples").subfigs)
    3
    """
    train = splits_or_data if isinstance(splits_or_data, FederatedData) else splits_or_data.train
    test = None if train is splits_or_data else splits_or_data.test
    held = bool(train.num_examples)
    labelled = held and label in train.columns and train.columns[label].ndim == 1 and train.columns[label].dtype.kind != "f"
    kind = kind_of(train, feature, decode) if held and feature in train.columns else None
    heights = [2.6]
    heights += [3.9] if labelled else []
    heights += [{"image": 1.25 * _CLIENTS, "text": 1.8 * _CLIENTS, "numbers": 3.6}[kind]] if kind else []
    figure = new_figure(10, sum(heights) + 0.3)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    # `subfigures` gives one or an array of them, by their number.
    parts = iter(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))
    if test is None:
        draw_sizes(next(parts).subplots(), train)
    else:
        left, right = next(parts).subplots(1, 2)
        draw_sizes(left, train, "train: ")
        draw_sizes(right, test, "test: ")
    if labelled:
        draw_labels(next(parts).subplots(), train, label, 10, names)
    if kind:
        people = [train.client(i) for i in pick_clients(train, _CLIENTS)]
        columns = min(_EXAMPLES, max(len(person) for person in people))
        draw_examples(next(parts), people, feature, label, columns, names, decode, kind)
    return figure
