"""`ClientRows`: what clients keep between rounds, one row each, of which only those that were written take room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import psutil

from fedsim.data._row_store import MemoryRows, RowFile, RowStore

Rows = Any

_MEMORY_SHARE = 0.25
_BLOCK_BYTES = 64 * 2**20


class ClientRows:
    """What each client of a population keeps between rounds: a value, like any part of a state.

    A client that was never written costs 8 bytes of the index. `written` gives a new value; the old one stays what it was,
    for as long as somebody holds it. Rows lie in memory if those of all clients would take less than a quarter of what is
    free, else in a temporary file; a run keeps them in its folder.

    Attributes:
      index: ``int64 [num_clients]``, each client's row in the store, -1 for none.

    >>> empty = ClientRows.empty({"w": jax.ShapeDtypeStruct((2,), np.float32)}, num_clients=1000)
    >>> one = empty.written(np.array([7]), {"w": np.array([[1.0, 2.0]], np.float32)})
    >>> rows, seen = one.gather(np.array([7, 8]))
    >>> rows["w"].tolist(), seen.tolist(), len(empty), len(one)
    ([[1.0, 2.0], [0.0, 0.0]], [True, False], 0, 1)
    """

    def __init__(self, store: RowStore, index: Any) -> None:
        # Rows are kept for those who are known to refer to them: an index that went to a device is taken back.
        if isinstance(index, jax.Array) and not isinstance(index, jax.core.Tracer):
            index = np.asarray(index, np.int64)
        self.store, self.index = store, index
        if isinstance(index, np.ndarray):
            store.users.add(self)

    @classmethod
    def empty(cls, like: Rows, num_clients: int) -> ClientRows:
        """Nothing kept yet; ``like`` is one client's row, of arrays or ``jax.ShapeDtypeStruct``."""
        store: RowStore = RowFile(like)
        if store.row_bytes * num_clients <= _MEMORY_SHARE * psutil.virtual_memory().available:
            with contextlib.suppress(OSError):  # Of a system that gives no more addresses than it has memory.
                store = MemoryRows(like, num_clients)
        return cls(store, np.full(num_clients, -1, np.int64))

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
        seen = np.zeros(slots, bool)
        rows = [np.zeros((slots, *leaf.shape), leaf.dtype) for leaf in self.store.leaves]
        seen[: len(clients)] = self.read(clients, rows, np.arange(len(clients)))
        return jax.tree.unflatten(self.store.structure, rows), seen

    def read(self, clients: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> np.ndarray:
        """Copies rows of the clients at these positions, of those who have one, and says who does, ``bool [n]``.

        Args:
          clients: ``int [n]``.
          out: leaves ``[slots, ...]``, in the order of `jax.tree.leaves`.
          at: ``int [n]``, rising, where they go.
        """
        numbers = self.index[clients]
        seen = numbers >= 0
        self.store.read(numbers[seen], out, at[seen])
        return seen

    def written(self, clients: np.ndarray, rows: Rows, where: np.ndarray | None = None) -> ClientRows:
        """The same with new rows for some clients.

        Args:
          clients: ``int [n]``, their positions, no one twice.
          rows: leaves ``[>= n, ...]``.
          where: ``bool [n]``, for whom of them; by default for all.
        """
        return self.all_written([(clients, rows, where)])

    def all_written(self, parts: Iterable[tuple[np.ndarray, Rows, np.ndarray | None]]) -> ClientRows:
        """The same with new rows that come in several parts, each what `written` takes; no client has a new row in two."""
        chosen = [
            (clients, rows, np.arange(len(clients)) if where is None else np.flatnonzero(where))
            for clients, rows, where in parts
        ]
        # All at once: what is taken, and nobody refers to yet, would be found free by the next who asks.
        with self.store.lock:
            taken = self.store.allocate(sum(len(at) for _, _, at in chosen))
            index = self.index.copy()
            for clients, rows, at in chosen:
                numbers, taken = np.split(taken, [len(at)])
                self.store.write(numbers, [np.asarray(leaf) for leaf in jax.tree.leaves(rows)], at)
                index[clients[at]] = numbers
            return ClientRows(self.store, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientRows:
        return ClientRows(self.store, self.index.copy())  # Rows are never changed.

    def copied(self, store: RowStore | None = None) -> ClientRows:
        """The same rows in another store of the same layout; by default in one of its own."""
        copy = ClientRows.empty(self.store.like, len(self.index))
        if store is not None:
            copy = ClientRows(store, copy.index)
        there = np.flatnonzero(self.index >= 0)
        # In the order in which they lie: a file is then read from front to back.
        there = there[np.argsort(self.index[there])]
        block = max(1, _BLOCK_BYTES // max(1, self.store.row_bytes))
        for start in range(0, len(there), block):
            clients = there[start : start + block]
            copy = copy.written(clients, self.gather(clients)[0])
        return copy


def is_rows(value: Any) -> bool:
    """Whether a part of a state is `ClientRows`: the ``is_leaf`` of those who take them whole."""
    return isinstance(value, ClientRows)


jax.tree_util.register_pytree_node(
    ClientRows, lambda rows: ((rows.index,), rows.store), lambda store, children: ClientRows(store, children[0])
)
