"""Rows on their way into a packed file whose sizes are not known before the last one has come."""

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
from fedsim.data._packed import BLOCK_BYTES, Part, fill_packed, first_place, packed_names, text_parts
from fedsim.data._whole_file import whole_file

_SYNC_BYTES = 1 << 27


class Spool:
    """The file to be, one column already in its place there, and one unnamed file beside it for each of the others.

    The disk has the unnamed files back when the process ends, however. In memory are only the clients' names and sizes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._columns = Path(path), dict[str, _Column]()
        self._names, self._sizes = list[bytes](), growing("q")
        self._files = contextlib.ExitStack()
        self._synced, self._sync = 0, Future[None]()
        self._sync.set_result(None)

    def __enter__(self) -> Spool:
        self._target = self._files.enter_context(whole_file(self._path))
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def append(self, client: ClientDataset) -> None:
        """Adds a client's rows behind the others'."""
        if not self._columns:
            self._start(client)
        for name, rows in client.examples.items():
            self._columns[name].append(rows)
        self._sync_now_and_then()
        self._names.append(packed_names([client.client_id])[0])
        self._sizes.append(len(client))

    def write(self) -> None:
        """Puts everything together in the packed file."""
        if not self._names:
            raise ValueError("The population is empty: expected at least one client.")
        names = np.array(self._names, f"S{max(1, max(map(len, self._names)))}")
        twice = ClientIds(names).first_repeated()
        if twice is not None:
            raise ValueError(f"Client ids must be unique, and {twice!r} occurs more than once.")
        offsets = np.concatenate([[0], np.cumsum(np.frombuffer(self._sizes, np.int64))])
        if offsets[-1] >= 2**31:
            raise ValueError(f"At most 2**31 - 1 examples fit a FederatedData, got {offsets[-1]}: split it by client.")
        parts: dict[str, Part] = {}
        for name, column in self._columns.items():
            parts |= column.parts(name, int(offsets[-1]))
        self._sync.result()
        fill_packed(self._target, offsets, names, parts)

    def _start(self, like: ClientDataset) -> None:
        parts: dict[str, Part] = {}
        for name, rows in like.examples.items():
            self._columns[name] = column = _Column(rows, self._new_file(), self._new_file() if rows.dtype == object else None)
            parts |= column.parts(name, 0)
        first, start = first_place(parts)
        self._content = self._files.enter_context(self._target.open("r+b", buffering=1 << 20))
        self._content.seek(start)
        self._columns[first.split("/")[1]].write_in_place(self._content)
        self._thread = self._files.enter_context(ThreadPoolExecutor(1))

    def _sync_now_and_then(self) -> None:
        """Has the disk write while more rows come, so that there is little to wait for at the end."""
        if self._content.tell() - self._synced > _SYNC_BYTES and self._sync.done():
            self._sync.result()  # What went wrong is said once only.
            self._synced = self._content.tell()
            self._sync = self._thread.submit(os.fsync, self._content.fileno())

    def _new_file(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile(dir=self._path.parent, buffering=1 << 20))


class _Column:
    """The rows so far of one feature; of text, the bytes and every row's end."""

    def __init__(self, like: np.ndarray, content: IO[bytes], ends: IO[bytes] | None) -> None:
        self._dtype, self._shape, self._content, self._ends, self._end = like.dtype, like.shape[1:], content, ends, 0
        self._in_place = False
        self._content_crc32 = self._ends_crc32 = 0
        if ends is not None:
            self._append_ends(np.zeros(1, np.int64))

    def write_in_place(self, content: IO[bytes]) -> None:
        """From now on, instead of from the start of a file beside."""
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

    def parts(self, name: str, rows: int) -> dict[str, Part]:
        self._content.flush()
        content = () if self._in_place else _blocks(self._content)
        if self._ends is None:
            return {f"columns/{name}": Part(self._dtype, (rows, *self._shape), content, self._content_crc32)}
        buffer = Part(np.dtype(np.uint8), (self._end,), content, self._content_crc32)
        return text_parts(name, buffer, Part(np.dtype(np.int64), (rows + 1,), _blocks(self._ends), self._ends_crc32))


def _blocks(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        yield block
