"""Few labels: populations in which most examples have no label.

A hidden label is -1, as in scikit-learn's semi-supervised learning. Algorithms that learn only from labels refuse such data,
so that no label is used by mistake.
"""

from __future__ import annotations

import warnings

import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData


def hide_labels(
    data: FederatedData, *, fraction: float | None = None, per_class: int | None = None, seed: int, feature: str = "y"
) -> FederatedData:
    """Replaces all labels by -1 except for a fraction of each client's, or except for a number of each class.

    Args:
      data: the population. The labels are copied; all other columns are shared with the result.
      fraction: the fraction of labels that every client keeps, in [0, 1]. Of n examples it is ``fraction * n``, rounded up or
        down at random such that the mean is exact.
      per_class: the number of labels that are kept of each class, drawn from the examples of all clients together, instead of
        ``fraction``.
      seed: the same seed keeps the same labels.
      feature: name of the labels, ``int [rows]`` and at least 0. The result has their dtype, or ``int32`` if that is unsigned.

    Guarantees:
      - Clients and all other features do not change.
      - With ``fraction``, a client's labels depend on the seed, its position and its size. A larger fraction keeps the same
        labels and more.

    Raises:
      ValueError: neither or both of ``fraction`` and ``per_class`` are given, or one is out of its range; there is no such
        feature, it does not hold one label per example, or some labels are hidden already and ``per_class`` would need more.

    >>> data = FederatedData.from_arrays({"y": [0, 1, 0, 1, 0, 1]}, sizes=[4, 2])
    >>> hide_labels(data, fraction=0.5, seed=0).columns["y"].tolist()
    [0, -1, 0, -1, -1, 1]
    >>> hide_labels(data, per_class=1, seed=0).columns["y"].tolist()
    [0, 1, -1, -1, -1, -1]
    """
    if (fraction is None) == (per_class is None):
        raise ValueError(
            f"Expected fraction or per_class, got fraction={fraction} and per_class={per_class}: give one of them."
        )
    checks.number(least=0, most=1, or_none=True, fraction=fraction)
    checks.whole(1, or_none=True, per_class=per_class)
    labels = _labels(data, feature)
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "labels")))
    kept = np.zeros(len(labels), bool)
    if per_class is not None:
        draw = rng.generator(words, 0)
        for label in np.unique(labels[labels >= 0]):
            rows = np.flatnonzero(labels == label)
            if len(rows) < per_class:
                raise ValueError(
                    f"Expected at least per_class={per_class} labels of each class, got {len(rows)} of class {label}: lower it."
                )
            kept[draw.permutation(rows)[:per_class]] = True
    else:
        for client in range(data.num_clients):
            start, stop = data.offsets[client : client + 2]
            draw = rng.generator(words, client)
            # The draws are made in this order so that a larger fraction keeps the same labels.
            extra, order = draw.random(), draw.permutation(stop - start)
            kept[start + order[: int(fraction * (stop - start) + extra)]] = True
        if fraction and len(labels) and not kept.any():
            warnings.warn(
                f"All labels are hidden: fraction={fraction} of the labels of each client is rounded to 0. Give a larger one.",
                stacklevel=2,
            )
    hidden = labels.astype(labels.dtype if labels.dtype.kind == "i" else np.int32)
    hidden[~kept] = -1
    return FederatedData({**data.columns, feature: hidden}, data.offsets, data.client_ids)


def only_labelled(data: FederatedData, *, feature: str = "y") -> FederatedData:
    """Returns the population without the examples whose label is hidden; clients without labels remain, and are empty.

    Args:
      data: the population. Its columns are copied.
      feature: name of the labels, ``int [rows]``; -1 is a hidden label.

    Guarantees:
      - The order of clients and of their examples does not change.

    Raises:
      ValueError: there is no such feature, or it does not hold one label per example.

    >>> data = FederatedData.from_arrays({"x": [5.0, 6.0, 7.0], "y": [-1, 1, -1]}, sizes=[2, 1])
    >>> kept = only_labelled(data)
    >>> kept.columns["x"].tolist(), kept.sizes.tolist()
    ([6.0], [1, 0])
    """
    kept = _labels(data, feature) >= 0
    columns = {name: column[np.flatnonzero(kept)] for name, column in data.columns.items()}
    return FederatedData(columns, np.concatenate([[0], np.cumsum(kept)])[data.offsets], data.client_ids)


def _labels(data: FederatedData, feature: str) -> np.ndarray:
    if feature not in data.columns:
        raise ValueError(f"There is no feature {feature!r}; the data has {sorted(data.columns)}: name the labels' column.")
    labels = np.asarray(data.columns[feature])
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"Expected one whole number per example in {feature!r}, got {labels.dtype} {list(labels.shape)}: number the "
            "classes."
        )
    return labels
