"""`Spool`: collects the rows of a stream of clients and writes them to a packed file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from array import array as growing
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from zlib_ng import zlib_ng

from fedsim.data._client_ids import ClientIds
from fedsim.data._federated_data import ClientDataset
from fedsim.data._packed import BLOCK_BYTES, StoredArray, check_names, encode_client_ids, fill_packed, first_column, text_arrays
from fedsim.durable_files import atomic_write

_SYNC_BYTES = 1 << 27


class Spool:
    """Writes a packed file from clients that arrive one after another, when neither their number nor their sizes are known.

    One column is written directly to its place in the packed file. Every other column is first written to an unnamed temporary
    file in the same folder, which the operating system deletes when the process ends for any reason. Memory holds only the
    clients' ids and sizes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._columns = Path(path), dict[str, _Column]()
        self._names, self._sizes = list[bytes](), growing("q")
        self._files = contextlib.ExitStack()
        self._synced, self._sync = 0, Future[None]()
        self._sync.set_result(None)

    def __enter__(self) -> Spool:
        self._target = self._files.enter_context(atomic_write(self._path))
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def append(self, client: ClientDataset) -> None:
        """Appends the rows of a client."""
        if not self._columns:
            self._start(client)
        for name, rows in client.examples.items():
            self._columns[name].append(rows)
        self._sync_in_background()
        self._names.append(encode_client_ids([client.client_id])[0])
        self._sizes.append(len(client))

    def write(self) -> None:
        """Completes the packed file."""
        if not self._names:
            raise ValueError("The population is empty: expected at least one client.")
        names = np.array(self._names, f"S{max(1, max(map(len, self._names)))}")
        duplicate = ClientIds(names).first_repeated()
        if duplicate is not None:
            raise ValueError(f"Client ids must be unique, and {duplicate!r} occurs more than once: rename one of the clients.")
        offsets = np.concatenate([[0], np.cumsum(np.frombuffer(self._sizes, np.int64))])
        if offsets[-1] >= 2**31:
            raise ValueError(f"FederatedData holds at most 2**31 - 1 examples, got {offsets[-1]}: use several populations.")
        arrays: dict[str, StoredArray] = {}
        for name, column in self._columns.items():
            arrays |= column.arrays(name, int(offsets[-1]))
        self._sync.result()
        fill_packed(self._target, offsets, names, arrays)

    def _start(self, client: ClientDataset) -> None:
        check_names(client.examples)
        arrays: dict[str, StoredArray] = {}
        for name, rows in client.examples.items():
            self._columns[name] = column = _Column(rows, self._new_file(), self._new_file() if rows.dtype == object else None)
            arrays |= column.arrays(name, 0)
        first, start = first_column(arrays)
        self._content = self._files.enter_context(self._target.open("r+b", buffering=1 << 20))
        self._content.seek(start)
        self._columns[first.split("/")[1]].write_in_place(self._content)
        self._thread = self._files.enter_context(ThreadPoolExecutor(1))

    def _sync_in_background(self) -> None:
        """Starts writing to the disk while more rows arrive, which shortens the wait at the end."""
        if self._content.tell() - self._synced > _SYNC_BYTES and self._sync.done():
            self._sync.result()  # Raises the error of the previous synchronization, if there was one.
            self._synced = self._content.tell()
            self._sync = self._thread.submit(os.fsync, self._content.fileno())

    def _new_file(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile(dir=self._path.parent, buffering=1 << 20))


class _Column:
    """The rows of one feature that have arrived; for text, the bytes and the end of each row."""

    def __init__(self, like: np.ndarray, content: IO[bytes], ends: IO[bytes] | None) -> None:
        self._dtype, self._shape, self._content, self._ends, self._end = like.dtype, like.shape[1:], content, ends, 0
        self._in_place = False
        self._content_crc32 = self._ends_crc32 = 0
        if ends is not None:
            self._append_ends(np.zeros(1, np.int64))

    def write_in_place(self, content: IO[bytes]) -> None:
        """Writes to this file, at its position, instead of to a temporary file."""
        self._content, self._in_place = content, True

    def append(self, rows: np.ndarray) -> None:
        is_text = self._ends is not None
        content = b"".join(rows) if is_text else np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self._content.write(content)
        self._content_crc32 = zlib_ng.crc32(content, self._content_crc32)
        if is_text:
            self._append_ends(self._end + np.cumsum([len(row) for row in rows], dtype=np.int64))

    def _append_ends(self, ends: np.ndarray) -> None:
        assert self._ends
        self._ends.write(ends.data)
        self._ends_crc32 = zlib_ng.crc32(ends.data, self._ends_crc32)
        self._end = int(ends[-1]) if len(ends) else self._end

    def arrays(self, name: str, rows: int) -> dict[str, StoredArray]:
        self._content.flush()
        content = () if self._in_place else _blocks(self._content)
        if self._ends is None:
            return {f"columns/{name}": StoredArray(self._dtype, (rows, *self._shape), content, self._content_crc32)}
        buffer = StoredArray(np.dtype(np.uint8), (self._end,), content, self._content_crc32)
        return text_arrays(name, buffer, StoredArray(np.dtype(np.int64), (rows + 1,), _blocks(self._ends), self._ends_crc32))


def _blocks(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        yield block
