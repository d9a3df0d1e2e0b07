"""What partitioners share: their randomness, their checks, and dealing examples out by label."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fedsim import checks, rng

_CHUNK = 1 << 12


def generator(seed: int, name: str = "partition") -> np.random.Generator:
    """The random numbers of a partitioner."""
    words = np.asarray(rng.words(rng.stream(rng.root(seed), name)))
    return np.random.Generator(np.random.Philox(words.astype(np.uint64)))


def count_examples(examples: Any) -> int:
    """Of a number of examples, or of anything that has one row per example."""
    number = len(examples) if np.ndim(examples) else operator.index(examples)
    if number < 0:
        raise ValueError(f"Expected examples >= 0, got {number}.")
    return number


def check_clients(clients: int, examples: int, min_size: int = 0) -> None:
    """Raises ``ValueError`` unless so many clients can have ``min_size`` examples each."""
    checks.whole(1, clients=clients)
    checks.whole(0, min_size=min_size)
    if examples < clients * min_size:
        raise ValueError(f"{examples} examples are too few for clients={clients} with min_size={min_size} each.")


def check_labels(labels: Any) -> np.ndarray:
    """Labels ``[n]``, one per example.

    Raises:
      ValueError: another shape; floats: they would be a class each; objects of several types, a missing name among them.
    """
    labels = np.asarray(labels)
    if labels.dtype.kind == "O" and len(kinds := {type(label).__name__ for label in labels.ravel()}) > 1:
        raise ValueError(f"Expected labels of one type, got {sorted(kinds)}: drop or fill those that are missing.")
    if labels.ndim != 1 or labels.dtype.kind in "fc":
        raise ValueError(
            f"Expected one label per example, whole numbers or names [n], got {labels.dtype} {list(labels.shape)}."
        )
    return labels


def even_sizes(examples: int, clients: int) -> np.ndarray:
    """Sizes that differ by at most 1; the first clients have the larger ones."""
    return np.full(clients, examples // clients) + (np.arange(clients) < examples % clients)


def cut(order: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of an order of the examples, each sorted."""
    return [np.sort(rows).astype(np.int64) for rows in np.split(order, np.cumsum(sizes)[:-1])]


def deal(
    owner: np.ndarray,
    clients: int,
    codes: np.ndarray,
    mixture: Callable[[np.ndarray, np.ndarray], np.ndarray],
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Gives one example after another, without replacement, by the label that its client's mixture draws.

    The answer is that of a loop over ``owner``: draw a label among those not used up, then any example of it that is left.
    Here a chunk is drawn at once, and drawn again from where a label was used up. A client all of whose labels are used up
    draws from all that are left alike.

    Args:
      owner: ``int [m]``, who gets the next example; m is at most the number of examples.
      clients: how many.
      codes: ``int [n]``, the label of each example, from 0.
      mixture: (clients ``int [k]``, which labels are left ``bool [labels]``) -> weights ``[k, labels]``, 0 where none is left.
      draw: the randomness.
    """
    left = np.bincount(codes)
    labels = np.empty(len(owner), np.int64)
    at = 0
    while at < len(owner):
        who = owner[at : at + _CHUNK]
        people, row = np.unique(who, return_inverse=True)
        cumulative = np.cumsum(mixture(people, left > 0), axis=1)
        lost = cumulative[:, -1] <= 0
        cumulative[lost] = np.cumsum(left > 0)
        targets = draw.random(len(who)) * cumulative[row, -1]
        drawn = (cumulative[row] <= targets[:, None]).sum(1)
        drawn = np.minimum(drawn, np.flatnonzero(left)[-1])
        # Up to the first draw that uses a label up: from there on the mixtures are others.
        order = np.argsort(drawn, kind="stable")
        first = np.searchsorted(drawn[order], np.arange(len(left)))
        rank = np.empty(len(who), np.int64)
        rank[order] = np.arange(len(who)) - first[drawn[order]]
        last = np.flatnonzero(rank >= left[drawn] - 1)
        good = int(last[0]) + 1 if len(last) else len(who)
        labels[at : at + good] = drawn[:good]
        left -= np.bincount(drawn[:good], minlength=len(left))
        at += good
    examples = np.empty(len(owner), np.int64)
    for label in range(len(left)):
        slots = np.flatnonzero(labels == label)
        examples[slots] = draw.permutation(np.flatnonzero(codes == label))[: len(slots)]
    order = np.argsort(owner, kind="stable")
    return cut(examples[order], np.bincount(owner, minlength=clients))
