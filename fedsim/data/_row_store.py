"""Where rows lie: in memory, or in a file. Rows of one layout, written once and never changed while anybody refers to them."""

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
from fedsim.data._whole_file import whole_file

Rows = Any

_CHUNK_BYTES = 16 * 2**20
_SPARE = 1.25
_MAGIC = b"fedsim.rows 1 "
_LINE = 64
_PAGE = 4096
_LARGE_PAGE = 2**21
_MOST_VIEWS = 1000  # Systems take no more than 1024 at once.


class RowStore:
    """Rows of one layout. A row is written once and never changed; it is free again when no `ClientRows` refers to it.

    Which rows are free is found out when too few are left, by looking at every `ClientRows` alive (mark and sweep). There
    is then room for 1.25 times the rows in use, rounded up to a chunk (16 MiB): that is also the most it ever takes.

    Args:
      like: one row, of arrays or ``jax.ShapeDtypeStruct``.

    Attributes:
      kept: what those who move rows want to find again.
      lock: to be held from `allocate` until a `ClientRows` refers to those rows.
    """

    def __init__(self, like: Rows) -> None:
        named, self.structure = jax.tree_util.tree_flatten_with_path(like)
        self.leaves = [jax.ShapeDtypeStruct(np.shape(leaf), np.dtype(leaf.dtype)) for _, leaf in named]
        self.names = [jax.tree_util.keystr(path) for path, _ in named]
        self.row_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)
        self.rows_per_chunk = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        self.capacity = 0
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # every `ClientRows` of this store
        self.free = np.zeros(0, np.int64)
        self.kept: dict[tuple[str, Any], Any] = {}
        self.lock = threading.Lock()

    @property
    def like(self) -> Rows:
        """One row, of ``jax.ShapeDtypeStruct``."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def allocate(self, count: int) -> np.ndarray:
        """Numbers of ``count`` rows that nobody refers to, in rising order."""
        if len(self.free) < count:
            used = np.zeros(self.capacity, bool)
            for user in self.users:
                used[user.index[user.index >= 0]] = True
            lacking = math.ceil((np.count_nonzero(used) + count) * _SPARE) - self.capacity
            if lacking > 0:
                self._grow(-(-lacking // self.rows_per_chunk) * self.rows_per_chunk)
            self.free = np.flatnonzero(~np.pad(used, (0, self.capacity - len(used))))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def read(self, numbers: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> None:
        """Copies rows to the places ``at`` (rising) of ``out``: one array ``[n, ...]`` per leaf."""
        raise NotImplementedError

    def write(self, numbers: np.ndarray, values: list[np.ndarray], at: np.ndarray) -> None:
        """Fills rows with what is at the places ``at`` (rising) of ``values``."""
        raise NotImplementedError

    def _grow(self, rows: int) -> None:
        self.capacity += rows


class MemoryRows(RowStore):
    """Rows in memory, of which only what was written takes room: the rest is addresses.

    Args:
      like: one row, of arrays or ``jax.ShapeDtypeStruct``.
      clients: how many there are. Up to four rows of each (as many as a run's states of one moment may refer to), the rows
        stay where they are.

    Attributes:
      rows: one array ``[n, ...]`` per leaf, that begins with a page: a CPU's devices can read it in its place.
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
        self.kept.clear()  # It may be about where they were.

    def _grow(self, rows: int) -> None:
        more = self.capacity + rows
        if more > self._reserved:
            try:
                self._reserve(2 * more)
            except OSError as error:
                raise MemoryError(
                    f"No room in memory for {more:,} rows of what clients keep, {more * self.row_bytes / 1e6:,.1f} MB "
                    f"({error.strerror}). Hold fewer states at once, or run in a folder, where rows are a file's."
                ) from error
        super()._grow(rows)
        # In large pages, for a first touch can take longer than all else; of what is in use only, for they are taken whole.
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
    """Zeros, of which only what was written takes room."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, max(1, size))
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _copy(source: np.ndarray, places: np.ndarray, target: np.ndarray, to: np.ndarray) -> None:
    """``target[to] = source[places]``; large rows one by one: that is one copy, where an index of many makes two."""
    if source[:1].nbytes < _PAGE:
        target[to] = source[places]
        return
    for one, other in zip(places.tolist(), to.tolist(), strict=True):
        target[other] = source[one]


class RowFile(RowStore):
    """Rows in one file that grows as they are written, each with a checksum that every reading compares.

    The file begins with what it holds (the layout of a row, and ``about``), which must be the same when it is opened again.
    It takes (rows in use x 1.25 + a chunk) x bytes of a row on the disk. In use are the rows of every `ClientRows` alive:
    the clients' latest, those that checkpoints refer to, and those being written. Rows that were never written are holes.

    It is read and written at offsets, and not mapped: the pages of a mapped file would count as this process's memory, and
    where a mapped file meets a full disk the process is killed, while here there is an error.

    Args:
      like: one row, of arrays or ``jax.ShapeDtypeStruct``.
      path: the file, made if need be. None: one without a name in the folder for temporary files (``TMPDIR``), which the
        disk has back when the process ends, however.
      about: what else must agree; an entry that either side lacks is not compared.

    Raises:
      ValueError: the file holds rows of another layout, or is about something else; the differences are named.
      FormatError: it is truncated, damaged, or no such file at all.
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

    def _open(self, path: Path, holds: dict[str, Any]) -> None:
        holds = json.loads(json.dumps(holds))
        if not path.exists():
            text = json.dumps(holds).encode()
            head = _MAGIC + f"{len(text):08x} {zlib.crc32(text):08x}\n".encode()
            with whole_file(path) as part:
                part.write_bytes(head.ljust(_LINE) + text.ljust(-(_LINE + len(text)) % _PAGE + len(text)))
        self._hold(open(path, "r+b" if os.access(path, os.W_OK) else "rb", buffering=0))  # noqa: SIM115 (it stays open)
        assert self._file
        there, self._start = _read_header(path, self._file)
        rows = there.pop("row"), holds.pop("row")
        differences = [
            f"  {name}: {there[name]} there, {here} here"
            for name, here in holds.items()
            if name in there and there[name] != here
        ] + [
            f"  row{name}: {rows[0].get(name, 'nothing')} there, {rows[1].get(name, 'nothing')} here"
            for name in sorted(rows[0].keys() | rows[1].keys())
            if rows[0].get(name) != rows[1].get(name)
        ]
        if differences:
            raise ValueError(
                f"{path} holds what clients keep of another algorithm or population:\n"
                + "\n".join(differences)
                + "\nChoose another folder, or the algorithm and the data that it was written with."
            )
        super()._grow((os.fstat(self._file.fileno()).st_size - self._start) // max(1, self.row_bytes))
        self._grow(0)

    def _hold(self, file: IO[bytes]) -> None:
        self._file = file
        weakref.finalize(self, file.close)

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        if self._file is None:
            self._hold(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 (it stays open)
        more = self.capacity - len(self._checksums)
        self._checksums, self._known = np.pad(self._checksums, (0, more)), np.pad(self._known, (0, more))

    def read(self, numbers: np.ndarray, out: list[np.ndarray], at: np.ndarray) -> None:
        expected = self._checksums[numbers].tolist()
        for number, views, checksum in zip(numbers.tolist(), _rows_of(out, at), expected, strict=True):
            if not self._transfer(_preadv, views, number) or _checksum(views) != checksum:
                raise FormatError(
                    f"{self._name} is truncated or damaged, or another run wrote to it: row {number} is not what was written "
                    "there. Go on from a checkpoint by running again, or start anew with another folder."
                )

    def write(self, numbers: np.ndarray, values: list[np.ndarray], at: np.ndarray) -> None:
        checksums = []
        try:
            for number, views in zip(numbers.tolist(), _rows_of(values, at), strict=True):
                self._transfer(_pwritev, views, number)
                checksums.append(_checksum(views))
        except OSError as error:
            raise OSError(error.errno, self._says(error, len(numbers))) from error
        self._checksums[numbers], self._known[numbers] = checksums, True

    def sync(self) -> None:
        """Brings all that was written to the disk."""
        if self._file is not None and self.path is not None:
            os.fsync(self._file.fileno())

    def checksums(self, numbers: np.ndarray) -> np.ndarray:
        """``uint32 [n]``; 0 for -1."""
        return np.where(numbers >= 0, self._checksums[numbers] if self.capacity else 0, 0).astype(np.uint32)

    @contextlib.contextmanager
    def expected(self, numbers: np.ndarray, checksums: np.ndarray) -> Iterator[None]:
        """Takes over rows that another process wrote: from now on these are their checksums, unless a row fails inside.

        Args:
          numbers: ``int [n]``, -1 for none.
          checksums: ``uint32 [n]``.

        Raises:
          FormatError: one of them is not there, or is known with another checksum.
        """
        order = np.argsort(numbers)[np.count_nonzero(numbers < 0) :]
        numbers, checksums = numbers[order], checksums[order].astype(np.uint32)
        if len(numbers) and numbers[-1] >= self.capacity:
            raise FormatError(f"{self._name} is truncated: row {numbers[-1]} is missing.")
        if np.any(self._known[numbers] & (self._checksums[numbers] != checksums)):
            raise FormatError(f"Rows of {self._name} were used again.")
        before = self._checksums[numbers], self._known[numbers]
        self._checksums[numbers], self._known[numbers] = checksums, True
        try:
            yield
        except FormatError:
            self._checksums[numbers], self._known[numbers] = before
            raise

    def expect(self, numbers: np.ndarray, checksums: np.ndarray, *, read: bool) -> None:
        """As `expected`, and if they are to be ``read``, all at once, from front to back."""
        with self.expected(numbers, checksums):
            scratch = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in self.leaves]
            for number in np.sort(numbers[numbers >= 0])[:, None] if read else ():
                self.read(number, scratch, np.zeros(1, np.int64))

    def _transfer(self, call: Callable[..., int], views: Sequence[np.ndarray], number: int) -> bool:
        """Moves a row's bytes; False if the file ends before it does."""
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

    def _says(self, error: OSError, rows: int) -> str:
        text = f"What clients keep cannot be written to {self._name}: {error.strerror or error}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.path.parent if self.path else tempfile.gettempdir()).free
                text += f" {rows * self.row_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free there."
        where = "what checkpoints hold is whole, make room and run again" if self.path else "make room, or set TMPDIR"
        return f"{text} To go on: {where}."

    @property
    def _name(self) -> str:
        return str(self.path or f"a temporary file in {tempfile.gettempdir()}")


def _read_header(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], int]:
    head, size = file.read(_LINE), os.fstat(file.fileno()).st_size
    if not head.startswith(_MAGIC):
        raise FormatError(
            f"{path} ({size} bytes) is of another format, or damaged: expected rows of what clients keep. Put back the file "
            "that was there, or choose another folder."
        )
    try:
        length, checksum = (int(word, 16) for word in head[len(_MAGIC) :].split())
        text = file.read(length)
        if zlib.crc32(text) != checksum:
            raise ValueError("another checksum")
        return json.loads(text), -(-(_LINE + length) // _PAGE) * _PAGE
    except ValueError as error:
        raise FormatError(
            f"{path} is truncated or damaged: put back the file that was there, or choose another folder."
        ) from error


def _rows_of(leaves: Sequence[np.ndarray], at: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The rows at these places, each as the bytes of its leaves: views, and no loop over leaves."""
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
