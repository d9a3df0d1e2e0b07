"""Stores of rows, in memory or in a file.

All rows of a store have one layout. A row does not change while a `ClientRows` refers to it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from zlib_ng import zlib_ng

from fedsim.data._errors import FormatError
from fedsim.durable_files import atomic_write

Rows = Any

_CHUNK_BYTES = 16 * 2**20
_SPARE = 1.25
_MAGIC = b"fedsim.rows 1 "
_LINE = 64
_PAGE = 4096
_LARGE_PAGE = 2**21
_MOST_VIEWS = 1000  # Systems accept at most 1024 buffers per call.


class RowStore:
    """Rows of one layout. A row is immutable until no `ClientRows` refers to it; then it is free to be written again.

    When too few rows are free, the store searches all existing `ClientRows` for rows in use (mark and sweep). It then grows, if
    necessary, to 1.25 times the rows in use, rounded up to a chunk (16 MiB). It never takes more space than that.

    Args:
      like: one row, a pytree of arrays or ``jax.ShapeDtypeStruct``.

    Attributes:
      references: every existing `ClientRows` of this store.
      lock: must be held from `allocate` until a `ClientRows` refers to the allocated rows.
    """

    def __init__(self, like: Rows) -> None:
        named, self.structure = jax.tree_util.tree_flatten_with_path(like)
        self.leaves = [jax.ShapeDtypeStruct(np.shape(leaf), np.dtype(leaf.dtype)) for _, leaf in named]
        self.names = [jax.tree_util.keystr(path) for path, _ in named]
        self.row_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)
        self.rows_per_chunk = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        self.capacity = 0
        self.references: weakref.WeakSet[Any] = weakref.WeakSet()
        self.free = np.zeros(0, np.int64)
        self.lock = threading.Lock()

    @property
    def like(self) -> Rows:
        """One row, with leaves ``jax.ShapeDtypeStruct``."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def allocate(self, count: int) -> np.ndarray:
        """Returns the numbers of ``count`` free rows, in increasing order."""
        if len(self.free) < count:
            used = np.zeros(self.capacity, bool)
            for rows in self.references:
                used[rows.index[rows.index >= 0]] = True
            lacking = math.ceil((np.count_nonzero(used) + count) * _SPARE) - self.capacity
            if lacking > 0:
                self._grow(-(-lacking // self.rows_per_chunk) * self.rows_per_chunk)
            self.free = np.flatnonzero(~np.pad(used, (0, self.capacity - len(used))))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def read(self, numbers: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> None:
        """Copies rows to the positions ``at`` (increasing) of ``out``, one array ``[n, ...]`` per leaf."""
        raise NotImplementedError

    def write(self, numbers: np.ndarray, values: list[np.ndarray], at: np.ndarray) -> None:
        """Writes the values at the positions ``at`` (increasing) of ``values`` to rows."""
        raise NotImplementedError

    def _grow(self, rows: int) -> None:
        self.capacity += rows


class MemoryRows(RowStore):
    """Rows in memory. Addresses are reserved for all rows, and only written rows occupy memory.

    Args:
      like: one row, a pytree of arrays or ``jax.ShapeDtypeStruct``.
      clients: number of clients. Addresses are reserved for four rows of each, because the states that a run holds at one time
        refer to at most that many. Beyond that, the rows are moved.

    Attributes:
      rows: one array ``[n, ...]`` per leaf, aligned to a page, so that CPU devices can read it without a copy.
    """

    def __init__(self, like: Rows, clients: int = 0) -> None:
        super().__init__(like)
        self.rows: list[np.ndarray] = []
        self._blocks: list[mmap.mmap] = []
        self._reserved = 0
        self._reserve(4 * clients + self.rows_per_chunk)

    def _reserve(self, rows: int) -> None:
        blocks = [_pages(rows * self._bytes_of(leaf)) for leaf in self.leaves]
        wider = [
            np.frombuffer(block, leaf.dtype, rows * math.prod(leaf.shape)).reshape(rows, *leaf.shape)
            for block, leaf in zip(blocks, self.leaves, strict=True)
        ]
        for old, new in zip(self.rows, wider, strict=False):
            new[: self.capacity] = old[: self.capacity]
        self.rows, self._blocks, self._reserved = wider, blocks, rows

    def _grow(self, rows: int) -> None:
        more = self.capacity + rows
        if more > self._reserved:
            try:
                self._reserve(2 * more)
            except OSError as error:
                raise MemoryError(
                    f"No memory for {more:,} rows of client memory, {more * self.row_bytes / 1e6:,.1f} MB "
                    f"({error.strerror}). Hold fewer states at once, or run in a folder, which stores the rows in a file."
                ) from error
        super()._grow(rows)
        # Large pages, because the first access to many small pages can take longer than everything else. They are requested
        # only for the rows in use, because a large page occupies its memory completely.
        for block, leaf in zip(self._blocks, self.leaves, strict=True):
            large = self.capacity * self._bytes_of(leaf) // _LARGE_PAGE * _LARGE_PAGE
            if large and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    block.madvise(mmap.MADV_HUGEPAGE, 0, large)

    @staticmethod
    def _bytes_of(leaf: jax.ShapeDtypeStruct) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize

    def read(self, numbers: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> None:
        for rows, target in zip(self.rows, out, strict=True):
            _copy(rows, numbers, target, at)

    def write(self, numbers: np.ndarray, values: list[np.ndarray], at: np.ndarray) -> None:
        for rows, value in zip(self.rows, values, strict=True):
            _copy(value, at, rows, numbers)


def _pages(size: int) -> mmap.mmap:
    """Returns memory of zeros, of which only written pages are occupied."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, max(1, size))
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _copy(source: np.ndarray, at: np.ndarray, target: np.ndarray, to: np.ndarray) -> None:
    """Sets ``target[to] = source[at]``. Large rows are copied one by one, because an array as index copies them twice."""
    if source[:1].nbytes < _PAGE:
        target[to] = source[at]
        return
    for source_row, target_row in zip(at.tolist(), to.tolist(), strict=True):
        target[target_row] = source[source_row]


class RowFile(RowStore):
    """Rows in a file that grows as they are written. Every row has a checksum, which is compared when the row is read.

    The file starts with a description: the layout of a row, and ``about``. It must be the same when the file is opened again.
    The file takes (rows in use x 1.25 + a chunk) x bytes per row on the disk. In use are the rows of every existing
    `ClientRows`: the latest rows of the clients, those that checkpoints refer to, and those being written. Rows that were never
    written are holes in the file.

    The file is read and written at offsets instead of mapped. Pages of a mapped file would count as memory of this process, and
    a full disk would kill the process instead of raising an error.

    Args:
      like: one row, a pytree of arrays or ``jax.ShapeDtypeStruct``.
      path: the file, which is created if it does not exist. None creates an unnamed file in the folder for temporary files
        (``TMPDIR``), which the operating system deletes when the process ends for any reason.
      about: further description. Entries that only one of the two descriptions has are not compared.

    Raises:
      ValueError: the file has another row layout or description; the message lists the differences.
      FormatError: the file is truncated, damaged, or in another format.
    """

    def __init__(self, like: Rows, path: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        super().__init__(like)
        self.path = path
        self._file: IO[bytes] | None = None
        self._checksums = np.zeros(0, np.uint32)
        self._known = np.zeros(0, bool)
        self._start = 0
        if path is not None:
            layout = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in zip(self.names, self.leaves, strict=True)}
            self._open(path, {**(about or {}), "row": layout})

    def _open(self, path: Path, description: dict[str, Any]) -> None:
        description = json.loads(json.dumps(description))
        if not path.exists():
            text = json.dumps(description).encode()
            head = _MAGIC + f"{len(text):08x} {zlib.crc32(text):08x}\n".encode()
            with atomic_write(path) as part:
                part.write_bytes(head.ljust(_LINE) + text.ljust(-(_LINE + len(text)) % _PAGE + len(text)))
        self._hold(open(path, "r+b" if os.access(path, os.W_OK) else "rb", buffering=0))  # noqa: SIM115 (stays open)
        assert self._file
        stored, self._start = _read_header(path, self._file)
        rows = stored.pop("row"), description.pop("row")
        differences = [
            f"  {name}: {stored[name]} in the file, {here} here"
            for name, here in description.items()
            if name in stored and stored[name] != here
        ] + [
            f"  row{name}: {rows[0].get(name, 'nothing')} in the file, {rows[1].get(name, 'nothing')} here"
            for name in sorted(rows[0].keys() | rows[1].keys())
            if rows[0].get(name) != rows[1].get(name)
        ]
        if differences:
            raise ValueError(
                f"{path} holds the client memory of another algorithm or population:\n"
                + "\n".join(differences)
                + "\nChoose another folder, or use the algorithm and the data that the file was written with."
            )
        size = os.fstat(self._file.fileno()).st_size
        if size < self._start:
            raise FormatError(
                f"{path} is truncated: it ends within its description. Restore the file, or choose another folder."
            )
        super()._grow((size - self._start) // max(1, self.row_bytes))
        self._grow(0)

    def _hold(self, file: IO[bytes]) -> None:
        self._file = file
        weakref.finalize(self, file.close)

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        if self._file is None:
            self._hold(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 (stays open)
        more = self.capacity - len(self._checksums)
        self._checksums, self._known = np.pad(self._checksums, (0, more)), np.pad(self._known, (0, more))

    def read(self, numbers: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> None:
        expected = self._checksums[numbers].tolist()
        for number, views, checksum in zip(numbers.tolist(), _rows_of(out, at), expected, strict=True):
            if not self._transfer(_preadv, views, number) or _checksum(views) != checksum:
                raise FormatError(
                    f"{self._name} is truncated or damaged, or another run wrote to it: row {number} is not what was written. "
                    "Run again to continue from a checkpoint, or start a new run in another folder."
                )

    def write(self, numbers: np.ndarray, values: list[np.ndarray], at: np.ndarray) -> None:
        checksums = []
        try:
            for number, views in zip(numbers.tolist(), _rows_of(values, at), strict=True):
                self._transfer(_pwritev, views, number)
                checksums.append(_checksum(views))
        except OSError as error:
            raise OSError(error.errno, self._write_error(error, len(numbers))) from error
        self._checksums[numbers], self._known[numbers] = checksums, True

    def sync(self) -> None:
        """Synchronizes the file to the disk."""
        if self._file is not None and self.path is not None:
            os.fsync(self._file.fileno())

    def checksums(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the checksums of rows, ``uint32 [n]``; 0 for the number -1."""
        return np.where(numbers >= 0, self._checksums[numbers] if self.capacity else 0, 0).astype(np.uint32)

    @contextlib.contextmanager
    def expected(self, numbers: np.ndarray, checksums: np.ndarray) -> Iterator[None]:
        """Adopts rows that another process wrote, with their checksums. A `FormatError` in the context undoes it.

        Args:
          numbers: ``int [n]``, numbers of the rows; -1 is skipped.
          checksums: ``uint32 [n]``, checksums of the rows.

        Raises:
          FormatError: a row is missing from the file, or is known with another checksum.
        """
        order = np.argsort(numbers)[np.count_nonzero(numbers < 0) :]
        numbers, checksums = numbers[order], checksums[order].astype(np.uint32)
        if len(numbers) and numbers[-1] >= self.capacity:
            raise FormatError(f"{self._name} is truncated: row {numbers[-1]} is missing. Start a new run in another folder.")
        if np.any(self._known[numbers] & (self._checksums[numbers] != checksums)):
            raise FormatError(f"Rows of {self._name} were overwritten since the checkpoint. Continue from a later checkpoint.")
        before = self._checksums[numbers], self._known[numbers]
        self._checksums[numbers], self._known[numbers] = checksums, True
        try:
            yield
        except FormatError:
            self._checksums[numbers], self._known[numbers] = before
            raise

    def expect(self, numbers: np.ndarray, checksums: np.ndarray) -> None:
        """Adopts rows as `expected` does, and reads all of them, in file order, to compare checksums."""
        with self.expected(numbers, checksums):
            scratch = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in self.leaves]
            for number in np.sort(numbers[numbers >= 0])[:, None]:
                self.read(number, scratch, np.zeros(1, np.int64))

    def _transfer(self, call: Callable[..., int], views: Sequence[np.ndarray], number: int) -> bool:
        """Transfers the bytes of a row; returns False if the file ends before the row."""
        assert self._file is not None
        at, left = self._start + number * self.row_bytes, self.row_bytes
        while left:
            done = call(self._file, views[:_MOST_VIEWS], at)
            at, left = at + done, left - done
            if not left:
                break
            if not done:
                return False
            views = list(views)
            while done >= len(views[0]):
                done -= len(views.pop(0))
            views[0] = views[0][done:]
        return True

    def _write_error(self, error: OSError, rows: int) -> str:
        text = f"Client memory cannot be written to {self._name}: {error.strerror or error}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.path.parent if self.path else tempfile.gettempdir()).free
                text += f" {rows * self.row_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free there."
        if self.path:
            return f"{text} The checkpoints are intact: free disk space and run again."
        return f"{text} Free disk space, or set TMPDIR to another folder."

    @property
    def _name(self) -> str:
        return str(self.path or f"a temporary file in {tempfile.gettempdir()}")


def _read_header(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], int]:
    head, size = file.read(_LINE), os.fstat(file.fileno()).st_size
    if not head.startswith(_MAGIC):
        raise FormatError(
            f"{path} ({size} bytes) is of another format, or damaged: expected rows of client memory. Restore the file, or "
            "choose another folder."
        )
    try:
        length, checksum = (int(word, 16) for word in head[len(_MAGIC) :].split())
        text = file.read(length)
        if zlib.crc32(text) != checksum:
            raise ValueError("another checksum")
        return json.loads(text), -(-(_LINE + length) // _PAGE) * _PAGE
    except ValueError as error:
        raise FormatError(f"{path} is truncated or damaged: restore the file, or choose another folder.") from error


def _rows_of(leaves: Sequence[np.ndarray], at: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Returns the rows at these positions, each as views of the bytes of its leaves, without a Python loop over leaves."""
    chosen = np.zeros(len(leaves[0]), bool)
    chosen[at] = True
    flat = (np.ascontiguousarray(leaf).reshape(len(leaf), math.prod(leaf.shape[1:])).view(np.uint8) for leaf in leaves)
    picks = chosen.tolist()
    return zip(*(compress(rows, picks) for rows in flat), strict=True)


def _checksum(views: Sequence[np.ndarray]) -> int:
    checksum = 0
    for view in views:
        checksum = zlib_ng.crc32(view, checksum)
    return checksum


def _preadv(file: Any, views: Any, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), views, at)
    file.seek(at)
    return file.readinto(views[0])


def _pwritev(file: Any, views: Any, at: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(file.fileno(), views, at)
    file.seek(at)
    return file.write(views[0])
