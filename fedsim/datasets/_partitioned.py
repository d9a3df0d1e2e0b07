"""Datasets without clients of their own, divided among clients by a partitioner that is chosen by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedsim import checks, partitioners
from fedsim.data import FederatedData
from fedsim.names import check_options, look_up

PARTITIONERS: dict[str, Callable[..., list[np.ndarray]]] = {
    "classes_per_client": partitioners.classes_per_client,
    "dirichlet": partitioners.dirichlet,
    "dirichlet_balanced": partitioners.dirichlet_balanced,
    "iid": partitioners.iid,
    "quantity_skew": partitioners.quantity_skew,
    "shards": partitioners.shards,
}
OPTIONS = {
    "partition": f"how examples are divided among clients, one partition for all splits: {', '.join(PARTITIONERS)}; see "
    "fedsim.partitioners",
    "clients": "number of clients",
    "seed": "seed of the partition",
    "test_fraction": "None keeps the published test examples; a number pools all examples and takes this fraction of each "
    "client's own examples for test, e.g. 0.3",
    "...": "options of the partition, e.g. alpha=0.1; defaults where one is needed: alpha=0.5, classes=2",
}
_DEFAULTS = {"alpha": 0.5, "classes": 2}


def partition_splits(
    splits: Mapping[str, Mapping[str, Any]],
    partition: str,
    *,
    clients: int,
    seed: int,
    labels: str = "y",
    **options: Any,
) -> dict[str, FederatedData]:
    """Divides the splits of a dataset among clients by one partition, so that clients are tested on the labels they train on.

    The first split is divided by the partitioner. Every further split is divided such that each client has the same share of
    each label as of the first: see `fedsim.partitioners.same_shares`. Every example of every split is assigned to exactly one
    client, so evaluation over all clients still sees every test example once.

    A client with few training examples may get no test examples. It stays in the test split as an empty client, which
    evaluation leaves out.

    Args:
      splits: name of each split to its columns, arrays ``[n, ...]``; the first is usually ``"train"``.
      partition: name of the partitioner: ``"classes_per_client"``, ``"dirichlet"``, ``"dirichlet_balanced"``, ``"iid"``,
        ``"quantity_skew"`` or ``"shards"``.
      clients: number of clients.
      seed: the same seed gives the same division.
      labels: name of the column that holds the labels ``[n]``.
      **options: the partitioner's own, for example ``alpha=0.1``.

    Returns:
      Name of each split to its population. All have the same clients in the same order.

    Raises:
      ValueError: there is no such partitioner, it has no such option, or it refuses the value of one; or a split has no such
        column.

    >>> columns = {"x": np.arange(8), "y": np.array([0, 0, 1, 1, 2, 2, 3, 3])}
    >>> splits = partition_splits({"train": columns, "test": columns}, "shards", clients=2, seed=0)
    >>> [sorted(set(splits["train"][i]["y"])) == sorted(set(splits["test"][i]["y"])) for i in "01"]
    [True, True]
    """
    reference, *_ = splits
    for split, columns in splits.items():
        if labels not in columns:
            raise ValueError(f"The split {split!r} has no column {labels!r}, only {sorted(columns)}: give labels=NAME.")
    of_reference = np.asarray(splits[reference][labels])
    parts = {reference: divide(of_reference, partition, clients=clients, seed=seed, **options)}
    for split, columns in splits.items():
        if split != reference:
            both = _classes(of_reference), _classes(np.asarray(columns[labels]))
            parts[split] = partitioners.same_shares(both[0], parts[reference], both[1], seed=seed)
    return {split: FederatedData.from_partition(columns, parts[split]) for split, columns in splits.items()}


def partition_and_split(
    columns: Mapping[str, Any],
    partition: str,
    *,
    clients: int,
    seed: int,
    fractions: Mapping[str, float],
    labels: str = "y",
    stratify: bool = True,
    **options: Any,
) -> dict[str, FederatedData]:
    """Divides arrays among clients and then each client's own examples into splits, such as train, validation and test.

    For other partitions than those by name, call `FederatedData.from_partition` and `fedsim.partitioners.split_within_clients`.

    Args:
      columns: feature name to array ``[n, ...]``.
      partition: name of the partitioner, see `partition_splits`.
      clients: number of clients.
      seed: the same seed gives the same division.
      fractions: name of each split to its fraction of each client's examples, with the sum 1.
      labels: name of the column that holds the labels ``[n]``.
      stratify: whether each split of a client has the label shares of the client, as closely as whole numbers allow; otherwise
        each client's examples are cut at random, as in most published code.
      **options: the partitioner's own, for example ``alpha=0.1``.

    Returns:
      Name of each split to its population. All have the same clients in the same order. A client with few examples may be
      empty in some splits, see `fedsim.partitioners.split_within_clients`.

    Raises:
      ValueError: there is no such partitioner, it has no such option, or it refuses the value of one; there is no such column;
        or the fractions are not positive or do not have the sum 1.

    >>> columns = {"x": np.arange(100), "y": np.arange(100) % 10}
    >>> splits = partition_and_split(
    ...     columns, "dirichlet", alpha=0.5, clients=5, seed=0, fractions={"train": 0.6, "validation": 0.1, "test": 0.3})
    >>> list(splits), sum(split.num_examples for split in splits.values())
    (['train', 'validation', 'test'], 100)
    """
    if labels not in columns:
        raise ValueError(f"There is no column {labels!r}, only {sorted(columns)}: give labels=NAME.")
    values = np.asarray(columns[labels])
    parts = divide(values, partition, clients=clients, seed=seed, **options)
    stratified = labels if stratify and _classes(values) is values else None
    return partitioners.split_within_clients(
        FederatedData.from_partition(columns, parts), fractions, seed=seed, labels=stratified
    )


def check_partition(partition: str, options: Mapping[str, Any], *, clients: int | None, test_fraction: float | None) -> None:
    """Checks the options of a partitioned dataset; loaders call it before they fetch anything.

    Raises:
      ValueError: there is no such partitioner, it has no such option, or ``clients`` or ``test_fraction`` is out of range.

    >>> check_partition("iid", {"alpha": 1}, clients=10, test_fraction=None)
    Traceback (most recent call last):
    ...
    ValueError: The partition 'iid' has no option 'alpha'. It has no options.
    """
    _find(partition, options)
    checks.whole(1, or_none=True, clients=clients)
    checks.number(above=0, below=1, or_none=True, test_fraction=test_fraction)


def partition_dataset(
    splits: Mapping[str, Mapping[str, np.ndarray]],
    partition: str,
    *,
    clients: int,
    seed: int,
    test_fraction: float | None,
    **options: Any,
) -> dict[str, FederatedData]:
    """Divides the splits of a dataset among clients for its loader: as published, or pooled and then cut within each client."""
    check_partition(partition, options, clients=clients, test_fraction=test_fraction)
    if test_fraction is None:
        return partition_splits(splits, partition, clients=clients, seed=seed, **options)
    pooled = {name: np.concatenate([columns[name] for columns in splits.values()]) for name in next(iter(splits.values()))}
    fractions = {"train": 1 - test_fraction, "test": test_fraction}
    return partition_and_split(pooled, partition, clients=clients, seed=seed, fractions=fractions, **options)


def divide(labels: np.ndarray, partition: str, *, clients: int, seed: int, **options: Any) -> list[np.ndarray]:
    """Returns the rows of each client by the partitioner of this name, with defaults for the options that it needs.

    >>> [len(rows) for rows in divide(np.arange(6), "iid", clients=2, seed=0)]
    [3, 3]
    """
    partitioner = _find(partition, options)
    parameters = inspect.signature(partitioner).parameters
    defaults = {name: value for name, value in _DEFAULTS.items() if name in parameters}
    return partitioner(labels, clients=clients, seed=seed, **defaults | options)


def _find(partition: str, options: Mapping[str, Any]) -> Callable[..., list[np.ndarray]]:
    """The partitioner of this name, after a check that it has these options."""
    partitioner = look_up("partition", partition, PARTITIONERS)
    first = next(iter(inspect.signature(partitioner).parameters))
    check_options("partition", partition, partitioner, options, (first, "clients", "seed"))
    return partitioner


def _classes(labels: np.ndarray) -> np.ndarray:
    """The labels, or one class for all examples if they are numbers or arrays, which only iid and quantity_skew accept."""
    return labels if labels.ndim == 1 and labels.dtype.kind not in "fc" else np.zeros(len(labels), np.int64)
