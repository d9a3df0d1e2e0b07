"""FedJAX's SQLite files, with one row per client and its examples as zlib-compressed msgpack.

Table ``federated_data(client_id BLOB, data BLOB, num_examples INTEGER)``. The msgpack is a map from features to
extension 1, which is the packed triple ``(shape, dtype name, bytes)`` of an array, or to extension 4, which is the packed pair
``(shape, flat list of byte strings)``. See `fedjax/core/serialization.py` of FedJAX 0.0.17.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import msgpack
import numpy as np
from zlib_ng import zlib_ng

from fedsim.data import ClientStream, FormatError
from fedsim.formats._source import (
    MAX_CLIENT_BYTES,
    Clients,
    Columns,
    Features,
    StrPath,
    locating_errors,
    selected,
    stream,
    texts,
    writable_columns,
)
from fedsim.formats._sqlite import Database, check_table, text, writing

_NDARRAY, _BYTES_NDARRAY = 1, 4
_HEAD_BYTES = 1024
_COLUMNS = ["client_id", "data", "num_examples"]
_DAMAGE_ERRORS: Any = (zlib_ng.error, msgpack.UnpackException, ValueError, TypeError, OverflowError, IndexError, AttributeError)


def read_fedjax_sqlite(path: StrPath, features: Features = None) -> ClientStream:
    """Reads a file of FedJAX's ``SQLiteFederatedData``, also compressed as ``.lzma`` or ``.xz``.

    Clients are in the order of the file. Threads decompress a few clients ahead, and only those are in memory. A client whose
    data would decompress to more than 256 MiB is an error.

    Args:
      path: the file.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``, for example
        ``{"pixels": ((784,), np.float16)}``; None: all features.

    Raises:
      FileNotFoundError: there is no such file.
      FormatError: the file has another layout or is damaged; raised when it is opened or read.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_fedjax_sqlite(data, f"{folder}/a.sqlite")
    ...     {client.client_id: client["y"].tolist() for client in read_fedjax_sqlite(f"{folder}/a.sqlite")}
    {'ann': [3, 4], 'bob': [5]}
    """
    database = Database(path)
    with locating_errors(os.fspath(path)), database.reading() as connection:
        check_table(connection, "federated_data", _COLUMNS, "FedJAX")
        (count,) = connection.execute("SELECT COUNT(*) FROM federated_data").fetchone()

    def read() -> Iterator[tuple[str, Columns]]:
        # Decompression releases Python's global lock, so threads decompress on all cores while this one continues.
        threads = os.cpu_count() or 1
        with database.reading() as connection, ThreadPoolExecutor(threads) as pool:
            waiting: deque[Future[tuple[str, Columns]]] = deque()
            try:
                for row in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM federated_data ORDER BY rowid"):
                    waiting.append(pool.submit(_client, row, features))
                    if len(waiting) > 2 * threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    return stream(path, read, count)


def _client(row: tuple[Any, Any, Any], features: Features) -> tuple[str, Columns]:
    client_id, data, num_examples = text(row[0], "Client id"), row[1], row[2]
    with locating_errors(f"client {client_id!r}", *_DAMAGE_ERRORS):
        if not isinstance(data, bytes):
            raise FormatError(f"its data are {data!r}: expected bytes")
        inflate = zlib_ng.decompressobj()
        packed = inflate.decompress(data, MAX_CLIENT_BYTES)
        if not inflate.eof:
            reason = "exceeds the limit of 256 MiB" if len(packed) == MAX_CLIENT_BYTES else "is truncated"
            raise FormatError(f"its compressed data {reason}")
        examples = msgpack.unpackb(packed, ext_hook=_array)
        if not isinstance(examples, dict) or not examples:
            raise FormatError(f"its data are a {type(examples).__name__}: expected a map of features")
        for name in examples:
            if not isinstance(name, str) or not isinstance(examples.get(name), np.ndarray):
                raise FormatError(f"Feature {name!r} is {type(examples.get(name)).__name__}: expected an array")
            if examples[name].shape[:1] != (num_examples,):
                raise FormatError(f"Feature {name!r} has shape {list(examples[name].shape)} for {num_examples!r} examples")
        return client_id, selected(examples, features)


def _array(code: int, packed: bytes) -> np.ndarray:
    if code not in (_NDARRAY, _BYTES_NDARRAY):
        raise FormatError(f"extension {code} is not an array")
    if code == _BYTES_NDARRAY:
        shape, flat = msgpack.unpackb(packed, raw=True)
        if not all(isinstance(value, bytes) for value in flat):
            raise FormatError("an array of byte strings has elements of another type")
        return texts(flat).reshape(shape)
    # Only the head is unpacked, so that the content, which is usually much longer, is not copied.
    head = msgpack.Unpacker(raw=True)
    head.feed(packed[:_HEAD_BYTES])
    if head.read_array_header() != 3:
        raise FormatError("an array is not packed as shape, dtype and content")
    shape, dtype = head.unpack(), np.dtype(head.unpack().decode())
    at = head.tell()
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(packed[at], 0)  # msgpack's bin 8, 16 and 32
    start = at + 1 + width
    size = int.from_bytes(packed[at + 1 : start], "big")
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise FormatError(f"an array has dtype {dtype}: expected numbers")
    if not width or len(packed) != start + size or any(n < 0 for n in shape) or prod(shape) * dtype.itemsize != size:
        raise FormatError(f"an array of {dtype} {list(shape)} cannot have {len(packed) - start} bytes")
    return np.frombuffer(packed, dtype, offset=start).reshape(shape)


def write_fedjax_sqlite(clients: Clients, path: StrPath) -> None:
    """Writes a file for FedJAX's ``SQLiteFederatedData.new(path)``. The file is created only when it is complete.

    Args:
      clients: the clients to write.
      path: the file.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: two clients have the same id, or the format does not support a dtype. The message names the client.

    >>> import sqlite3, tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_fedjax_sqlite(data, f"{folder}/a.sqlite")
    ...     connection = sqlite3.connect(f"{folder}/a.sqlite")
    ...     connection.execute("SELECT client_id, num_examples FROM federated_data").fetchall()
    ...     connection.close()
    [(b'ann', 2), (b'bob', 1)]
    """
    table = (
        "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER NOT NULL)"
    )
    with writing(path, table) as connection:
        for client in clients:
            examples = {name: _packed(array) for name, array in writable_columns(client, "biufc").items()}
            row = client.client_id.encode(), zlib_ng.compress(msgpack.packb(examples)), len(client)
            try:
                connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", row)
            except sqlite3.IntegrityError:
                raise ValueError(
                    f"Client ids must be unique, but {client.client_id!r} occurs more than once: rename one of them."
                ) from None


def _packed(array: np.ndarray) -> msgpack.ExtType:
    if array.dtype.kind == "O":
        return msgpack.ExtType(_BYTES_NDARRAY, msgpack.packb((array.shape, array.reshape(-1).tolist())))
    return msgpack.ExtType(_NDARRAY, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
