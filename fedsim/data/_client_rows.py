"""`ClientRows`: the memory of clients between rounds, one row per client; only rows that were written occupy space."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from fedsim.data._row_store import MemoryRows, RowFile, RowStore

Rows = Any

_MEMORY_SHARE = 0.25
_BLOCK_BYTES = 64 * 2**20


class ClientRows:
    """The memory of each client of a population between rounds, as an immutable value in a state.

    A client whose row was never written takes 8 bytes. `written` returns a new value; the old value keeps its rows as long as
    there is a reference to it. Rows are stored in memory if the rows of all clients would take less than a quarter of the free
    memory, and otherwise in a temporary file. A run stores them in its folder.

    Attributes:
      store: the rows, which several values share.
      index: ``int64 [num_clients]``, the number of each client's row in the store, or -1.

    >>> empty = ClientRows.empty({"w": jax.ShapeDtypeStruct((2,), np.float32)}, num_clients=1000)
    >>> one = empty.written(np.array([7]), {"w": np.array([[1.0, 2.0]], np.float32)})
    >>> rows, seen = one.gather(np.array([7, 8]))
    >>> rows["w"].tolist(), seen.tolist(), len(empty), len(one)
    ([[1.0, 2.0], [0.0, 0.0]], [True, False], 0, 1)
    """

    def __init__(self, store: RowStore, index: Any) -> None:
        # The store keeps only rows that a host index refers to, so an index on a device is copied back.
        if isinstance(index, jax.Array) and not isinstance(index, jax.core.Tracer):
            index = np.asarray(index, np.int64)
        self.store, self.index = store, index
        if isinstance(index, np.ndarray):
            store.references.add(self)

    @classmethod
    def empty(cls, like: Rows, num_clients: int) -> ClientRows:
        """Returns a value without rows. ``like`` is the row of one client: a pytree of arrays or ``jax.ShapeDtypeStruct``."""
        import psutil

        store: RowStore = RowFile(like)
        if store.row_bytes * num_clients <= _MEMORY_SHARE * psutil.virtual_memory().available:
            with contextlib.suppress(OSError):  # Some systems reserve no more addresses than they have memory.
                store = MemoryRows(like, num_clients)
        return cls(store, np.full(num_clients, -1, np.int64))

    def __len__(self) -> int:
        """Returns the number of clients that have a row."""
        return int(np.count_nonzero(self.index >= 0))

    def gather(self, clients: np.ndarray, slots: int | None = None) -> tuple[Rows, np.ndarray]:
        """Returns the rows of some clients, and which of these clients have a row.

        Args:
          clients: ``int [n]``, positions of the clients.
          slots: number of rows to return, at least n; default n. Further rows, and those of clients without a row, are zero.

        Returns:
          The rows, with leaves ``[slots, ...]``, and ``bool [slots]``, True for clients that have a row.
        """
        slots = len(clients) if slots is None else slots
        seen = np.zeros(slots, bool)
        rows = [np.zeros((slots, *leaf.shape), leaf.dtype) for leaf in self.store.leaves]
        seen[: len(clients)] = self.read(clients, rows, np.arange(len(clients)))
        return jax.tree.unflatten(self.store.structure, rows), seen

    def read(self, clients: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> np.ndarray:
        """Copies the rows of some clients into arrays. Clients without a row leave the arrays unchanged.

        Args:
          clients: ``int [n]``, positions of the clients.
          out: leaves ``[slots, ...]``, in the order of `jax.tree.leaves`.
          at: ``int [n]``, increasing, the slot of each client.

        Returns:
          ``bool [n]``, True for clients that have a row.
        """
        numbers = self.index[clients]
        seen = numbers >= 0
        self.store.read(numbers[seen], out, at[seen])
        return seen

    def written(self, clients: np.ndarray, rows: Rows, where: np.ndarray | None = None) -> ClientRows:
        """Returns a value with new rows for some clients.

        Args:
          clients: ``int [n]``, positions of the clients, without duplicates.
          rows: leaves ``[>= n, ...]``, the new rows.
          where: ``bool [n]``, True for clients that get their new row; default all.
        """
        return self.all_written([(clients, rows, where)])

    def all_written(self, updates: Iterable[tuple[np.ndarray, Rows, np.ndarray | None]]) -> ClientRows:
        """Returns a value with several updates applied. Each holds the arguments of `written`; no client is in two of them."""
        chosen = [
            (clients, rows, np.arange(len(clients)) if where is None else np.flatnonzero(where))
            for clients, rows, where in updates
        ]
        # One allocation for all updates: another one would find rows free to which no index refers yet.
        with self.store.lock:
            taken = self.store.allocate(sum(len(at) for _, _, at in chosen))
            index = self.index.copy()
            for clients, rows, at in chosen:
                numbers, taken = np.split(taken, [len(at)])
                self.store.write(numbers, [np.asarray(leaf) for leaf in jax.tree.leaves(rows)], at)
                index[clients[at]] = numbers
            return ClientRows(self.store, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientRows:
        return ClientRows(self.store, self.index.copy())  # Rows are immutable.

    def copied(self, store: RowStore | None = None) -> ClientRows:
        """Returns a copy of the rows in another store of the same layout, by default a new one."""
        copy = ClientRows.empty(self.store.like, len(self.index))
        if store is not None:
            copy = ClientRows(store, copy.index)
        positions = np.flatnonzero(self.index >= 0)
        # In the order of the store, so that a file is read sequentially.
        positions = positions[np.argsort(self.index[positions])]
        block = max(1, _BLOCK_BYTES // max(1, self.store.row_bytes))
        for start in range(0, len(positions), block):
            clients = positions[start : start + block]
            copy = copy.written(clients, self.gather(clients)[0])
        return copy


def is_rows(value: Any) -> bool:
    """Returns whether a value is `ClientRows`; for use as ``is_leaf`` of functions of `jax.tree`.

    >>> is_rows({"w": 1.0})
    False
    """
    return isinstance(value, ClientRows)


jax.tree_util.register_pytree_node(
    ClientRows, lambda rows: ((rows.index,), rows.store), lambda store, children: ClientRows(store, children[0])
)
