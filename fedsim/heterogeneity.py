"""Measures of how much clients differ in their labels and in their numbers of examples.

Label distance: Y. Zhao, M. Li, L. Lai, N. Suda, D. Civin, V. Chandra, "Federated learning with non-IID data", 2018,
section 3: https://arxiv.org/abs/1806.00582. What they call the earth mover's distance of client k is the sum over labels of
the absolute value of p_k(y) - p(y). This is the L1 distance, twice the total variation, from 0 (equal) to 2 (no common label).
Effective number of classes: M. O. Hill, "Diversity and evenness", Ecology 54(2), 1973, of order 1: exp(entropy).

All measures except `split_distance` take a `FederatedData`, or labels ``[n]`` with a partition (a list of index arrays).
Measures of labels count the labelled examples only: -1 is a hidden label (`fedsim.partitioners.hide_labels`), and no class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData

Partition = Sequence[np.ndarray]

_BLOCK = 1 << 22


def label_counts(
    data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y"
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the examples of each client with each label.

    Args:
      data: a population, or labels ``[n]`` together with ``partition``.
      partition: index arrays, one per client.
      feature: name of the population's column with the labels.

    Returns:
      Counts ``int64 [clients, labels]``, and the labels of its columns in ascending order: all that occur in ``data``.

    Raises:
      ValueError: the labels are not one value per example, or all hidden; there is no such feature; or labels are given without
        a partition.

    >>> counts, labels = label_counts([7, 7, 9], [np.array([0]), np.array([1, 2])])
    >>> counts.tolist(), labels.tolist()
    ([[1, 0], [1, 1]], [7, 9])
    """
    labels, blocks = _counted(data, partition, feature)
    return np.concatenate([*blocks]), labels


