"""`ClientStream`: reads the clients of a source one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from fedsim import checks
from fedsim.data._errors import FormatError
from fedsim.data._federated_data import ClientDataset, FederatedData, check_same_features, check_same_lengths
from fedsim.data._spool import Spool
from fedsim.data._text_column import check_text

Examples = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class ClientStream:
    """The clients of a source, which are read one after another. Every iteration reads the source again.

    All clients have the same features, with equal dtypes and equal shapes per example. Text is an object array of ``bytes``.

    Attributes:
      read: function that starts reading and returns an iterator of client ids with ``{feature: array [n, ...]}``.
      num_clients: number of clients for the progress bar, if it is known.
      source: name of the source in errors, usually its path.

    Raises:
      FormatError: while reading: a client without features or with other features, or a ragged array. The message names the
        client and the feature.

    >>> stream = ClientStream(lambda: iter([("ann", {"x": np.arange(3)}), ("bob", {"x": np.arange(1)})]))
    >>> doubled = stream.map(lambda client_id, examples: {"x": 2 * examples["x"]})
    >>> {client.client_id: client["x"].tolist() for client in doubled}
    {'ann': [0, 2, 4], 'bob': [0]}
    >>> doubled.load().num_examples
    4
    """

    read: Callable[[], Iterator[tuple[str, Examples]]]
    num_clients: int | None = None
    source: str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, data: FederatedData) -> ClientStream:
        """Returns a stream of the clients of a population, for example to transform and save them.

        >>> data = FederatedData.from_clients({"ann": {"x": np.arange(3)}, "bob": {"x": np.arange(1)}})
        >>> ClientStream.of(data).map(lambda client_id, examples: {"x": examples["x"][:1]}).load().sizes.tolist()
        [1, 1]
        """
        return cls(lambda: ((client.client_id, client.examples) for client in data.clients()), data.num_clients)

    def __iter__(self) -> Iterator[ClientDataset]:
        first: tuple[str, Examples] | None = None
        with self._naming_the_source():
            for client_id, examples in self.read():
                dataset = _checked(client_id, examples)
                first = first or (client_id, _without_rows(dataset.examples))
                check_same_features(*first, client_id, dataset.examples)
                yield dataset

    def map(self, transform: Callable[[str, dict[str, np.ndarray]], Examples]) -> ClientStream:
        """Returns a stream that applies ``transform(client_id, examples)`` to each client; the number of rows may change."""

        def read() -> Iterator[tuple[str, Examples]]:
            for client in self:
                yield client.client_id, transform(client.client_id, dict(client.examples))

        return ClientStream(read, self.num_clients, self.source)

    def load(self) -> FederatedData:
        """Reads all clients into memory.

        Raises:
          FormatError: there are no clients, or two have the same id.
        """
        ids: list[str] = []
        sizes: list[int] = []
        arrays: dict[str, list[np.ndarray]] = {}
        for client in self:
            ids.append(client.client_id)
            sizes.append(len(client))
            for name, array in client.examples.items():
                arrays.setdefault(name, []).append(array)
        with self._naming_the_source():
            if not ids:
                raise ValueError("The population is empty: expected at least one client.")
            columns = {name: np.concatenate(arrays.pop(name)) for name in list(arrays)}
            return FederatedData.from_arrays(columns, sizes=sizes, client_ids=ids)

    def save(self, path: str | os.PathLike[str], *, progress: str | None = None) -> None:
        """Writes a packed file for `FederatedData.open`. It appears under its name only when it is complete.

        Memory is bounded, whatever the size: rows are first written to unnamed files in the same folder, so the disk needs up
        to twice the space. The file contains checksums, see `FederatedData.verify`.

        Args:
          path: the file.
          progress: label of a progress bar; None shows no bar.

        Raises:
          FileNotFoundError: the folder does not exist.
          FormatError: there are no clients, two have the same id, or a packed file cannot store a feature.
          OSError: the disk is full; no file is left.

        >>> import tempfile
        >>> stream = ClientStream(lambda: iter([("ann", {"t": np.array([b"to be", b""], object)})]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream.save(f"{folder}/a.h5")
        ...     FederatedData.open(f"{folder}/a.h5")["ann"]["t"].tolist()
        [b'to be', b'']
        """
        from tqdm import tqdm

        with Spool(path) as spool:
            bar = tqdm(self, progress, self.num_clients, unit=" clients", disable=None if progress else True, leave=False)
            for client in bar:
                with self._naming_the_source():
                    spool.append(client)
            with self._naming_the_source():
                spool.write()

    @contextlib.contextmanager
    def _naming_the_source(self) -> Iterator[None]:
        """Converts a ``ValueError`` into a `FormatError` that names the source."""
        try:
            yield
        except ValueError as error:
            name = "" if self.source is None else os.fspath(self.source)
            if isinstance(error, FormatError) and name in str(error):
                raise
            raise FormatError(f"{name}: {error}" if name not in str(error) else str(error)) from error


def _without_rows(examples: Examples) -> Examples:
    return {name: np.empty((0, *array.shape[1:]), array.dtype) for name, array in examples.items()}


def _checked(client_id: str, features: Examples) -> ClientDataset:
    if not isinstance(client_id, str):
        raise ValueError(f"Client ids must be text, got {type(client_id).__name__} {client_id!r:.60}: convert it to str.")
    examples = {}
    for name, array in features.items():
        checks.unmasked(**{f"feature {name!r} of client {client_id!r}": array})
        try:
            array = np.asarray(array)
            if array.dtype == object:
                check_text(array)
        except ValueError as error:
            raise ValueError(f"Feature {name!r} of client {client_id!r}: {error}.") from None
        examples[name] = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    check_same_lengths(client_id, examples)
    return ClientDataset(client_id, examples)
