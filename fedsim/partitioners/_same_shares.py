"""One partition for several splits: test examples divided by the shares that clients have of the training examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.partitioners._draw import check_labels, generator


def same_shares(labels: Any, partition: Sequence[np.ndarray], other_labels: Any, *, seed: int) -> list[np.ndarray]:
    """Divides another split so that each client has the same share of each label as in a given partition.

    Use it to divide test (or validation) examples among the clients of a partition of the training examples. Applying a
    partitioner to each split separately would draw other shares for each, so clients would be tested on other labels than
    they train on. `fedsim.datasets.partition_splits` calls this function for all splits of a dataset.

    A client with a share of q of the examples of a label gets q times the number of the other split's examples with that label,
    rounded down or up such that the sizes of the clients follow their shares, too. Examples with a label that no client holds
    are divided in proportion to the sizes of the clients. Which examples a client gets is random. A client with few examples
    may get none; it is then an empty client of the other split, which evaluation leaves out.

    Args:
      labels: ``[n]``, the labels that ``partition`` divides, whole numbers or names.
      partition: index arrays into ``labels``, one per client, as any partitioner of examples returns them.
      other_labels: ``[m]``, the labels of the examples to divide.
      seed: the same seed gives the same division.

    Returns:
      One sorted ``int64`` index array into ``other_labels`` per client.

    Guarantees:
      - Every example of ``other_labels`` is assigned to exactly one client.
      - The number of examples of a label that a client gets is its share, rounded down or up. So a client gets no examples of
        a label that it does not hold in ``partition`` and another client does.

    Raises:
      ValueError: ``partition`` is empty, holds no examples, or has indices outside of ``labels``; or the labels are not one
        whole number or name per example.

    >>> train, test = np.arange(100) % 10, np.arange(40) % 10
    >>> partition = [np.flatnonzero(train < 5), np.flatnonzero(train >= 5)]
    >>> [sorted(set(test[rows].tolist())) for rows in same_shares(train, partition, test, seed=0)]
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    """
    labels, other_labels = check_labels(labels), check_labels(other_labels)
    partition = [np.asarray(rows, np.int64) for rows in partition]
    sizes = np.array([len(rows) for rows in partition])
    if not sizes.sum():
        raise ValueError("Expected a partition in which at least one client has examples, got one that holds none.")
    everything = np.concatenate(partition)
    if not 0 <= everything.min() <= everything.max() < len(labels):
        raise ValueError(
            f"The partition has indices from {everything.min()} to {everything.max()}, and there are {len(labels)} labels: "
            "give the labels that the partition divides."
        )
    owner = np.repeat(np.arange(len(partition)), sizes)
    draw = generator(seed, "same_shares")
    parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in partition]
    excess = np.zeros(len(partition))  # examples that a client has got so far beyond its exact shares
    for label in np.unique(other_labels):
        rows = draw.permutation(np.flatnonzero(other_labels == label))
        counts = np.bincount(owner[labels[everything] == label], minlength=len(partition))
        weights = counts if counts.any() else sizes
        numbers, remainders = np.divmod(len(rows) * weights, weights.sum())
        missing = len(rows) - int(numbers.sum())
        # The clients furthest below their shares come first, with random ties; exact shares are not rounded up.
        fractions = remainders / weights.sum()
        priority = np.where(remainders > 0, fractions - excess, -np.inf)
        rounded_up = np.lexsort((draw.random(len(partition)), -priority))[:missing]
        numbers[rounded_up] += 1
        excess -= fractions
        excess[rounded_up] += 1
        for part, chunk in zip(parts, np.split(rows, np.cumsum(numbers)[:-1]), strict=True):
            part.append(chunk)
    return [np.sort(np.concatenate(part)) for part in parts]
