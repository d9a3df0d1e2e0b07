"""`FederatedData`: the examples of all clients in shared columns; `ClientDataset`: the examples of one client."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data._batching import Batch, Batches
from fedsim.data._client_ids import ClientIds
from fedsim.data._packed import open_packed, save_packed, verify_packed
from fedsim.data._text_column import TextColumn

_CHUNK_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class ClientDataset:
    """The examples of one client.

    Attributes:
      client_id: the client's id.
      examples: feature name to ``np.ndarray [n, ...]``. The arrays are views of the population's columns; do not write to them.

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
        """Yields the batches that the client trains on in a round. Compiled rounds use the same batches.

        Args:
          batches: batch size and number of steps.
          key: the client's key of the round, see `Cohort.keys`.
          steps: number of batches, for example of a straggler; default: what ``batches`` says.

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
    """A population of clients: one contiguous column per feature, and the position of each client's rows.

    The rows ``offsets[i] : offsets[i + 1]`` of every column belong to client ``i``, so a client is a slice and may be empty.
    Columns may be memory-mapped files that are larger than memory, see `FederatedData.open`.

    Attributes:
      columns: feature name to array ``[rows, ...]``. Text is a `TextColumn`; object arrays of ``bytes`` are converted to it.
      offsets: ``int64 [clients + 1]``, nondecreasing from 0 to rows.
      client_ids: the clients' ids, which are unique strings.

    Raises:
      ValueError: no clients, no features, columns of different lengths, wrong offsets, or duplicate ids.

    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros([3, 2])}, "bob": {"x": np.ones([1, 2])}})
    >>> data.num_clients, data.num_examples, data.sizes.tolist(), data["bob"]["x"].tolist()
    (2, 4, [3, 1], [[1.0, 1.0]])
    """

    columns: Mapping[str, np.ndarray | TextColumn]
    offsets: np.ndarray
    client_ids: Sequence[str]

    def __post_init__(self) -> None:
        if np.asarray(self.offsets).dtype.kind not in "iu":
            raise ValueError(f"Expected integer offsets, got {np.asarray(self.offsets).dtype}: convert them.")
        offsets = np.asarray(self.offsets, np.int64)
        object.__setattr__(self, "offsets", offsets)
        if not self.columns:
            raise ValueError("Expected at least one feature column, got none.")
        if len(self.client_ids) == 0:
            raise ValueError("The population is empty: expected at least one client.")
        if offsets.shape != (len(self.client_ids) + 1,) or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"Expected offsets of shape [{len(self.client_ids) + 1}] (clients + 1), nondecreasing from 0, got shape "
                f"{list(offsets.shape)} and values such as {offsets.ravel()[:3].tolist()}."
            )
        object.__setattr__(self, "columns", {name: _packed_text(name, column) for name, column in self.columns.items()})
        for name, column in self.columns.items():
            checks.unmasked(**{f"feature {name!r}": column})
            if not isinstance(column, np.ndarray | TextColumn) or not column.ndim:
                raise ValueError(
                    f"Feature {name!r} must be a NumPy array with one row per example, got {type(column).__name__}."
                )
            if len(column) != offsets[-1]:
                raise ValueError(f"Feature {name!r} has {len(column)} rows, and the clients' sizes sum to {offsets[-1]}.")
        if offsets[-1] >= 2**31:
            raise ValueError(f"FederatedData holds at most 2**31 - 1 examples, got {offsets[-1]}: use several populations.")
        if isinstance(self.client_ids, ClientIds):
            return
        for client_id in self.client_ids:
            if not isinstance(client_id, str):
                raise ValueError(
                    f"Client ids must be text, got {type(client_id).__name__} {client_id!r:.60}: convert it to str."
                )
        if len(self._index) != len(self.client_ids):
            seen: set[str] = set()
            duplicate = next(i for i in self.client_ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise ValueError(f"Client ids must be unique, and {duplicate!r} occurs more than once: rename one of the clients.")

    @classmethod
    def from_arrays(
        cls,
        columns: Mapping[str, Any],
        *,
        sizes: Sequence[int] | np.ndarray | None = None,
        clients: Sequence[Any] | np.ndarray | None = None,
        client_ids: Sequence[str] | None = None,
    ) -> FederatedData:
        """Creates a population from arrays and either the number of rows per client or the client of each row.

        Args:
          columns: feature name to array ``[rows, ...]``.
          sizes: number of rows of each client; a client's rows are consecutive.
          clients: ``[rows]``, the client of each row. Its text is the client id. Clients are sorted, and the rows of a client
            keep their order.
          client_ids: the clients' ids, only with ``sizes``; default ``"0", "1", ...``.

        Raises:
          ValueError: neither or both of ``sizes`` and ``clients``, ``client_ids`` without ``sizes``, a row without a client, or
            wrong lengths.

        >>> data = FederatedData.from_arrays({"y": [5, 6, 7]}, clients=["b", "a", "b"])
        >>> {client.client_id: client["y"].tolist() for client in data.clients()}
        {'a': [6], 'b': [5, 7]}
        """
        columns = {name: _as_column(name, column) for name, column in columns.items()}
        checks.unmasked(sizes=sizes, clients=clients)
        if (sizes is None) == (clients is None):
            raise ValueError(
                "Expected either sizes (rows per client) or clients (the client of each row), got both or neither."
            )
        if clients is not None:
            if client_ids is not None:
                raise ValueError(
                    "Expected client_ids only with sizes: with clients, its values are the ids. Leave client_ids out."
                )
            ids, client_of_row = _group_by_client(np.asarray(clients))
            for name, column in columns.items():
                if len(column) != len(client_of_row):
                    raise ValueError(
                        f"Feature {name!r} has {len(column)} rows, and clients has {len(client_of_row)}: give one per row."
                    )
            order = np.argsort(client_of_row, kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
            sizes, client_ids = np.bincount(client_of_row, minlength=len(ids)), ids
        sizes = np.asarray(sizes)
        if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
            raise ValueError(f"Expected sizes as integers of shape [clients], got {sizes.dtype} {list(sizes.shape)}.")
        sizes = sizes.astype(np.int64)
        if sizes.size and sizes.min() < 0:
            raise ValueError(f"Expected sizes >= 0, got {sizes.min()} for client number {int(sizes.argmin())}.")
        ids = [str(i) for i in range(len(sizes))] if client_ids is None else list(client_ids)
        if len(ids) != len(sizes):
            raise ValueError(f"Expected one of client_ids per client, got {len(ids)} client_ids for {len(sizes)} sizes.")
        return cls(columns, np.concatenate([[0], np.cumsum(sizes)]), ids)

    @classmethod
    def from_clients(cls, clients: Mapping[str, Mapping[str, Any]]) -> FederatedData:
        """Creates a population from ``{client id: {feature: array [n, ...]}}``.

        Raises:
          ValueError: no clients, or a client with other features, shapes or dtypes than the first client. The message names it.

        >>> FederatedData.from_clients({"a": {"x": np.zeros(2)}, "b": {"y": np.zeros(2)}})
        Traceback (most recent call last):
        ...
        ValueError: Client 'b' has features ['y'], and client 'a' has ['x']: every client needs the same features.
        """
        if not clients:
            raise ValueError("The population is empty: expected at least one client.")
        arrays = {name: {f: _as_column(f, a) for f, a in features.items()} for name, features in clients.items()}
        first_id, first = next(iter(arrays.items()))
        sizes = []
        for client_id, features in arrays.items():
            check_same_features(first_id, first, client_id, features)
            sizes.append(check_same_lengths(client_id, features))
        columns = {feature: np.concatenate([a[feature] for a in arrays.values()]) for feature in first}
        return cls.from_arrays(columns, sizes=sizes, client_ids=list(arrays))

    @classmethod
    def from_partition(cls, columns: Mapping[str, Any], partition: Sequence[np.ndarray]) -> FederatedData:
        """Creates a population from arrays and the row indices of each client.

        Args:
          columns: feature name to array ``[rows, ...]``.
          partition: an integer array of row indices per client, for example from `fedsim.partitioners`.

        Raises:
          ValueError: columns of different lengths, or indices that are not integers or are outside of the columns.

        >>> data = FederatedData.from_partition({"y": [5, 6, 7]}, [np.array([2]), np.array([0, 1])])
        >>> [client["y"].tolist() for client in data.clients()]
        [[7], [5, 6]]
        """
        arrays = {name: _as_column(name, column) for name, column in columns.items()}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if [] in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(f"Expected columns [rows, ...] of one length, got shapes {shapes}.")
        num_rows = len(next(iter(arrays.values())))
        indices = [np.asarray(rows) for rows in partition]
        for client, rows in enumerate(indices):
            if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
                raise ValueError(
                    f"Expected integer indices for client {client}, got {rows.dtype} {list(rows.shape)}: see np.flatnonzero."
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
        """Writes the population to a packed HDF5 file, which appears under its name only when it is complete.

        The columns are contiguous datasets in ``/columns``. ``/offsets`` is ``int64 [clients + 1]``, and ``/client_ids`` is
        fixed-length UTF-8. A text column is a group of ``bytes`` and ``starts``. The file contains checksums, see `verify`.

        Raises:
          FileNotFoundError: the folder does not exist.
          ValueError: HDF5 cannot store the name or the dtype of a column, or a client id.
          OSError: the disk is full; no file is left.

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
        """Number of clients, including clients without examples."""
        return len(self.client_ids)

    @property
    def num_examples(self) -> int:
        """Number of examples of all clients."""
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
        """Size of all columns in bytes."""
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
        # Cached values, among them arrays on devices, are not sent to other processes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def index(self, client_id: str) -> int:
        """Returns the position of a client in the population.

        Raises:
          KeyError: there is no client of this id.
        """
        position = self._position(client_id)
        if position is None:
            raise KeyError(f"No client {client_id!r} among {self.num_clients} clients; the first is {self.client_ids[0]!r}.")
        return position

    def client(self, index: int) -> ClientDataset:
        """Returns the client at a position, see `index`.

        Raises:
          IndexError: the position is outside the population.
        """
        if not 0 <= index < self.num_clients:
            raise IndexError(f"Expected 0 <= index < {self.num_clients}, got index={index}.")
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return ClientDataset(self.client_ids[index], {name: column[rows] for name, column in self.columns.items()})

    def clients(self) -> Iterator[ClientDataset]:
        """Returns an iterator over all clients, in order."""
        return (self.client(i) for i in range(self.num_clients))

    def select(self, client_ids: Sequence[str]) -> FederatedData:
        """Returns a population of these clients, in this order. Their rows are copied."""
        client_ids = list(client_ids)
        chosen = [self.index(client_id) for client_id in client_ids]
        columns = {name: self.gather(name, chosen) for name in self.columns}
        return FederatedData.from_arrays(columns, sizes=self.sizes[chosen], client_ids=client_ids)

    def gather(self, feature: str, clients: Sequence[int] | np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the concatenated rows of some clients of one feature, ``[sum of sizes, ...]``.

        The cost does not depend on the size of the population.

        Args:
          feature: name of the feature.
          clients: positions of the clients.
          out: array ``[>= sum of sizes, ...]`` to write to, which is then returned; default: a new array.
        """
        clients = np.asarray(clients, np.int64)
        return self.gather_rows(feature, np.stack([self.offsets[clients], self.offsets[clients + 1]], axis=1), out)

    def gather_rows(self, feature: str, ranges: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the concatenated rows of some ranges of one feature, see `gather`.

        Args:
          feature: name of the feature.
          ranges: ``int64 [n, 2]``, the first row of each range and the one after the last.
          out: see `gather`.

        >>> data = FederatedData.from_clients({"a": {"x": np.arange(3)}, "b": {"x": np.arange(10, 14)}})
        >>> data.gather_rows("x", np.array([[1, 3], [3, 4]])).tolist()
        [1, 2, 10]
        """
        column = self.columns[feature]
        if not isinstance(column, TextColumn):
            column = np.asarray(column)  # Slicing an np.memmap takes four times as long.
        parts = [column[start:stop] for start, stop in ranges.tolist()]
        if out is None:
            return np.concatenate([column[:0], *parts])
        if parts:
            np.concatenate(parts, out=out[: int(np.sum(ranges[:, 1] - ranges[:, 0]))])
        return out

    def check_dtypes(self) -> None:
        """Raises a ``ValueError`` for a column that no device can store: text, objects, dates, or another byte order."""
        for name, column in self.columns.items():
            if isinstance(column, TextColumn):
                raise ValueError(
                    f"Feature {name!r} is text, which no device can store: convert it to tokens (see fedsim.text), or leave "
                    "it out."
                )
            number = column.dtype.kind in "biufc" or jax.numpy.issubdtype(column.dtype, jax.numpy.number)  # bfloat16, too.
            if not number or column.dtype.char in "gG" or not column.dtype.isnative:
                raise ValueError(
                    f"Feature {name!r} has dtype {column.dtype}, which no device can store: convert it to numbers in this "
                    "machine's byte order, or leave it out."
                )

    def check_range(self, features: Iterable[str]) -> None:
        """Raises a ``ValueError`` for the first number of some features that would change on a device, with feature and client.

        Without ``jax_enable_x64``, a device has numbers of 32 bits. Integers beyond these are refused, and so are floats beyond
        the range of ``float32``. If all floats of a column are whole, such as ids and times in seconds, those above 2**24 that
        ``float32`` does not have are refused, too. The rounding of other floats is accepted. The result is cached.
        """
        if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
            checked = self.__dict__.setdefault("_in_range", set())
            for name in set(features) - checked:
                self._check_range_of(name)
                checked.add(name)

    def check_finite(self) -> None:
        """Raises a ``ValueError`` for the first NaN or infinity, with feature and client. The result is cached."""
        _ = self._finite

    def check_labels(self, feature: str, num_classes: int, *, unlabelled: bool = False) -> None:
        """Raises a ``ValueError`` unless all labels are integers in ``[0, num_classes)``. The message names the client.

        Args:
          feature: name of the labels, which may have any shape per example.
          num_classes: number of classes.
          unlabelled: whether -1, a hidden label, is accepted, too.
        """
        low, high = self._label_range(feature)
        if low is None or high is None:
            return
        label, row = low if low[0] < 0 and not (unlabelled and low[0] == -1) else high
        if not (-1 if unlabelled else 0) <= label < num_classes:
            remedy = (
                "Number the labels from 0." if label < 0 else f"Use the dataset's model, or one with num_classes={label + 1}."
            )
            if label == -1:
                remedy = (
                    "If -1 marks hidden labels, train on fedsim.partitioners.only_labelled(data), or with an algorithm that "
                    "learns from unlabelled examples, such as FixMatch. Otherwise number the labels from 0."
                )
            raise ValueError(
                f"Client {self._client_id_of_row(row)!r} has label {feature}={label}, and the model has classes 0 to "
                f"{num_classes - 1}. {remedy}"
            )

    def label_range(self, feature: str) -> tuple[int, int] | None:
        """Returns the smallest and the largest integer of a feature; None if it has no values. The result is cached."""
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
                        client_id = self._client_id_of_row(row)
                        raise ValueError(
                            f"Feature {name!r} of client {client_id!r} holds a NaN or an infinity (example "
                            f"{row - int(self.offsets[self.index(client_id)])}). Correct or remove that example."
                        )
        return True

    def _check_range_of(self, name: str) -> None:
        column = self.columns[name]
        if isinstance(column, TextColumn) or column.dtype.itemsize != 8 or column.dtype.kind not in "iuf":
            return
        if (found := first_changed(column)) is not None:
            row, value, dtype = found
            client_id = self._client_id_of_row(row)
            remedy = "scale the values, or subtract the smallest" if dtype.kind == "f" else "renumber the values"
            raise ValueError(
                f"Feature {name!r} of {column.dtype} contains {value}, which does not fit into {dtype} on a device, in example "
                f"{row - int(self.offsets[self.index(client_id)])} of client {client_id!r}. To keep it, {remedy}, remove that "
                f"example, or set jax_enable_x64. If the change is meant, convert the column to {dtype}."
            )

    def _label_range(self, feature: str) -> tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]:
        """Returns the smallest and the largest label, each with its row, or two Nones. The result is cached."""
        cache = self.__dict__.setdefault("_label_ranges", {})
        if feature not in cache:
            labels = np.asarray(self.columns[feature])
            if labels.dtype.kind not in "iub":
                raise ValueError(f"Labels {feature!r} must be integers, got {labels.dtype}: convert them first.")
            per_row = max(1, labels.size // max(1, len(labels)))
            extremes = (labels.argmin(), labels.argmax()) if labels.size else ()
            cache[feature] = tuple((int(labels.flat[at]), int(at) // per_row) for at in extremes) or (None, None)
        return cache[feature]

    def _client_id_of_row(self, row: int) -> str:
        return self.client_ids[int(np.searchsorted(self.offsets, row, side="right")) - 1]


def _as_column(name: str, values: Any) -> Any:
    if isinstance(values, TextColumn):
        return values
    checks.unmasked(**{f"feature {name!r}": values})
    return np.asarray(values)


def first_changed(column: np.ndarray) -> tuple[int, Any, np.dtype] | None:
    """Returns the row and the value of the first number of 64 bits that 32 bits change, and their dtype; None without one.

    The rounding of floats is no change, unless all numbers of the column are whole.

    >>> first_changed(np.array([1, 3_000_000_000]))
    (1, np.int64(3000000000), dtype('int32'))
    >>> first_changed(np.array([2.0**24, 2.0**24 + 1])), first_changed(np.array([0.1, 2.0**24 + 1]))
    ((1, np.float64(16777217.0), dtype('float32')), None)
    """
    dtype, rounded, all_whole = np.dtype(f"{column.dtype.kind}4"), None, True
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    for start in range(0, len(column), _CHUNK_ROWS):
        chunk = np.asarray(column[start : start + _CHUNK_ROWS])
        outside = (chunk < limits.min) | (chunk > limits.max)
        if dtype.kind == "f":
            outside &= np.isfinite(chunk)
        if outside.any():
            at = tuple(np.argwhere(outside)[0])
            return start + int(at[0]), chunk[at], dtype
        if dtype.kind == "f" and all_whole:
            all_whole = bool(np.all(chunk == np.rint(chunk)))
            changed = np.argwhere(chunk != chunk.astype(dtype))
            if len(changed) and rounded is None:
                at = tuple(changed[0])
                rounded = start + int(at[0]), chunk[at], dtype
    return rounded if all_whole else None


def _packed_text(name: str, column: Any) -> Any:
    if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim != 1:
        return column
    try:
        return TextColumn.of(column)
    except ValueError as error:
        raise ValueError(f"Feature {name!r}: {error}.") from None


def _group_by_client(clients: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Returns the sorted ids of the clients in ``clients [rows]``, and the position of each row's client among them."""
    if clients.ndim != 1:
        raise ValueError(f"Expected clients [rows], the client of each row, got shape {list(clients.shape)}.")
    is_object = clients.dtype.kind == "O"
    missing = np.array([_is_missing(each) for each in clients], bool) if is_object else clients != clients
    if missing.any():
        raise ValueError(
            f"Row {int(missing.argmax())} has no client, got {clients[missing][0]} in clients: fill it in, or remove the row."
        )
    try:
        values, client_of_row = np.unique(clients, return_inverse=True)
    except TypeError:
        kinds = sorted({type(each).__name__ for each in clients})
        raise ValueError(
            f"Expected values of one type in clients, got {' and '.join(kinds)}: convert all of them to str."
        ) from None
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values], client_of_row


def _is_missing(value: Any) -> bool:
    """Returns whether a value is None, NaN or pandas' NA, whose comparison with itself is neither True nor False."""
    differs = value != value
    return value is None or (differs is not False and differs is not np.False_)


def check_same_lengths(client_id: str, features: Mapping[str, Any]) -> int:
    """Returns the number of examples of a client; raises a ``ValueError`` unless its features have one length."""
    if not features:
        raise ValueError(f"Client {client_id!r} has no features: expected at least one array per client.")
    for name, array in features.items():
        if not array.ndim:
            raise ValueError(
                f"Feature {name!r} of client {client_id!r}: expected an array with one row per example, got a single value."
            )
    lengths = {name: len(array) for name, array in features.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Client {client_id!r} has features of different lengths: {lengths}. Give equal lengths.")
    return next(iter(lengths.values()))


def check_same_features(first_id: str, first: Mapping[str, Any], client_id: str, features: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` unless both clients have the same features, shapes per example and dtypes."""
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
