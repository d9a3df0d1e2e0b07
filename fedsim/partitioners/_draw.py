"""Shared by the partitioners: random generators, argument checks, and drawing examples by label."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fedsim import checks, rng

_CHUNK = 1 << 12


def generator(seed: int, name: str = "partition") -> np.random.Generator:
    """Returns the random generator of the partitioner ``name``."""
    words = np.asarray(rng.words(rng.stream(rng.root(seed), name)))
    return np.random.Generator(np.random.Philox(words.astype(np.uint64)))


def count_examples(examples: Any) -> int:
    """Returns the number of examples, given as a number or as an array with one row per example."""
    number = len(examples) if np.ndim(examples) else operator.index(examples)
    if number < 0:
        raise ValueError(f"Expected examples >= 0, got {number}.")
    return number


def check_clients(clients: int, examples: int, min_size: int = 0) -> None:
    """Raises ``ValueError`` unless there are at least ``min_size`` examples for each client."""
    checks.whole(1, clients=clients)
    checks.whole(0, min_size=min_size)
    if examples < clients * min_size:
        raise ValueError(f"{examples} examples are too few for clients={clients} with min_size={min_size} each.")


def check_labels(labels: Any, *, may_be_hidden: bool = False) -> np.ndarray:
    """Returns the labels as an array ``[n]``, one per example.

    Raises:
      ValueError: the shape is not ``[n]``, the labels are floats (each value would be a class), or they are objects of several
        types, for example names with a missing one; or a label is -1, which is a hidden one, unless it ``may_be_hidden``.
    """
    checks.unmasked(labels=labels)
    labels = np.asarray(labels)
    if labels.dtype.kind == "O" and len(kinds := {type(label).__name__ for label in labels.ravel()}) > 1:
        raise ValueError(f"Expected labels of one type, got {sorted(kinds)}: drop or fill the missing ones.")
    if labels.ndim != 1 or labels.dtype.kind in "fc":
        raise ValueError(
            f"Expected one label per example, whole numbers or names [n], got {labels.dtype} {list(labels.shape)}."
        )
    if not may_be_hidden and labels.dtype.kind == "i" and np.any(labels == -1):
        raise ValueError(
            f"Expected the labels of all examples, got -1, a hidden label, for {np.sum(labels == -1)} of them: divide the "
            "examples first and hide labels after that, or number the classes from 0."
        )
    return labels


def even_sizes(examples: int, clients: int) -> np.ndarray:
    """Returns sizes that differ by at most 1; the first clients have the larger ones."""
    return np.full(clients, examples // clients) + (np.arange(clients) < examples % clients)


def cut(order: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cuts ``order`` into consecutive pieces of these sizes and sorts each."""
    return [np.sort(rows).astype(np.int64) for rows in np.split(order, np.cumsum(sizes)[:-1])]


def assign_by_label(
    turns: np.ndarray,
    clients: int,
    codes: np.ndarray,
    mixture: Callable[[np.ndarray, np.ndarray], np.ndarray],
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Assigns examples one at a time, without replacement: the label is drawn from the client's mixture, then an example of it.

    The result is that of a loop over ``turns`` that draws a label among those with examples left, and then any example of it
    that is left. For speed, a chunk of labels is drawn at once, and drawn again from the point where a label ran out. A client
    whose labels have all run out draws uniformly from the labels that are left.

    Args:
      turns: ``int [m]``, the client that receives each example, in order; m is at most the number of examples.
      clients: number of clients.
      codes: ``int [n]``, the label of each example, counted from 0.
      mixture: maps clients ``int [k]`` and the labels with examples left ``bool [labels]`` to weights ``[k, labels]``, which
        are 0 for a label without examples left.
      draw: the random generator.
    """
    left = np.bincount(codes)
    labels = np.empty(len(turns), np.int64)
    start = 0
    while start < len(turns):
        chunk = turns[start : start + _CHUNK]
        receivers, row = np.unique(chunk, return_inverse=True)
        cumulative = np.cumsum(mixture(receivers, left > 0), axis=1)
        exhausted = cumulative[:, -1] <= 0
        cumulative[exhausted] = np.cumsum(left > 0)
        targets = draw.random(len(chunk)) * cumulative[row, -1]
        drawn = (cumulative[row] <= targets[:, None]).sum(1)
        drawn = np.minimum(drawn, np.flatnonzero(left)[-1])
        # Only draws up to the one that exhausts a label are valid, because the mixtures change there.
        order = np.argsort(drawn, kind="stable")
        first = np.searchsorted(drawn[order], np.arange(len(left)))
        rank = np.empty(len(chunk), np.int64)
        rank[order] = np.arange(len(chunk)) - first[drawn[order]]
        exhausting = np.flatnonzero(rank >= left[drawn] - 1)
        valid = int(exhausting[0]) + 1 if len(exhausting) else len(chunk)
        labels[start : start + valid] = drawn[:valid]
        left -= np.bincount(drawn[:valid], minlength=len(left))
        start += valid
    examples = np.empty(len(turns), np.int64)
    for label in range(len(left)):
        slots = np.flatnonzero(labels == label)
        examples[slots] = draw.permutation(np.flatnonzero(codes == label))[: len(slots)]
    order = np.argsort(turns, kind="stable")
    return cut(examples[order], np.bincount(turns, minlength=clients))
