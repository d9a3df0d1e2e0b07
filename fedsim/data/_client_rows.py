"""`ClientRows`: the memory of clients between rounds, one row per client; only rows that were written occupy space."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from fedsim import distributed
from fedsim.data._row_store import MemoryRows, RowFile, RowStore

Rows = Any

_MEMORY_SHARE = 0.25
_BLOCK_BYTES = 64 * 2**20


class ClientRows:
    """The memory of each client of a population between rounds, as an immutable value in a state.

    A client whose row was never written takes 8 bytes. `written` returns a new value; the old value keeps its rows as long as
    there is a reference to it. Rows are stored in memory if the rows of all clients would take less than a quarter of the free
    memory, and otherwise in a temporary file. A run stores them in its folder. If several processes share a run, each has the
    rows of its own clients only.

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

    def gather_from_owners(self, clients: np.ndarray, slots: int | None = None) -> tuple[Rows, np.ndarray]:
        """Returns what `gather` returns, of the processes that keep these rows, see `fedsim.distributed.owners`.

        All processes of a run have to call it, for the same clients.
        """
        if jax.process_count() == 1:
            return self.gather(clients, slots)
        slots, owner = len(clients) if slots is None else slots, distributed.owners(clients)
        most = int(np.bincount(owner).max(initial=1))
        # A power of two, because each size of a message is compiled.
        own = self.gather(clients[owner == jax.process_index()], 1 << (most - 1).bit_length())
        sent = np.concatenate([_bytes(leaf) for leaf in jax.tree.leaves(own)], axis=1)
        received = np.zeros((slots, sent.shape[1]), np.uint8)
        for process, of_process in enumerate(distributed.arrays_of_all(sent)):
            at = np.flatnonzero(owner == process)
            received[at] = of_process[: len(at)]
        ends = np.cumsum([_bytes(leaf).shape[1] for leaf in jax.tree.leaves(own)])
        parts = zip(np.split(received, ends[:-1], axis=1), jax.tree.leaves(own), strict=True)
        leaves = [np.ascontiguousarray(part).view(leaf.dtype).reshape(slots, *leaf.shape[1:]) for part, leaf in parts]
        return jax.tree.unflatten(jax.tree.structure(own), leaves)

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

    def copied(self, into: ClientRows | None = None) -> ClientRows:
        """Returns ``into``, which has the same layout, with a copy of these rows; by default a copy in a new store."""
        copy = ClientRows.empty(self.store.like, len(self.index)) if into is None else into
        positions = np.flatnonzero(self.index >= 0)
        # In the order of the store, so that a file is read sequentially.
        positions = positions[np.argsort(self.index[positions])]
        block = max(1, _BLOCK_BYTES // max(1, self.store.row_bytes))
        for start in range(0, len(positions), block):
            clients = positions[start : start + block]
            copy = copy.written(clients, self.gather(clients)[0])
        return copy


def _bytes(rows: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row, ``uint8 [n, bytes]``."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)


def is_rows(value: Any) -> bool:
    """Returns whether a value is `ClientRows`; for use as ``is_leaf`` of functions of `jax.tree`.

    >>> is_rows({"w": 1.0})
    False
    """
    return isinstance(value, ClientRows)


jax.tree_util.register_pytree_node(
    ClientRows, lambda rows: ((rows.index,), rows.store), lambda store, children: ClientRows(store, children[0])
)
