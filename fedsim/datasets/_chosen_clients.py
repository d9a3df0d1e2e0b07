"""Fewer clients of a dataset that has clients of its own, drawn by a seed."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks, rng
from fedsim.data import ClientStream, FederatedData
from fedsim.datasets._cache import converted

OPTIONS = {
    "clients": "number of clients to keep, drawn at random; None keeps all",
    "seed": "seed of this draw",
}
_IN_MEMORY = 1 << 30


def choose_clients(
    name: str,
    splits: Mapping[str, FederatedData],
    clients: int | None,
    seed: int,
    cache: Path,
    *,
    same_clients: Collection[str] = ("test",),
) -> dict[str, FederatedData]:
    """Keeps some clients of a natural dataset, in their original order.

    The clients are drawn from ``train``. A split with the same clients keeps the drawn ones that it has. A split with other
    clients keeps the same proportion of its own, at least one. If ``test`` has other clients with the same names, their ids get
    the prefix ``test_``, because a client of ``test`` is taken for that of ``train`` with its id.

    Only the rows of the clients that are kept are read. They are copied into memory or, if they are larger than a gigabyte and
    the splits are mapped from files, into a packed file in the cache, client by client.

    Args:
      name: name of the dataset.
      splits: name of each split to its population, often memory-mapped.
      clients: number of clients of ``train`` to keep; None keeps all.
      seed: the same seed keeps the same clients. The clients of ``clients=k`` are among those of ``clients=k + 1``.
      cache: the dataset's folder in the cache.
      same_clients: the splits in which a client of ``train`` has the same name. If none of a split's clients is in ``train``,
        the split counts as one with other clients.

    Raises:
      ValueError: ``clients`` is not from 1 to the number of clients in ``train``, or none of the drawn clients is in a split.
    """
    train = splits["train"]
    if "test" not in same_clients and any(client_id in train for client_id in splits["test"].client_ids):
        test = splits["test"]
        renamed = FederatedData(test.columns, test.offsets, [f"test_{client_id}" for client_id in test.client_ids])
        splits = {**splits, "test": renamed}
    if clients is None:
        return dict(splits)
    checks.whole(
        1, train.num_clients, clients=clients, remedy=f"{name!r} has {train.num_clients:,} clients; None keeps all of them"
    )
    positions = {"train": _draw(train.num_clients, clients, seed, "train")}
    ids = [train.client_ids[int(i)] for i in positions["train"]]
    for split, data in splits.items():
        if split == "train":
            continue
        if split in same_clients and any(client_id in train for client_id in data.client_ids):
            kept = np.sort([data.index(client_id) for client_id in ids if client_id in data])
            if not len(kept):
                raise ValueError(
                    f"None of the clients drawn with clients={clients} and seed={seed} is in the split {split!r} of {name!r}: "
                    "give more clients or another seed."
                )
        else:
            kept = _draw(data.num_clients, max(1, round(data.num_clients * clients / train.num_clients)), seed, split)
        positions[split] = kept.astype(np.int64)
    row_bytes = {split: data.nbytes / max(1, data.num_examples) for split, data in splits.items()}
    files = [Path(path) for data in splits.values() if (path := _file(data)) is not None]
    # Without files, nothing would tell in the cache what else the splits depend on.
    is_small = sum(splits[split].sizes[kept].sum() * row_bytes[split] for split, kept in positions.items()) <= _IN_MEMORY
    if is_small or not files:
        return {
            split: splits[split].select([splits[split].client_ids[int(i)] for i in kept]) for split, kept in positions.items()
        }
    streams = {split: functools.partial(_stream, splits[split], kept) for split, kept in positions.items()}
    return converted(name, cache, streams, files=files, clients=clients, seed=seed)


def _draw(population: int, number: int, seed: int, split: str) -> np.ndarray:
    words = np.asarray(rng.words(rng.stream(rng.root(seed), f"clients of {split}")))
    return np.sort(rng.permute(words, 0, population, np.arange(number, dtype=np.int32), np))


def _stream(data: FederatedData, positions: np.ndarray) -> ClientStream:
    def read() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for i in positions:
            client = data.client(int(i))
            yield client.client_id, client.examples

    return ClientStream(read, len(positions))


def _file(data: FederatedData) -> str | None:
    """The file that the columns are mapped from, if any."""
    return next(
        (column.filename for column in data.columns.values() if isinstance(column, np.memmap) and column.filename), None
    )
