"""Stand-ins for datasets that are large to fetch: generated row by row, in memory or straight into a packed file.

A stand-in is two functions of positions alone: how many examples a client has, and what its rows are. Same seed and client,
same examples, whatever the number of clients.
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
"""Clients ``int64 [n]`` and their rows' numbers ``int64 [n]`` to columns ``[n, ...]``."""

_IN_MEMORY = 1 << 30
# Rows at a time: few enough for the caches, enough for NumPy.
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
    """The two splits of a stand-in, for its loader.

    Args:
      name: the dataset's.
      data: must be None.
      cache: its folder in the cache.
      sizes: ``(clients, seed, max_examples) ->`` split to the number of examples of each client, ``int64 [clients]``.
      rows: ``(clients, numbers, split=, seed=, concentration=) ->`` columns; train is split 0, test 1.
      clients, max_examples, seed, concentration: the loader's options.

    Raises:
      ValueError: an argument out of its range, or a folder ``data`` is given.
      OSError: the cache is full, or cannot be written.
    """
    no_folder(name, data)
    check(clients=clients, max_examples=max_examples)
    drawn: dict[str, Any] = dict(seed=seed, concentration=concentration)
    how = {split: functools.partial(rows, split=number, **drawn) for number, split in enumerate(("train", "test"))}
    return splits(name, cache, sizes(clients, seed, max_examples), how, clients=clients, max_examples=max_examples, **drawn)


def splits(
    name: str, cache: Path, sizes: Mapping[str, np.ndarray], rows: Mapping[str, Rows], **options: Any
) -> dict[str, FederatedData]:
    """Each split, in memory; above a gigabyte together, as packed files in the cache, generated once.

    Args:
      name: the dataset's.
      cache: its folder in the cache.
      sizes: split to the number of examples of each client, ``int64 [clients]``.
      rows: split to what its rows are.
      **options: what the rows depend on, besides the seed's sizes: part of the files' key.

    Raises:
      ValueError: more examples than a `FederatedData` holds.
      OSError: the cache is full, or cannot be written.
    """
    for split, counts in sizes.items():
        if counts.sum() >= 2**31:
            raise ValueError(
                f"{counts.sum()} examples of {split} are too many, 2**31 - 1 fit: give fewer clients or max_examples."
            )
    first = np.zeros(1, np.int64)
    row_bytes = {split: sum(column.nbytes for column in how(first, first).values()) for split, how in rows.items()}
    if sum(int(sizes[split].sum()) * row_bytes[split] for split in rows) <= _IN_MEMORY:
        return {split: _in_memory(sizes[split], rows[split]) for split in rows}

    def start(split: str) -> ClientStream:
        return ClientStream(lambda: _clients(sizes[split], rows[split]), len(sizes[split]), source=name)

    return converted(name, cache, {split: functools.partial(start, split) for split in rows}, files=(), **options)


def check(*, clients: int, max_examples: int | None) -> None:
    """Raises ``ValueError`` unless both are positive (``max_examples`` may be None: no limit)."""
    checks.whole(1, 10_000_000, clients=clients)
    checks.whole(1, or_none=True, max_examples=max_examples, remedy="None takes the true sizes")


def dirichlet_mixes(seed: int, name: str, base: np.ndarray, concentration: float, mixes: int = 4096) -> np.ndarray:
    """Cumulative proportions ``float64 [mixes, kinds]`` of draws from Dirichlet(concentration * base).

    A client has one of them, picked by its own random bits; see `pick`.

    Raises:
      ValueError: ``concentration`` is not positive.
    """
    if not 0 < concentration < np.inf:
        raise ValueError(f"Expected concentration > 0, got concentration={concentration}: small is skewed, large is alike.")
    gammas = generator(seed, name).gamma(concentration * base, size=(mixes, len(base)))
    # Tiny shapes can underflow to nothing at all: such a mix is its base's largest kind alone.
    gammas[gammas.sum(1) == 0, np.argmax(base)] = 1
    return np.cumsum(gammas, axis=1) / gammas.sum(1, keepdims=True)


def pick(mixes: np.ndarray, mix: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The kind ``int64 [n]`` at ``u float64 [n]`` of mix number ``mix int64 [n]``: as often as the mix says."""
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
    """Generates many small clients at once, and a large one in parts."""
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
