"""`FederatedData`: every client's examples, packed; `ClientDataset`: one client's, to hold in the hand."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim import rng
from fedsim.data._batching import Batch, Batches
from fedsim.data._client_ids import ClientIds
from fedsim.data._packed import open_packed, save_packed, verify_packed
from fedsim.data._text_column import TextColumn

_CHUNK_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class ClientDataset:
    """One client's examples.

    Attributes:
      client_id: its name.
      examples: feature name to ``np.ndarray [n, ...]`` (views into the packed columns: do not write to them).

    >>> data = FederatedData.from_clients({"a": {"x": np.arange(3)}})
    >>> len(data["a"]), data["a"]["x"].tolist()
    (3, [0, 1, 2])
    """

    client_id: str
    examples: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.examples.values())))

    def __getitem__(self, feature: str) -> np.ndarray:
        return self.examples[feature]

    def batches(self, batches: Batches, key: jax.Array, steps: int | None = None) -> Iterator[Batch]:
        """The batches this client trains on when ``key`` is its key of the round: the same that compiled rounds see.

        With ``steps``, only that many (of a straggler).

        >>> data = FederatedData.from_clients({"a": {"x": np.arange(3)}})
        >>> [batch.mask.tolist() for batch in data["a"].batches(Batches(size=2), rng.root(0))]
        [[True, True], [True, False]]
        """
        seed_words = np.asarray(rng.words(rng.stream(key, "shuffle")))
        step_key = rng.stream(key, "step")
        for step in range(int(batches.num_steps(len(self)) if steps is None else steps)):
            index, mask = batches.indices(seed_words, len(self), step, np)
            examples = {name: column[index] for name, column in self.examples.items()}
            yield Batch(examples, mask, jax.random.fold_in(step_key, step), step)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """A population of clients, packed: one contiguous column per feature, and where each client's rows start.

    Client ``i`` owns rows ``offsets[i] : offsets[i + 1]`` of every column, so any client is a slice, a client may be
    empty, and columns may be memory-mapped files that are larger than memory (see `FederatedData.open`).

    Attributes:
      columns: feature name to array ``[rows, ...]``; text is a `TextColumn`, made of an object array of ``bytes`` if need be.
      offsets: ``int64 [clients + 1]``, rising from 0 to rows.
      client_ids: a name per client, unique.

    Raises:
      ValueError: no clients, no features, columns of different lengths, offsets that do not fit, repeated names.

    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros([3, 2])}, "bob": {"x": np.ones([1, 2])}})
    >>> data.num_clients, data.num_examples, data.sizes.tolist(), data["bob"]["x"].tolist()
    (2, 4, [3, 1], [[1.0, 1.0]])
    """

    columns: Mapping[str, np.ndarray | TextColumn]
    offsets: np.ndarray
    client_ids: Sequence[str]

    def __post_init__(self) -> None:
        if np.asarray(self.offsets).dtype.kind not in "iu":
            raise ValueError(f"Expected integer offsets, got {np.asarray(self.offsets).dtype}.")
        offsets = np.asarray(self.offsets, np.int64)
        object.__setattr__(self, "offsets", offsets)
        if not self.columns:
            raise ValueError("Expected at least one feature column, got none.")
        if len(self.client_ids) == 0:
            raise ValueError("The population is empty: expected at least one client.")
        if offsets.shape != (len(self.client_ids) + 1,) or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"Expected offsets of shape [{len(self.client_ids) + 1}] (one more than clients) that rise from 0, "
                f"got shape {list(offsets.shape)}."
            )
        object.__setattr__(self, "columns", {name: _packed_text(name, column) for name, column in self.columns.items()})
        for name, column in self.columns.items():
            if not isinstance(column, np.ndarray | TextColumn) or not column.ndim:
                raise ValueError(
                    f"Feature {name!r} must be a NumPy array with one row per example, got {type(column).__name__}."
                )
            if len(column) != offsets[-1]:
                raise ValueError(f"Feature {name!r} has {len(column)} rows, and the clients' sizes sum to {offsets[-1]}.")
        if offsets[-1] >= 2**31:
            raise ValueError(f"At most 2**31 - 1 examples fit a FederatedData, got {offsets[-1]}: split it by client.")
        if isinstance(self.client_ids, ClientIds):
            return
        wrong = next((i for i in self.client_ids if not isinstance(i, str)), None)
        if wrong is not None:
            raise ValueError(f"Client ids must be text, got {type(wrong).__name__} {wrong!r:.60}: give str(...) of it.")
        if len(self._index) != len(self.client_ids):
            seen: set[str] = set()
            twice = next(i for i in self.client_ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise ValueError(f"Client ids must be unique, and {twice!r} occurs more than once.")

    @classmethod
    def from_arrays(
        cls,
        columns: Mapping[str, Any],
        *,
        sizes: Sequence[int] | np.ndarray | None = None,
        clients: Sequence[Any] | np.ndarray | None = None,
        client_ids: Sequence[str] | None = None,
    ) -> FederatedData:
        """Packs arrays, split either by ``sizes`` (consecutive rows) or by ``clients`` (each row's owner).

        Args:
          columns: feature name to array ``[rows, ...]``.
          sizes: number of rows of each client, in order.
          clients: ``[rows]``, the owner of each row, whose name is its text; clients come in the sorted order of owners, and a
            client's rows keep their order.
          client_ids: names, with ``sizes`` only; default ``"0", "1", ...``.

        Raises:
          ValueError: neither or both of ``sizes`` and ``clients``, ``client_ids`` without ``sizes``, a row without an owner, or
            lengths that do not fit.

        >>> data = FederatedData.from_arrays({"y": [5, 6, 7]}, clients=["b", "a", "b"])
        >>> {client.client_id: client["y"].tolist() for client in data.clients()}
        {'a': [6], 'b': [5, 7]}
        """
        columns = {name: c if isinstance(c, TextColumn) else np.asarray(c) for name, c in columns.items()}
        if (sizes is None) == (clients is None):
            raise ValueError("Give either sizes (rows per client) or clients (the owner of each row).")
        if clients is not None:
            if client_ids is not None:
                raise ValueError("Give client_ids only with sizes: clients names the clients itself.")
            owners, owner = _owners(np.asarray(clients))
            for name, column in columns.items():
                if len(column) != len(owner):
                    raise ValueError(f"Feature {name!r} has {len(column)} rows, and clients names {len(owner)} owners.")
            order = np.argsort(owner, kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
            sizes, client_ids = np.bincount(owner, minlength=len(owners)), owners
        sizes = np.asarray(sizes)
        if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
            raise ValueError(f"Expected sizes [clients] of whole numbers, got {sizes.dtype} {list(sizes.shape)}.")
        sizes = sizes.astype(np.int64)
        if sizes.size and sizes.min() < 0:
            raise ValueError(f"Expected sizes >= 0, got {sizes.min()} for client number {int(sizes.argmin())}.")
        ids = [str(i) for i in range(len(sizes))] if client_ids is None else list(client_ids)
        if len(ids) != len(sizes):
            raise ValueError(f"Got {len(ids)} client_ids for {len(sizes)} sizes.")
        return cls(columns, np.concatenate([[0], np.cumsum(sizes)]), ids)

    @classmethod
    def from_clients(cls, clients: Mapping[str, Mapping[str, Any]]) -> FederatedData:
        """Packs ``{client id: {feature: array [n, ...]}}``.

        Raises:
          ValueError: no clients, or a client whose features, shapes or dtypes differ from the first one's; it is named.

        >>> FederatedData.from_clients({"a": {"x": np.zeros(2)}, "b": {"y": np.zeros(2)}})
        Traceback (most recent call last):
        ...
        ValueError: Client 'b' has features ['y'], and client 'a' has ['x']: every client needs the same features.
        """
        if not clients:
            raise ValueError("The population is empty: expected at least one client.")
        arrays = {name: {f: np.asarray(a) for f, a in features.items()} for name, features in clients.items()}
        first_id, first = next(iter(arrays.items()))
        sizes = []
        for client_id, features in arrays.items():
            check_same_features(first_id, first, client_id, features)
            sizes.append(check_same_lengths(client_id, features))
        columns = {feature: np.concatenate([a[feature] for a in arrays.values()]) for feature in first}
        return cls.from_arrays(columns, sizes=sizes, client_ids=list(arrays))

    @classmethod
    def from_partition(cls, columns: Mapping[str, Any], partition: Sequence[np.ndarray]) -> FederatedData:
        """Splits arrays ``[rows, ...]`` over clients by index arrays, e.g. those of `fedsim.partitioners`.

        Raises:
          ValueError: columns of different lengths, indices that are no whole numbers or lie outside of the columns.

        >>> data = FederatedData.from_partition({"y": [5, 6, 7]}, [np.array([2]), np.array([0, 1])])
        >>> [client["y"].tolist() for client in data.clients()]
        [[7], [5, 6]]
        """
        arrays = {name: column if isinstance(column, TextColumn) else np.asarray(column) for name, column in columns.items()}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if [] in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(f"Expected columns [rows, ...] of one length, got shapes {shapes}.")
        num_rows = len(next(iter(arrays.values())))
        indices = [np.asarray(rows) for rows in partition]
        for client, rows in enumerate(indices):
            if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
                raise ValueError(
                    f"Expected integer indices for client {client}, got {rows.dtype} {list(rows.shape)}: no masks, no floats."
                )
            if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
                raise ValueError(
                    f"Client {client} has indices from {rows.min()} to {rows.max()}: expected 0 to {num_rows - 1}."
                )
        order = np.concatenate([np.zeros(0, np.int64), *(rows.astype(np.int64) for rows in indices)])
        return cls.from_arrays({name: array[order] for name, array in arrays.items()}, sizes=[len(rows) for rows in indices])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> FederatedData:
        """Opens a packed file with memory-mapped columns, so that a population may be larger than memory.

        The size, structure, offsets and client ids of every file are compared with checksums. So are the columns of a file of
        up to 64 MiB; `verify` compares those of a larger file.

        Raises:
          FileNotFoundError: no such file.
          FormatError: the file is truncated or damaged (the message names the column), or `save` did not write it.
        """
        return open_packed(path, cls)

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> bool:
        """Compares all of a packed file with the checksums that were computed when it was written.

        The file is read once, from start to end, and memory stays constant.

        Returns:
          True if everything agrees; False if an earlier version of fedsim wrote the file, without checksums of columns.

        Raises:
          FileNotFoundError: no such file.
          FormatError: the file is truncated or damaged (the message names the columns), or `save` did not write it.

        >>> import tempfile
        >>> data = FederatedData.from_clients({"ann": {"x": np.arange(3)}})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data.save(f"{folder}/population.h5")
        ...     FederatedData.verify(f"{folder}/population.h5")
        True
        """
        return verify_packed(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the population to one packed HDF5 file, which takes its name only once it is whole.

        The columns lie contiguous under ``/columns``; ``/offsets`` is ``int64 [clients + 1]`` and ``/client_ids`` holds
        fixed-length UTF-8. A text column is a group of ``bytes`` and ``starts``.

        Raises:
          FileNotFoundError: the folder does not exist.
          ValueError: a column's name or dtype, or a client's name, that HDF5 cannot hold.
          OSError: the disk is full; nothing is left of the file.

        >>> import tempfile
        >>> data = FederatedData.from_clients({"ann": {"x": np.arange(3)}, "bob": {"x": np.arange(0)}})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data.save(f"{folder}/population.h5")
        ...     again = FederatedData.open(f"{folder}/population.h5")
        >>> again.client_ids, again["ann"]["x"].tolist(), type(again.columns["x"]).__name__
        (['ann', 'bob'], [0, 1, 2], 'memmap')
        """
        save_packed(self.columns, self.offsets, self.client_ids, path)

    @property
    def num_clients(self) -> int:
        """Number of clients, empty ones counted."""
        return len(self.client_ids)

    @property
    def num_examples(self) -> int:
        """Number of examples of all clients together."""
        return int(self.offsets[-1])

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, ``int64 [clients]``."""
        return np.diff(self.offsets)

    @functools.cached_property
    def num_nonempty(self) -> int:
        """Number of clients that have examples."""
        return int(np.count_nonzero(self.sizes))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {client_id: i for i, client_id in enumerate(self.client_ids)}

    def _position(self, client_id: str) -> int | None:
        ids = self.client_ids
        return ids.position(client_id) if isinstance(ids, ClientIds) else self._index.get(client_id)

    def __len__(self) -> int:
        return self.num_clients

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {c.dtype} {list(c.shape[1:])}" for name, c in self.columns.items())
        return f"FederatedData({self.num_clients} clients, {self.num_examples} examples; {columns})"

    def __contains__(self, client_id: str) -> bool:
        return self._position(client_id) is not None

    def __getitem__(self, client_id: str) -> ClientDataset:
        return self.client(self.index(client_id))

    def __iter__(self) -> Iterator[ClientDataset]:
        return self.clients()

    def __getstate__(self) -> dict[str, Any]:
        # What is kept beside the fields (arrays on devices among it) stays behind when data is sent to another process.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def index(self, client_id: str) -> int:
        """A client's position in the population.

        Raises:
          KeyError: no client has this name.
        """
        position = self._position(client_id)
        if position is None:
            raise KeyError(f"No client {client_id!r} among {self.num_clients} clients, such as {self.client_ids[0]!r}.")
        return position

    def client(self, index: int) -> ClientDataset:
        """The client at a position (see `index`).

        Raises:
          IndexError: there is no such position.
        """
        if not 0 <= index < self.num_clients:
            raise IndexError(f"Expected 0 <= index < {self.num_clients}, got index={index}.")
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return ClientDataset(self.client_ids[index], {name: column[rows] for name, column in self.columns.items()})

    def clients(self) -> Iterator[ClientDataset]:
        """All clients, in order."""
        return (self.client(i) for i in range(self.num_clients))

    def select(self, client_ids: Sequence[str]) -> FederatedData:
        """A population of these clients only, in this order (a copy of their rows)."""
        client_ids = list(client_ids)
        chosen = [self.index(client_id) for client_id in client_ids]
        columns = {name: self.gather(name, chosen) for name in self.columns}
        return FederatedData.from_arrays(columns, sizes=self.sizes[chosen], client_ids=client_ids)

    def gather(self, feature: str, clients: Sequence[int] | np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """One feature's rows of these clients, end to end: ``[sum of sizes, ...]``.

        The cost does not grow with the population.
        """
        column, clients = self.columns[feature], np.asarray(clients, np.int64)
        if not isinstance(column, TextColumn):
            column = np.asarray(column)  # A slice of a mapped array, as such, takes four times as long to make.
        starts, stops = self.offsets[clients], self.offsets[clients + 1]
        parts = [column[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        if out is None:
            return np.concatenate([column[:0], *parts])
        if parts:
            np.concatenate(parts, out=out[: int(np.sum(stops - starts))])
        return out

    def check_dtypes(self) -> None:
        """Raises ``ValueError`` for a column that no device can hold: strings, objects, dates, another machine's byte
        order."""
        for name, column in self.columns.items():
            if isinstance(column, TextColumn):
                raise ValueError(
                    f"Feature {name!r} is text, which no device can hold: make tokens of it first (see fedsim.text), or "
                    "leave it out."
                )
            number = column.dtype.kind in "biufc" or jax.numpy.issubdtype(column.dtype, jax.numpy.number)  # bfloat16, too.
            if not number or column.dtype.char in "gG" or not column.dtype.isnative:
                raise ValueError(
                    f"Feature {name!r} has dtype {column.dtype}, which no device can hold: convert it to numbers in this "
                    "machine's byte order, or leave it out."
                )

    def check_finite(self) -> None:
        """Raises ``ValueError`` at the first NaN or infinity, naming feature and client. The outcome is remembered."""
        _ = self._finite

    def check_labels(self, feature: str, num_classes: int) -> None:
        """Raises ``ValueError`` unless all labels, of any shape per example, are integers in ``[0, num_classes)``; it names
        the client."""
        low, high = self._label_range(feature)
        if low is None or high is None:
            return
        label, row = low if low[0] < 0 else high
        if not 0 <= label < num_classes:
            remedy = "Labels count from 0." if label < 0 else f"Pick the dataset's model, or give it num_classes={label + 1}."
            raise ValueError(
                f"Client {self._owner(row)!r} has label {feature}={label}, and the model has classes 0 to "
                f"{num_classes - 1}. {remedy}"
            )

    def label_range(self, feature: str) -> tuple[int, int] | None:
        """The smallest and the largest of a feature's integers; None: there are none. The outcome is remembered."""
        low, high = self._label_range(feature)
        return None if low is None or high is None else (low[0], high[0])

    @functools.cached_property
    def _finite(self) -> bool:
        for name, column in self.columns.items():
            if jax.numpy.issubdtype(column.dtype, jax.numpy.floating):  # bfloat16 too, which NumPy does not know.
                for start in range(0, len(column), _CHUNK_ROWS):
                    bad = ~np.isfinite(column[start : start + _CHUNK_ROWS])
                    if bad.any():
                        row = start + int(np.flatnonzero(bad.reshape(len(bad), -1).any(1))[0])
                        raise ValueError(
                            f"Feature {name!r} of client {self._owner(row)!r} holds a NaN or an infinity (example "
                            f"{row - int(self.offsets[self.index(self._owner(row))])}). Clean or drop that example."
                        )
        return True

    def _label_range(self, feature: str) -> tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]:
        """The smallest and the largest label, each with its row; None: there are none. The outcome is remembered."""
        cache = self.__dict__.setdefault("_label_ranges", {})
        if feature not in cache:
            labels = np.asarray(self.columns[feature])
            if labels.dtype.kind not in "iub":
                raise ValueError(f"Labels {feature!r} must be integers, got {labels.dtype}: convert them first.")
            per_row = max(1, labels.size // max(1, len(labels)))
            extremes = (labels.argmin(), labels.argmax()) if labels.size else ()
            cache[feature] = tuple((int(labels.flat[at]), int(at) // per_row) for at in extremes) or (None, None)
        return cache[feature]

    def _owner(self, row: int) -> str:
        return self.client_ids[int(np.searchsorted(self.offsets, row, side="right")) - 1]


def _packed_text(name: str, column: Any) -> Any:
    if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim != 1:
        return column
    try:
        return TextColumn.of(column)
    except ValueError as error:
        raise ValueError(f"Feature {name!r}: {error}.") from None


def _owners(clients: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The names of those that ``clients [rows]`` holds, sorted as they are there, and the number of each row's."""
    if clients.ndim != 1:
        raise ValueError(f"Expected clients [rows], the owner of each row, got shape {list(clients.shape)}.")
    nobody = clients != clients if clients.dtype.kind != "O" else np.array([each is None or each != each for each in clients])
    if nobody.any():
        raise ValueError(f"Row {int(nobody.argmax())} has no owner, clients holds {clients[nobody][0]}: fill or drop it.")
    try:
        values, owner = np.unique(clients, return_inverse=True)
    except TypeError:
        kinds = sorted({type(each).__name__ for each in clients})
        raise ValueError(f"Expected owners of one kind in clients, got {' and '.join(kinds)}: make text of them.") from None
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values], owner


def check_same_lengths(client_id: str, features: Mapping[str, Any]) -> int:
    """Raises ``ValueError`` unless a client has features, and they have one length, which it returns."""
    if not features:
        raise ValueError(f"Client {client_id!r} has no features: expected at least one array per client.")
    for name, array in features.items():
        if not array.ndim:
            raise ValueError(
                f"Feature {name!r} of client {client_id!r}: Expected an array with one row per example, got a single value."
            )
    lengths = {name: len(array) for name, array in features.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Client {client_id!r} has features of different lengths: {lengths}.")
    return next(iter(lengths.values()))


def check_same_features(first_id: str, first: Mapping[str, Any], client_id: str, features: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless both clients have the same features, with the same shapes per example and dtypes."""
    if set(features) != set(first):
        raise ValueError(
            f"Client {client_id!r} has features {sorted(features)}, and client {first_id!r} has {sorted(first)}: "
            "every client needs the same features."
        )
    for name, array in features.items():
        other = first[name]
        if array.shape[1:] != other.shape[1:] or array.dtype != other.dtype:
            raise ValueError(
                f"Feature {name!r} of client {client_id!r} is {array.dtype} {list(array.shape[1:])} per example, and "
                f"that of client {first_id!r} is {other.dtype} {list(other.shape[1:])}: they must agree."
            )
