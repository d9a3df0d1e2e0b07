"""Nodes with data of their own: what they say of it, and the population that the server makes of this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import datasets
from fedsim.configuration import RunConfig
from fedsim.data import FederatedData
from fedsim.deployment._nodes import NodeError


def load_own_data(config: RunConfig, place: str, number: int) -> FederatedData:
    """Returns the clients of a node: a packed file, or the training data of the run's dataset in a folder.

    Args:
      config: of the run.
      place: the path; ``{node}`` in it is replaced by the node's number.
      number: of the node.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: it is neither a packed file nor has the files of the dataset.

    >>> load_own_data(RunConfig(), "data/of-{node}.h5", 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    FileNotFoundError: Node 1 has no data, because there is no data/of-1.h5: put a packed file there, as FederatedData...
    """
    path = Path(place.replace("{node}", str(number))).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"Node {number} has no data, because there is no {path}: put a packed file there, as FederatedData.save and "
            "`fedsim datasets convert` write it, or a folder with the dataset's files; or give another --node-data."
        )
    if path.is_file():
        return FederatedData.open(path)
    return datasets.load(config.drawn_dataset, data=path).train


def describe_data(data: FederatedData) -> dict[str, Any]:
    """Returns what a node tells the server of its data: ids and sizes of its clients, and shape and dtype of each feature.

    >>> describe_data(FederatedData.from_arrays({"x": np.zeros([3, 2], np.float32)}, sizes=[2, 1]))
    {'ids': ['0', '1'], 'sizes': [2, 1], 'features': {'x': [[2], 'float32']}}
    """
    features = {name: [list(column.shape[1:]), str(column.dtype)] for name, column in sorted(data.columns.items())}
    return {"ids": list(data.client_ids), "sizes": data.sizes.tolist(), "features": features}


def described_population(told: Mapping[int, Mapping[str, Any]], like: FederatedData) -> tuple[FederatedData, list[int]]:
    """Returns a population of the clients of all nodes, in the order of the nodes, without their examples.

    Its columns have the shapes of the examples and use no memory: all of their values are zero.

    Args:
      told: what each node has said of its data, see `describe_data`.
      like: data of the server, whose features the nodes must have.

    Returns:
      The population, and for each node the position of its first client.

    Raises:
      NodeError: a node has other features than the server, or two nodes have a client of the same name.

    >>> data = FederatedData.from_arrays({"x": np.zeros([3, 2], np.float32)}, sizes=[2, 1], client_ids=["ann", "bob"])
    >>> other = FederatedData.from_arrays({"x": np.zeros([4, 2], np.float32)}, sizes=[4], client_ids=["cat"])
    >>> population, first = described_population({0: describe_data(data), 1: describe_data(other)}, data)
    >>> population.client_ids, population.sizes.tolist(), population.columns["x"].strides, first
    (['ann', 'bob', 'cat'], [2, 1, 4], (0, 0), [0, 2])
    """
    expected, owner = describe_data(like)["features"], dict[str, int]()
    for number, each in sorted(told.items()):
        ids, sizes = each["ids"], each["sizes"]
        if len(set(ids)) != len(ids) or len(ids) != len(sizes) or min(sizes, default=0) < 0:
            raise NodeError(f"Expected different client ids at node {number}, and a size of at least 0 for each: got others.")
        if each["features"] != expected:
            names = sorted({*expected, *each["features"]})
            name = next(name for name in names if each["features"].get(name) != expected.get(name))
            own, theirs = _in_words(expected.get(name)), _in_words(each["features"].get(name))
            raise NodeError(
                f"Expected the feature {name!r} {own} at node {number}, as in the server's dataset, got it {theirs}: convert "
                "the node's data to the form that the server's dataset has after loading (`fedsim datasets describe`)."
            )
        for client_id in each["ids"]:
            if (first := owner.setdefault(client_id, number)) != number:
                raise NodeError(f"Nodes {first} and {number} both have a client {client_id!r}: rename one of them.")
    counts = [len(each["ids"]) for _, each in sorted(told.items())]
    sizes = np.concatenate([np.asarray(each["sizes"], np.int64) for _, each in sorted(told.items())])
    columns = {
        name: np.broadcast_to(np.zeros((), column.dtype), (int(sizes.sum()), *column.shape[1:]))
        for name, column in like.columns.items()
    }
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return FederatedData(columns, offsets, list(owner)), [0, *np.cumsum(counts)[:-1].tolist()]


def _in_words(feature: Any) -> str:
    return "missing" if feature is None else f"of shape {feature[0]} and dtype {feature[1]}"