def label_distances(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> np.ndarray:
    """Computes each client's distance from the population's label distribution, ``float64 [clients]`` in [0, 2].

    The distance is the sum over labels of \\|p_k(y) - p(y)\\|, where p_k is the distribution of client k and p that of all
    clients' examples together. It is NaN for a client without labelled examples. Arguments and errors are those of
    `label_counts`.

    >>> label_distances([0, 0, 1, 1], [np.array([0, 1]), np.array([2, 3])]).tolist()
    [1.0, 1.0]
    """
    labels, blocks = _counted(data, partition, feature)
    total = sum((counts.sum(0) for counts in blocks), np.zeros(len(labels), np.int64))
    overall = total / max(1, total.sum())
    distances = [np.where(sizes > 0, np.abs(shares - overall).sum(1), np.nan) for shares, sizes in map(_shares, blocks)]
    return np.concatenate(distances)


def label_emd(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> float:
    """Computes the mean of `label_distances` over clients that have one, each weighted equally: 0 if all are equal, below 2.

    Arguments and errors are those of `label_counts`.

    >>> label_emd([0, 0, 1, 1], [np.array([0, 2]), np.array([1, 3])])
    0.0
    """
    distances = label_distances(data, partition, feature=feature)
    held = distances[~np.isnan(distances)]
    return float(held.mean()) if len(held) else 0.0


def effective_classes(data: FederatedData | Any, partition: Partition | None = None, *, feature: str = "y") -> np.ndarray:
    """Computes each client's effective number of labels, exp(entropy), ``float64 [clients]``; 0 without any.

    A client with k equally frequent labels has k effective labels. Arguments and errors are those of `label_counts`.

    >>> effective_classes([0, 1, 2, 0, 0], [np.array([0, 1, 2]), np.array([3, 4])]).round(6).tolist()
    [3.0, 1.0]
    """

    def effective(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.where(sizes > 0, np.exp(-np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=1)), 0.0)

    _, blocks = _counted(data, partition, feature)
    return np.concatenate([effective(*_shares(counts)) for counts in blocks])


def gini(sizes: FederatedData | Partition | Any) -> float:
    """Computes the Gini coefficient of the clients' sizes: 0 if all are equal, (n - 1) / n if one of n holds everything.

    It is half the mean absolute difference between the sizes of two clients, divided by the mean size.

    Args:
      sizes: a population, a partition, or the sizes ``[clients]``.

    Raises:
      ValueError: there are no clients, or a size is negative.

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


def split_distance(first: FederatedData, second: FederatedData, *, feature: str = "y") -> float:
    """Computes how much the labels of the same clients differ between two splits, such as train and test.

    This is the mean over clients of the L1 distance between their label shares in the two populations: the sum over labels of
    \\|p_k(y) - q_k(y)\\|, from 0 (equal) to 2 (no common label). A figure of personal models means little if it is large,
    because clients are then tested on other labels than they train on. Clients with few examples have a positive distance even
    under the best possible split, because numbers of examples are whole.

    Clients are matched by name and weighted equally. A client that is missing or has no labels in one of the populations is
    left out of the mean. In datasets whose splits have different clients under the same names (``cifar100``) the distance has
    no meaning.

    Args:
      first, second: the populations, for example ``data.train`` and ``data.test``.
      feature: name of the column with the labels, in both.

    Raises:
      ValueError: no client has labelled examples in both, there is no such feature, or it is not one label per example.

    >>> train = FederatedData.from_arrays({"y": [0, 0, 1, 1, 2, 2]}, sizes=[4, 2])
    >>> test = FederatedData.from_arrays({"y": [0, 2, 2]}, sizes=[1, 2])
    >>> split_distance(train, test)  # client 0: |1/2 - 1| + |1/2 - 0| = 1; client 1: 0
    0.5
    """
    labels, owners, counts = zip(*(_labels_and_owners(data, None, feature) for data in (first, second)), strict=True)
    sizes = [np.bincount(owner, minlength=clients) for owner, clients in zip(owners, counts, strict=True)]
    matches = [
        (i, second.index(client_id)) for i, client_id in enumerate(first.client_ids) if sizes[0][i] and client_id in second
    ]
    matches = [(i, j) for i, j in matches if sizes[1][j]]
    if not matches:
        raise ValueError(
            "No client has examples in both populations: give two splits of the same clients, such as data.train and data.test."
        )
    names, codes = np.unique(np.concatenate(labels), return_inverse=True)
    cells, shares = [], []
    code_of = np.split(codes, [len(labels[0])])
    for own_sizes, owner, code, positions, sign in zip(sizes, owners, code_of, np.array(matches).T, (1, -1), strict=True):
        position_of = np.full(len(own_sizes), -1)
        position_of[positions] = np.arange(len(positions))
        match = position_of[owner]
        cells.append((match * len(names) + code)[match >= 0])
        shares.append((sign / own_sizes[owner])[match >= 0])
    # Only labels that a client holds have a cell, so memory does not grow with clients times labels.
    cell, index = np.unique(np.concatenate(cells), return_inverse=True)
    differences = np.abs(np.bincount(index, np.concatenate(shares)))
    return float(np.bincount(cell // len(names), differences, len(matches)).mean())


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sizes = counts.sum(1)
    return counts / np.maximum(sizes, 1)[:, None], sizes


class _Blocks:
    """Iterates over counts ``[clients, labels]`` in blocks of clients, so that a million clients fit into memory."""

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
    """Returns labels ``[m]``, the owners of the first of them in ascending order, and the number of clients."""
    if isinstance(data, FederatedData):
        if partition is not None:
            raise ValueError("A population has its own partition: give the population alone, or labels with a partition.")
        if feature not in data.columns:
            raise ValueError(f"There is no feature {feature!r}; the data has {sorted(data.columns)}: name the labels' column.")
        values, owner = np.asarray(data.columns[feature][:]), np.repeat(np.arange(data.num_clients), data.sizes)
        clients = data.num_clients
    else:
        if partition is None:
            raise ValueError("Expected labels with a partition, one index array per client; or a FederatedData.")
        chosen = np.concatenate([np.zeros(0, np.int64), *(np.asarray(rows, np.int64) for rows in partition)])
        checks.unmasked(labels=data)
        labels = np.asarray(data)
        if labels.ndim == 1:
            # Labels that no client holds keep their column, so they are appended, without owners.
            left_out = np.setdiff1d(np.arange(len(labels)), chosen)
            labels = labels[np.concatenate([chosen, left_out])]
        values, owner = labels, np.repeat(np.arange(len(partition)), [len(rows) for rows in partition])
        clients = len(partition)
    if values.ndim != 1 or values.dtype.kind == "f":
        raise ValueError(
            f"Labels must be one whole number or name per example, and these are {values.dtype} {list(values.shape)}: give "
            "another feature, or bin them first."
        )
    labelled = is_labelled(values)
    if len(values) and not labelled.any():
        raise ValueError("All labels are -1, which is a hidden label: give the population before its labels were hidden.")
    return values[labelled], owner[labelled[: len(owner)]], clients


def is_labelled(labels: Any) -> np.ndarray:
    """Returns for each label whether it is known, ``bool [n]``: numbers are hidden if they are -1.

    >>> is_labelled([0, -1, 2]).tolist(), is_labelled(["-1", "cat"]).tolist()
    ([True, False, True], [True, True])
    """
    labels = np.asarray(labels)
    return labels != -1 if labels.dtype.kind == "i" else np.ones(len(labels), bool)
