"""An overview plot of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.heterogeneity import is_labelled
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
    """Shows sizes, label distributions and examples of a dataset in one figure, as far as the data has them.

    Args:
      splits_or_data: a population, or the return value of `fedsim.datasets.load`. Of the latter, sizes are shown for ``train``
        and ``test``, and labels and examples for ``train``.
      title: the title of the figure.
      feature, label, names, decode: as in `plot_labels` and `plot_examples`.

    Returns:
      A matplotlib figure.

    >>> data = FederatedData.from_arrays({"x": np.zeros([4, 8, 8, 1], np.uint8), "y": [0, 1, 1, 2]}, sizes=[2, 2])
    >>> len(plot_overview(data, title="four examples").subfigs)
    3
    """
    train = splits_or_data if isinstance(splits_or_data, FederatedData) else splits_or_data.train
    test = None if train is splits_or_data else splits_or_data.test
    nonempty = bool(train.num_examples)
    column = train.columns.get(label) if nonempty else None
    labelled = column is not None and column.ndim == 1 and column.dtype.kind != "f" and is_labelled(column[:]).any()
    kind = kind_of(train, feature, decode) if nonempty and feature in train.columns else None
    heights = [2.6]
    heights += [3.9] if labelled else []
    heights += [{"image": 1.25 * _CLIENTS, "text": 1.8 * _CLIENTS, "numbers": 3.6}[kind]] if kind else []
    figure = new_figure(10, sum(heights) + 0.3)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    # `subfigures` returns a single subfigure or an array of them.
    subfigures = iter(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))
    if test is None:
        draw_sizes(next(subfigures).subplots(), train)
    else:
        left, right = next(subfigures).subplots(1, 2)
        draw_sizes(left, train, "Train: ")
        draw_sizes(right, test, "Test: ")
    if labelled:
        draw_labels(next(subfigures).subplots(), train, label, 10, names)
    if kind:
        datasets = [train.client(i) for i in pick_clients(train, _CLIENTS)]
        columns = min(_EXAMPLES, max(len(dataset) for dataset in datasets))
        draw_examples(next(subfigures), datasets, feature, label, columns, names, decode, kind)
    return figure
