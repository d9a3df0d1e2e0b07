"""Each client's own examples divided into splits, such as train and test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData, TextColumn


def split_within_clients(
    data: FederatedData, fractions: Mapping[str, float], *, seed: int | jax.Array, labels: str | None = "y"
) -> dict[str, FederatedData]:
    """Divides every client's own examples into splits, for example 70 % for training and 30 % for test.

    This is how most papers on personalized federated learning make their test sets: they divide a dataset among clients first
    and then cut each client's examples. With ``labels``, every split of a client has the label shares of the client, as closely
    as whole numbers of examples allow. Published code usually cuts at random, without regard to labels: ``labels=None``.

    The size of a split is its fraction of the client's examples, rounded to a whole number by largest remainders; of equal
    remainders, the split named first is rounded up. So a client with few examples may have none in a split with a small
    fraction. It stays in all splits, as an empty client where it has no examples. Evaluation leaves out empty clients.

    Args:
      data: the population; its rows are copied.
      fractions: name of each split to its fraction of the examples; positive, with the sum 1.
      seed: the same seed, or key, gives the same splits.
      labels: name of the column that holds the labels ``[rows]``, whole numbers or names. None cuts at random.

    Returns:
      Name of each split to its population. All have the same clients in the same order.

    Guarantees:
      - Every example of a client is in exactly one of its splits.
      - The sizes of a client's splits are its exact fractions, rounded down or up.
      - A client's splits depend on the seed, its position and its own examples, and not on the data of other clients.

    Raises:
      ValueError: the fractions are not positive or do not have the sum 1, there is no such column, or it does not hold one
        label per example.

    >>> data = FederatedData.from_arrays({"y": [0, 1] * 10}, sizes=[10, 10])
    >>> splits = split_within_clients(data, {"train": 0.6, "test": 0.4}, seed=0)
    >>> splits["train"].sizes.tolist(), splits["test"].sizes.tolist(), np.bincount(splits["test"]["0"]["y"]).tolist()
    ([6, 6], [4, 4], [2, 2])
    """
    if not fractions:
        raise ValueError("Expected at least one split, got no fractions: give, for example, {'train': 0.7, 'test': 0.3}.")
    values: dict[str, Any] = {f"fractions[{name!r}]": fraction for name, fraction in fractions.items()}
    checks.positive(remedy="give the fraction of the examples in this split", **values)
    if not math.isclose(sum(fractions.values()), 1, abs_tol=1e-9):
        raise ValueError(
            f"Expected fractions with the sum 1, got {dict(fractions)} with the sum {sum(fractions.values()):g}: every example "
            "belongs to a split."
        )
    codes = _codes(data, labels)
    shares = np.array(list(fractions.values()))
    # Small splits choose their examples first, and the largest takes the rest, so that small numbers are rounded best.
    order = np.argsort(shares, kind="stable")
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "split_within_clients")))
    rows: list[list[np.ndarray]] = [[] for _ in shares]
    sizes = np.zeros((len(shares), data.num_clients), np.int64)
    for client in range(data.num_clients):
        start, stop = int(data.offsets[client]), int(data.offsets[client + 1])
        draw = rng.generator(words, client)
        sizes[:, client] = _largest_remainders(shares * (stop - start), stop - start)
        for split, chosen in zip(order, _stratified(codes[start:stop], sizes[order, client], draw), strict=True):
            rows[split].append(start + np.sort(chosen))
    splits = {}
    for name, rows_of_clients, of_split in zip(fractions, rows, sizes, strict=True):
        index = np.concatenate(rows_of_clients)
        columns = {
            feature: column[index] if isinstance(column, TextColumn) else np.asarray(column)[index]
            for feature, column in data.columns.items()
        }
        splits[name] = FederatedData.from_arrays(columns, sizes=of_split, client_ids=list(data.client_ids))
    return splits


def _codes(data: FederatedData, labels: str | None) -> np.ndarray:
    """The labels counted from 0, ``int64 [rows]``; all 0 without labels."""
    if labels is None:
        return np.zeros(data.num_examples, np.int64)
    if labels not in data.columns:
        raise ValueError(
            f"There is no feature {labels!r}; the data has {sorted(data.columns)}: give labels=NAME, or labels=None."
        )
    column = data.columns[labels]
    if isinstance(column, TextColumn):
        column = column[:]
    if column.ndim != 1 or column.dtype.kind in "fc":
        raise ValueError(
            f"Feature {labels!r} is {column.dtype} {list(column.shape[1:])} per example, not one label: give labels=None to "
            "cut each client's examples at random."
        )
    return np.unique(np.asarray(column), return_inverse=True)[1]


def _largest_remainders(exact: np.ndarray, total: int) -> np.ndarray:
    """Rounds numbers whose sum is ``total``; the first of equal remainders is rounded up."""
    exact = np.round(exact, 9)  # 0.7 * 10 is not exactly 7
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes


def _stratified(codes: np.ndarray, sizes: np.ndarray, draw: np.random.Generator) -> list[np.ndarray]:
    """Divides one client's examples into pieces of these sizes, each with its label shares; the last takes the rest."""
    kinds, codes = np.unique(codes, return_inverse=True)
    shuffled = draw.permutation(len(codes))
    by_label = [shuffled[codes[shuffled] == kind] for kind in range(len(kinds))]
    counts = np.array([len(rows) for rows in by_label], np.int64)
    used = np.zeros(len(kinds), np.int64)
    pieces = []
    for size in sizes[:-1]:
        left = counts - used
        numbers = np.minimum(counts * size // max(1, len(codes)), left)
        while missing := int(size - numbers.sum()):
            shortfall = np.where(numbers < left, counts * size / len(codes) - numbers, -np.inf)
            rounded_up = np.lexsort((draw.random(len(kinds)), -shortfall))[: min(missing, int((numbers < left).sum()))]
            numbers[rounded_up] += 1
        pieces.append(
            np.concatenate([shuffled[:0], *(rows[a : a + n] for rows, a, n in zip(by_label, used, numbers, strict=True))])
        )
        used += numbers
    return [*pieces, np.concatenate([shuffled[:0], *(rows[a:] for rows, a in zip(by_label, used, strict=True))])]
