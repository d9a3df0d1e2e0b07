"""`ClientRows`: what clients keep between rounds, one row each, of which only those that were written take room."""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax
import numpy as np

Rows = Any

_CHUNK_BYTES = 16 * 2**20
_ALIGN = 64


class RowStore:
    """Rows of one layout. A row is written once and never changed; it is free again when no `ClientRows` refers to it.

    Which rows are free is found out when too few are left, by looking at every `ClientRows` alive (mark and sweep); then the
    store grows until a fifth of it is free.
    """

    def __init__(self, like: Rows) -> None:
        leaves, self.structure = jax.tree.flatten(like)
        self.leaves = [jax.ShapeDtypeStruct(np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves]
        sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves]
        starts = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)])
        self.spans = [slice(int(start), int(start) + size) for start, size in zip(starts, sizes, strict=False)]
        self.row_bytes = int(starts[-1])
        self.rows_per_chunk = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        self.chunks: list[np.ndarray] = []
        self.users: weakref.WeakSet[ClientRows] = weakref.WeakSet()
        self.free: list[int] = []

    def allocate(self, count: int) -> np.ndarray:
        """Numbers of ``count`` rows that nobody refers to."""
        if len(self.free) < count:
            self._sweep()
            while len(self.free) < max(count, self.capacity // 5):
                new = range(self.capacity, self.capacity + self.rows_per_chunk)
                self.chunks.append(np.zeros((self.rows_per_chunk, self.row_bytes), np.uint8))
                self.free = [*reversed(new), *self.free]
        return np.array([self.free.pop() for _ in range(count)], np.int64)

    @property
    def capacity(self) -> int:
        return len(self.chunks) * self.rows_per_chunk

    def _sweep(self) -> None:
        used = np.zeros(self.capacity, bool)
        for user in self.users:
            used[user.index[user.index >= 0]] = True
        self.free = np.flatnonzero(~used)[::-1].tolist()

    def read(self, rows: np.ndarray, out: list[np.ndarray]) -> None:
        """Copies rows into ``out``: one array ``[>= len(rows), ...]`` per leaf."""
        for chunk, at, within in self._by_chunk(rows):
            for leaf, span, target in zip(self.leaves, self.spans, out, strict=True):
                target[at] = self.chunks[chunk][within, span].view(leaf.dtype).reshape(-1, *leaf.shape)

    def write(self, rows: np.ndarray, values: list[np.ndarray]) -> None:
        for chunk, at, within in self._by_chunk(rows):
            for span, value in zip(self.spans, values, strict=True):
                picked = np.ascontiguousarray(value[at])
                self.chunks[chunk][within, span] = picked.reshape(len(at), -1).view(np.uint8).reshape(len(at), -1)

    def _by_chunk(self, rows: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        chunks, within = np.divmod(rows, self.rows_per_chunk)
        return [(int(chunk), (at := np.flatnonzero(chunks == chunk)), within[at]) for chunk in np.unique(chunks)]


class ClientRows:
    """What each client of a population keeps between rounds: a value, like any part of a state.

    A client that was never written costs 8 bytes of the index. `written` gives a new value; the old one stays what it was,
    for as long as somebody holds it.

    Attributes:
      index: ``int64 [num_clients]``, each client's row in the store, -1 for none.

    >>> empty = ClientRows.empty({"w": jax.ShapeDtypeStruct((2,), np.float32)}, num_clients=1000)
    >>> one = empty.written(np.array([7]), {"w": np.array([[1.0, 2.0]], np.float32)})
    >>> rows, seen = one.gather(np.array([7, 8]))
    >>> rows["w"].tolist(), seen.tolist(), len(empty), len(one)
    ([[1.0, 2.0], [0.0, 0.0]], [True, False], 0, 1)
    """

    def __init__(self, store: RowStore, index: np.ndarray) -> None:
        self.store, self.index = store, index
        if isinstance(index, np.ndarray):
            store.users.add(self)

    @classmethod
    def empty(cls, like: Rows, num_clients: int) -> ClientRows:
        """Nothing kept yet; ``like`` is one client's row, of arrays or ``jax.ShapeDtypeStruct``."""
        return cls(RowStore(like), np.full(num_clients, -1, np.int64))

    def __len__(self) -> int:
        """How many clients have a row."""
        return int(np.count_nonzero(self.index >= 0))

    def gather(self, clients: np.ndarray, slots: int | None = None) -> tuple[Rows, np.ndarray]:
        """Rows of the clients at these positions, and whether they have one.

        Args:
          clients: ``int [n]``.
          slots: room for that many rows, at least n, by default n; what is left is zeros.

        Returns:
          Rows, leaves ``[slots, ...]``, and ``bool [slots]``.
        """
        slots = len(clients) if slots is None else slots
        numbers = self.index[clients]
        at = np.flatnonzero(numbers >= 0)
        seen = np.zeros(slots, bool)
        seen[at] = True
        found = [np.zeros((len(at), *leaf.shape), leaf.dtype) for leaf in self.store.leaves]
        self.store.read(numbers[at], found)
        rows = [np.zeros((slots, *leaf.shape), leaf.dtype) for leaf in self.store.leaves]
        for target, values in zip(rows, found, strict=True):
            target[at] = values
        return jax.tree.unflatten(self.store.structure, rows), seen

    def written(self, clients: np.ndarray, rows: Rows) -> ClientRows:
        """The same with new rows ``[n, ...]`` for the clients at these positions ``int [n]``, no one twice."""
        index = self.index.copy()
        index[clients] = numbers = self.store.allocate(len(clients))
        self.store.write(numbers, [np.asarray(leaf) for leaf in jax.tree.leaves(rows)])
        return ClientRows(self.store, index)


jax.tree_util.register_pytree_node(
    ClientRows, lambda rows: ((rows.index,), rows.store), lambda store, children: ClientRows(store, children[0])
)
