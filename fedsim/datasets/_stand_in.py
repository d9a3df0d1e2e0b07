"""Synthetic stand-ins for datasets with large downloads: generated row by row, in memory or directly into a packed file.

A stand-in consists of two functions of positions: the number of examples of a client, and the content of its rows. The same
seed and client have the same examples, whatever the number of clients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import ClientStream, FederatedData
from fedsim.datasets._cache import converted
from fedsim.datasets._checks import no_folder
from fedsim.datasets._random_access import generator

Rows = Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
"""Maps clients ``int64 [n]`` and the numbers of their rows ``int64 [n]`` to columns ``[n, ...]``."""

_IN_MEMORY = 1 << 30
# Rows generated at a time: few enough for the processor's caches, and enough for NumPy to be efficient.
_CHUNK = 2048


def load(
    name: str,
    data: Path | None,
    cache: Path,
    sizes: Callable[[int, int, int | None], Mapping[str, np.ndarray]],
    rows: Callable[..., Mapping[str, np.ndarray]],
    *,
    clients: int,
    max_examples: int | None,
    seed: int,
    concentration: float,
) -> dict[str, FederatedData]:
    """Generates train and test of a stand-in, for its loader.

    Args:
      name: name of the dataset.
      data: must be None.
      cache: the dataset's folder in the cache.
      sizes: ``(clients, seed, max_examples) ->`` split to the number of examples of each client, ``int64 [clients]``.
      rows: ``(clients, numbers, split=, seed=, concentration=) ->`` columns; train is split 0, test 1.
      clients, max_examples, seed, concentration: the loader's options.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
      OSError: the cache is full or cannot be written.
    """
    no_folder(name, data)
    check(clients=clients, max_examples=max_examples)
    drawn: dict[str, Any] = dict(seed=seed, concentration=concentration)
    how = {split: functools.partial(rows, split=number, **drawn) for number, split in enumerate(("train", "test"))}
    return splits(name, cache, sizes(clients, seed, max_examples), how, clients=clients, max_examples=max_examples, **drawn)


def splits(
    name: str, cache: Path, sizes: Mapping[str, np.ndarray], rows: Mapping[str, Rows], **options: Any
) -> dict[str, FederatedData]:
    """Generates each split in memory, or once as packed files in the cache if all splits together exceed a gigabyte.

    Args:
      name: name of the dataset.
      cache: the dataset's folder in the cache.
      sizes: split to the number of examples of each client, ``int64 [clients]``.
      rows: split to the function that returns its rows.
      **options: everything that the result depends on; part of the key of the packed files.

    Raises:
      ValueError: there are more examples than a `FederatedData` can hold.
      OSError: the cache is full or cannot be written.
    """
    for split, counts in sizes.items():
        if counts.sum() >= 2**31:
            raise ValueError(
                f"The split {split!r} would have {counts.sum()} examples, more than 2**31 - 1: lower clients or max_examples."
            )
    first = np.zeros(1, np.int64)
    row_bytes = {split: sum(column.nbytes for column in how(first, first).values()) for split, how in rows.items()}
    if sum(int(sizes[split].sum()) * row_bytes[split] for split in rows) <= _IN_MEMORY:
        return {split: _in_memory(sizes[split], rows[split]) for split in rows}

    def start(split: str) -> ClientStream:
        return ClientStream(lambda: _clients(sizes[split], rows[split]), len(sizes[split]), source=name)

    return converted(name, cache, {split: functools.partial(start, split) for split in rows}, files=(), **options)


def check(*, clients: int, max_examples: int | None) -> None:
    """Raises ``ValueError`` unless both are positive; None for ``max_examples`` means no limit."""
    checks.whole(1, 10_000_000, clients=clients)
    checks.whole(1, or_none=True, max_examples=max_examples, remedy="None keeps the real sizes")


def dirichlet_mixes(seed: int, name: str, base: np.ndarray, concentration: float, mixes: int = 4096) -> np.ndarray:
    """Draws mixtures from Dirichlet(concentration * base) and returns their cumulative proportions ``float64 [mixes, kinds]``.

    The random bits of a client select one of them; see `pick`.

    Raises:
      ValueError: ``concentration`` is not positive.
    """
    if not 0 < concentration < np.inf:
        raise ValueError(f"Expected concentration > 0, got concentration={concentration}: give a positive number.")
    gammas = generator(seed, name).gamma(concentration * base, size=(mixes, len(base)))
    # Tiny parameters can underflow to a sum of 0; such a mixture gets only the largest kind of the base.
    gammas[gammas.sum(1) == 0, np.argmax(base)] = 1
    return np.cumsum(gammas, axis=1) / gammas.sum(1, keepdims=True)


def pick(mixes: np.ndarray, mix: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Draws kinds ``int64 [n]`` from the mixtures ``mix int64 [n]`` with uniform numbers ``u float64 [n]``."""
    edges = (mixes + np.arange(len(mixes))[:, None]).ravel()
    kinds = np.searchsorted(edges, mix + u, side="right") - mix * mixes.shape[1]
    return np.minimum(kinds, mixes.shape[1] - 1)


def _in_memory(sizes: np.ndarray, rows: Rows) -> FederatedData:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    blank = rows(np.zeros(0, np.int64), np.zeros(0, np.int64))
    columns = {name: np.empty((offsets[-1], *column.shape[1:]), column.dtype) for name, column in blank.items()}
    for start in range(0, int(offsets[-1]), _CHUNK):
        row = np.arange(start, min(start + _CHUNK, int(offsets[-1])))
        client = np.searchsorted(offsets, row, side="right") - 1
        for name, column in rows(client, row - offsets[client]).items():
            columns[name][start : start + len(row)] = column
    return FederatedData(columns, offsets, [_client_id(client) for client in range(len(sizes))])


def _clients(sizes: np.ndarray, rows: Rows) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    """Generates many small clients at a time, or a single large one."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    start = 0
    while start < len(sizes):
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _CHUNK, side="right")) - 1)
        block = _in_memory(sizes[start:stop], functools.partial(_shifted, rows, start))
        for client, dataset in enumerate(block.clients(), start):
            yield _client_id(client), dataset.examples
        start = stop


def _shifted(rows: Rows, start: int, client: np.ndarray, number: np.ndarray) -> Mapping[str, np.ndarray]:
    return rows(client + start, number)


def _client_id(client: int) -> str:
    return f"client_{client:07d}"
