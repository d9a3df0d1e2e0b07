"""A reader and a writer for TensorFlow Federated's SQLite files, with one row per example, a serialized ``tf.train.Example``.

Tables ``examples(split_name, client_id, serialized_example_proto)`` and ``client_metadata(client_id, split_name,
num_examples)``. See TFF's `simulation/datasets/sql_client_data_utils.py`. Published files are ``.sqlite.lzma``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.data import ClientDataset, ClientStream, FormatError
from fedsim.formats._example_proto import columns, serialized
from fedsim.formats._source import Clients, Columns, Features, StrPath, choose_split, locating_errors, stream, writable_columns
from fedsim.formats._sqlite import Database, check_table, text, writing

_EXAMPLES = ["split_name", "client_id", "serialized_example_proto"]
_METADATA = ["client_id", "split_name", "num_examples"]


def read_tff_sqlite(path: StrPath, split: str | None = None, features: Features = None) -> ClientStream:
    """Reads one split of a file of TFF's ``SqlClientData``, ``.sqlite`` or ``.sqlite.lzma``, with clients sorted by id.

    One client is in memory at a time. An ``.lzma`` file is first decompressed into the folder for temporary files (``TMPDIR``);
    the copy is deleted together with the stream. A file without an index on clients is sorted in that folder.

    Args:
      path: the file.
      split: the name of the split; None: the only one in the file.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``, for example
        ``{"pixels": ((28, 28), np.float32)}``. None: all features of a client's first example, as int64, float32 or bytes.
        Features of one value have shape ``[n]``, those of k values ``[n, k]``.

    Raises:
      FileNotFoundError: there is no such file.
      FormatError: there is no such split, or there are several and ``split`` is None; or the file has another layout or is
        damaged, which is raised when it is opened or read.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_sqlite({"train": data}, f"{folder}/a.sqlite")
    ...     {client.client_id: client["y"].tolist() for client in read_tff_sqlite(f"{folder}/a.sqlite")}
    {'ann': [3, 4], 'bob': [5]}
    """
    database = Database(path)
    with locating_errors(os.fspath(path)), database.reading() as connection:
        check_table(connection, "examples", _EXAMPLES, "TFF")
        check_table(connection, "client_metadata", _METADATA, "TFF")
        split_sizes = connection.execute("SELECT split_name, COUNT(*) FROM client_metadata GROUP BY split_name")
        counts = {text(name, "Split name"): count for name, count in split_sizes}
    chosen = choose_split(path, list(counts), split)

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
            next_group = next(grouped, None)
            for listed, num_examples in metadata:
                client_id = text(listed, "Client id")
                examples: list[Any] = []
                if next_group is not None and next_group[0] == listed:
                    examples = [example for _, example in next_group[1]]
                    next_group = next(grouped, None)
                with locating_errors(f"client {client_id!r}"):
                    if len(examples) != num_examples:
                        raise FormatError(
                            f"{len(examples)} examples, but client_metadata has {num_examples!r}: download it again"
                        )
                    if not all(isinstance(example, bytes) for example in examples):
                        raise FormatError("an example is not bytes")
                    client_columns = columns(examples, features) if examples else None
                yield client_id, client_columns
            if next_group is not None:
                raise FormatError(f"Client id {next_group[0]!r} has examples, but is not listed in client_metadata.")

    return stream(path, read, counts[chosen])


def write_tff_sqlite(splits: Mapping[str, Clients] | Clients, path: StrPath, split: str = "train") -> None:
    """Writes a file for TFF's ``SqlClientData``. The file is created only when it is complete.

    Features are flattened, because ``tf.train.Example`` has only lists. Integers become int64, and floats float32.

    Args:
      splits: the clients of each split, by its name; or the clients of one split.
      path: the file.
      split: the name of the split if ``splits`` has the clients of one split.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: the format does not support a dtype, or an integer is too large for int64. The message names the client.

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
    arrays = writable_columns(client)
    for name, array in arrays.items():
        if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
            raise ValueError(
                f"Feature {name!r} of client {client.client_id!r} has {array.max()}, which is too large for int64."
            )
    return arrays
