"""TensorFlow Federated's SQLite files: one row an example, as a serialized ``tf.train.Example``.

Tables ``examples(split_name, client_id, serialized_example_proto)`` and ``client_metadata(client_id, split_name,
num_examples)``: TFF's `simulation/datasets/sql_client_data_utils.py`. Published as ``.sqlite.lzma``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.data import ClientDataset, ClientStream, FormatError
from fedsim.formats._example_proto import columns, serialized
from fedsim.formats._source import Clients, Columns, Features, StrPath, held, located, only_split, stream
from fedsim.formats._sqlite import Database, require, text, writing

_EXAMPLES = ["split_name", "client_id", "serialized_example_proto"]
_METADATA = ["client_id", "split_name", "num_examples"]


def read_tff_sqlite(path: StrPath, split: str | None = None, features: Features = None) -> ClientStream:
    """Reads one split of a file of TFF's ``SqlClientData``, ``.sqlite`` or ``.sqlite.lzma``, clients ordered by id.

    Memory is that of one client. An ``.lzma`` file is first decompressed piece by piece into the folder for temporary
    files (``TMPDIR``), and the copy is removed with the stream. A file without an index on clients is sorted there.

    Args:
      path: the file.
      split: the name of the split; the file's only one by default.
      features: names of those to keep, or name to ``(shape, dtype)``, for instance ``{"pixels": ((28, 28), np.float32)}``.
        By default all of a client's first example, int64, float32 or bytes, one value as ``[n]``, several as ``[n, k]``.

    Raises:
      FileNotFoundError: no such file.
      FormatError: no such split, or several and none chosen; when opened or read, a file that is not of this layout, or is
        damaged.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_sqlite({"train": data}, f"{folder}/a.sqlite")
    ...     {client.client_id: client["y"].tolist() for client in read_tff_sqlite(f"{folder}/a.sqlite")}
    {'ann': [3, 4], 'bob': [5]}
    """
    database = Database(path)
    with located(os.fspath(path)), database.reading() as connection:
        require(connection, "examples", _EXAMPLES, "TFF")
        require(connection, "client_metadata", _METADATA, "TFF")
        found = connection.execute("SELECT split_name, COUNT(*) FROM client_metadata GROUP BY split_name")
        counts = {text(name, "Split name"): count for name, count in found}
    chosen = only_split(path, list(counts), split)

    def read() -> Iterator[tuple[str, Columns | None]]:
        with database.reading() as connection:
            metadata = connection.execute(
                "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? ORDER BY client_id", [chosen]
            )
            rows = connection.execute(
                "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid",
                [chosen],
            )
            grouped = itertools.groupby(rows, key=lambda row: row[0])
            ahead = next(grouped, None)
            for listed, num_examples in metadata:
                client_id = text(listed, "Client id")
                examples: list[Any] = []
                if ahead is not None and ahead[0] == listed:
                    examples = [example for _, example in ahead[1]]
                    ahead = next(grouped, None)
                with located(f"client {client_id!r}"):
                    if len(examples) != num_examples:
                        raise FormatError(f"{len(examples)} examples where client_metadata says {num_examples!r}: fetch again")
                    if not all(isinstance(example, bytes) for example in examples):
                        raise FormatError("an example is not bytes")
                    made = columns(examples, features) if examples else None
                yield client_id, made
            if ahead is not None:
                raise FormatError(f"Client id {ahead[0]!r} has examples and is not listed in client_metadata.")

    return stream(path, read, counts[chosen])


def write_tff_sqlite(splits: Mapping[str, Clients] | Clients, path: StrPath, split: str = "train") -> None:
    """Writes a file that TFF's ``SqlClientData`` opens. It takes its name only once it is whole.

    Features are flattened, as ``tf.train.Example`` has lists only; integers and floats become int64 and float32.

    Args:
      splits: clients by name of their split, or the clients of one.
      path: the file.
      split: the name of the split if ``splits`` is one.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: a dtype that the format cannot hold, or an integer beyond int64; the client is named.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_sqlite({"train": data, "test": data.select(["bob"])}, f"{folder}/a.sqlite")
    ...     [client.client_id for client in read_tff_sqlite(f"{folder}/a.sqlite", "test")]
    ['bob']
    """
    named = splits if isinstance(splits, Mapping) else {split: splits}
    statements = [
        "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL)",
        "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL)",
        "CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id)",
        "CREATE INDEX idx_metadata_client_id ON client_metadata (client_id)",
    ]
    with writing(path, *statements) as connection:
        for name, clients in named.items():
            for client in clients:
                arrays = _checked(client)
                connection.executemany(
                    "INSERT INTO examples VALUES (?, ?, ?)",
                    (
                        (name, client.client_id, serialized({feature: array[i] for feature, array in arrays.items()}))
                        for i in range(len(client))
                    ),
                )
                connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client.client_id, name, len(client)))


def _checked(client: ClientDataset) -> Columns:
    arrays = held(client)
    for name, array in arrays.items():
        if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
            raise ValueError(f"Feature {name!r} of client {client.client_id!r} has {array.max()}, which int64 cannot hold.")
    return arrays
