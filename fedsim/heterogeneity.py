"""How unlike clients are: by their labels, and by how many examples they hold.

Label distance: Y. Zhao, M. Li, L. Lai, N. Suda, D. Civin, V. Chandra, "Federated learning with non-IID data", 2018,
section 3: https://arxiv.org/abs/1806.00582. What they call the earth mover's distance of client k is
sum over labels of |p_k(y) - p(y)|: the L1 distance, twice the total variation, from 0 (alike) to 2 (nothing shared).
Effective number of classes: M. O. Hill, "Diversity and evenness", Ecology 54(2), 1973, of order 1: exp(entropy).

Every measure takes a `FederatedData`, or labels ``[n]`` with a partition (a list of index arrays).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedsim.data import FederatedData

Partition = Sequence[np.ndarray]

_BLOCK = 1 << 22


def label_counts(
    data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y"
) -> tuple[np.ndarray, np.ndarray]:
    """How often each client holds each label.

    Args:
      data: a population; or labels ``[n]``, with ``partition``.
      partition: index arrays, one per client.
      feature: which column of the population holds the labels.

    Returns:
      Counts ``int64 [clients, labels]``, and the labels of the columns, ascending: all that occur in ``data``.

    Raises:
      ValueError: labels that are not one value per example, a feature that is not there, labels without a partition.

    >>> counts, labels = label_counts([7, 7, 9], [np.array([0]), np.array([1, 2])])
    >>> counts.tolist(), labels.tolist()
    ([[1, 0], [1, 1]], [7, 9])
    """
    labels, blocks = _counted(data, partition, feature)
    return np.concatenate([*blocks]), labels


def label_distances(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> np.ndarray:
    """Each client's distance from the population's label distribution, ``float64 [clients]`` in [0, 2].

    The sum over labels of \\|p_k(y) - p(y)\\|, where p is that of all clients' examples together; NaN for an empty client.

    >>> label_distances([0, 0, 1, 1], [np.array([0, 1]), np.array([2, 3])]).tolist()
    [1.0, 1.0]
    """
    labels, blocks = _counted(data, partition, feature)
    total = sum((counts.sum(0) for counts in blocks), np.zeros(len(labels), np.int64))
    overall = total / max(1, total.sum())
    distances = [np.where(sizes > 0, np.abs(shares - overall).sum(1), np.nan) for shares, sizes in map(_shares, blocks)]
    return np.concatenate(distances)


def label_emd(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> float:
    """The mean of `label_distances` over clients that hold anything, each counted alike: 0 where all are alike, below 2.

    >>> label_emd([0, 0, 1, 1], [np.array([0, 2]), np.array([1, 3])])
    0.0
    """
    distances = label_distances(data, partition, feature=feature)
    held = distances[~np.isnan(distances)]
    return float(held.mean()) if len(held) else 0.0


def effective_classes(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> np.ndarray:
    """As how many equally frequent labels a client's are as diverse: exp(entropy), ``float64 [clients]``; 0 if it is empty.

    >>> effective_classes([0, 1, 2, 0, 0], [np.array([0, 1, 2]), np.array([3, 4])]).round(6).tolist()
    [3.0, 1.0]
    """

    def effective(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.where(sizes > 0, np.exp(-np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=1)), 0.0)

    _, blocks = _counted(data, partition, feature)
    return np.concatenate([effective(*_shares(counts)) for counts in blocks])


def gini(sizes: FederatedData | Partition | Any) -> float:
    """Gini coefficient of the clients' sizes: 0 if all hold the same number, (n - 1) / n if one of n holds everything.

    Half the mean absolute difference between two clients, over the mean size.

    Args:
      sizes: a population, a partition, or the sizes themselves ``[clients]``.

    Raises:
      ValueError: no clients, or a negative size.

    >>> gini([1, 1, 1]), gini([0, 0, 0, 8])
    (0.0, 0.75)
    """
    if isinstance(sizes, FederatedData):
        sizes = sizes.sizes
    elif len(sizes) and np.ndim(sizes[0]):
        sizes = [len(rows) for rows in sizes]
    ordered = np.sort(np.asarray(sizes, np.float64))
    if not len(ordered) or ordered[0] < 0:
        raise ValueError(f"Expected one size >= 0 per client, got {ordered[:1].tolist() or 'none'}.")
    n, total = len(ordered), ordered.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total else 0.0


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sizes = counts.sum(1)
    return counts / np.maximum(sizes, 1)[:, None], sizes


class _Blocks:
    """Counts ``[clients, labels]`` of some clients after the others, so that a million clients fit; as often as wanted."""

    def __init__(self, code: np.ndarray, owner: np.ndarray, clients: int, labels: int) -> None:
        self._code, self._owner, self._clients, self._labels = code, owner, clients, labels

    def __iter__(self) -> Iterator[np.ndarray]:
        labels = max(1, self._labels)
        step = max(1, _BLOCK // labels)
        for start in range(0, self._clients, step):
            clients = min(step, self._clients - start)
            low, high = np.searchsorted(self._owner, [start, start + clients])
            cell = (self._owner[low:high] - start) * labels + self._code[low:high]
            yield np.bincount(cell, minlength=clients * labels).reshape(clients, labels)[:, : self._labels]


def _counted(data: Any, partition: Partition | None, feature: str) -> tuple[np.ndarray, _Blocks]:
    values, owner, clients = _labels_and_owners(data, partition, feature)
    if not clients:
        raise ValueError("The partition is empty: expected at least one client.")
    labels, code = np.unique(values, return_inverse=True)
    return labels, _Blocks(code, owner, clients, len(labels))


def _labels_and_owners(data: Any, partition: Partition | None, feature: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Labels ``[m]``, the owners of the first of them, ascending, and the number of clients."""
    if isinstance(data, FederatedData):
        if partition is not None:
            raise ValueError("A population has its own partition: give it alone, or give labels and a partition.")
        if feature not in data.columns:
            raise ValueError(f"There is no feature {feature!r}; the data has {sorted(data.columns)}: name the labels' column.")
        values, owner = np.asarray(data.columns[feature][:]), np.repeat(np.arange(data.num_clients), data.sizes)
        clients = data.num_clients
    else:
        if partition is None:
            raise ValueError("Expected labels with a partition, one index array per client; or a FederatedData.")
        chosen = np.concatenate([np.zeros(0, np.int64), *(np.asarray(rows, np.int64) for rows in partition)])
        labels = np.asarray(data)
        if labels.ndim == 1:
            # Labels that nobody holds keep their column: they come last here, and their owners are left out.
            left_out = np.setdiff1d(np.arange(len(labels)), chosen)
            labels = labels[np.concatenate([chosen, left_out])]
        values, owner = labels, np.repeat(np.arange(len(partition)), [len(rows) for rows in partition])
        clients = len(partition)
    if values.ndim != 1 or values.dtype.kind == "f":
        raise ValueError(
            f"Labels must be one whole number or name per example, and these are {values.dtype} {list(values.shape)}: name "
            "another feature, or bin them first."
        )
    return values, owner, clients
