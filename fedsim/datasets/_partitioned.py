"""Datasets without clients of their own: split over some by a partitioner of `fedsim.partitioners`, chosen by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedsim import partitioners
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
    "partition": f"how examples are split over clients: {', '.join(PARTITIONERS)}, see fedsim.partitioners",
    "clients": "how many clients",
    "seed": "seed of the partition",
    "...": "the partition's own options, e.g. alpha=0.1; where it needs one: alpha=0.5, classes=2",
}
_WHERE_NEEDED = {"alpha": 0.5, "classes": 2}


def partitioned(
    splits: Mapping[str, Mapping[str, np.ndarray]], partition: str, *, clients: int, seed: int, **options: Any
) -> dict[str, FederatedData]:
    """Every split, over as many clients, by the same partitioner, options and seed: its columns must have labels ``y [n]``.

    Raises:
      ValueError: no such partitioner, or it has no such option, or refuses its value.

    >>> columns = {"x": np.arange(8), "y": np.array([0, 0, 1, 1, 2, 2, 3, 3])}
    >>> splits = partitioned({"train": columns, "test": columns}, "iid", clients=4, seed=0)
    >>> splits["train"].sizes.tolist()
    [2, 2, 2, 2]
    """
    partitioner = find_partitioner(partition, options)
    parameters = inspect.signature(partitioner).parameters
    needed = {name: value for name, value in _WHERE_NEEDED.items() if name in parameters}
    return {
        split: FederatedData.from_partition(columns, partitioner(columns["y"], clients=clients, seed=seed, **needed | options))
        for split, columns in splits.items()
    }


def find_partitioner(partition: str, options: Mapping[str, Any]) -> Callable[..., list[np.ndarray]]:
    """The partitioner of this name, which takes these options of its own; loaders ask before they fetch anything.

    Raises:
      ValueError: no such partitioner, or it has no such option.

    >>> find_partitioner("iid", {"alpha": 1})
    Traceback (most recent call last):
    ...
    ValueError: The partition 'iid' has no option 'alpha'. It has none.
    """
    partitioner = look_up("partition", partition, PARTITIONERS)
    first = next(iter(inspect.signature(partitioner).parameters))
    check_options("partition", partition, partitioner, options, (first, "clients", "seed"))
    return partitioner
