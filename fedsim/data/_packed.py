"""The packed file format: an HDF5 file that can be opened without HDF5.

After a user block, the HDF5 file contains the contiguous datasets ``/offsets`` (int64 [clients + 1]), ``/client_ids``
(fixed-length UTF-8), and one array per feature under ``/columns``. Each array starts on a page of its own. A text column is a
group of ``bytes`` (uint8) and ``starts`` (int64 [rows + 1]).

The user block stores where each array is, and a checksum of everything except the columns' content. A file is therefore opened
by mapping it into memory, and its structure is verified before it is used. libhdf5 never parses the file, because it can crash
on a damaged one.

The user block also stores the CRC-32 of each array, computed while the array is written. CRC-32 detects every error within 32
consecutive bits, and zlib-ng computes it at 22 GB/s (zlib: 3 GB/s, BLAKE2b: 0.8 GB/s; on one core of the machine in the
README). It adds at most 0.1 s to the 0.4 to 0.6 s that writing 537 MB takes. Opening a file of 66 MB takes 8 ms instead of
0.2 ms, and verifying one of 537 MB takes 70 ms (both from the page cache).
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from zlib_ng import zlib_ng

from fedsim.data._client_ids import ClientIds
from fedsim.data._errors import FormatError
from fedsim.data._text_column import TextColumn
from fedsim.durable_files import atomic_write

T = TypeVar("T")
StrPath = str | os.PathLike[str]

MAGIC = b"fedsim.packed 2 "
_HDF5 = b"\x89HDF\r\n\x1a\n"
# Arrays start on a page of the file, which aligns the mapped arrays for any dtype.
_PAGE = 4096
BLOCK_BYTES = 1 << 24
_HEADER_BYTES = 64
_REMEDY = "Delete it and load the dataset again, or convert or save its source again."
# Files up to this size are compared with their checksums whenever they are opened, which takes about 10 ms for that size.
CHECKED_BYTES = 1 << 26
_READ_BYTES = 1 << 20  # A buffer of this size stays in the processor's cache.


class StoredArray(NamedTuple):
    """One array of the file.

    Attributes:
      dtype: the array's dtype.
      shape: the array's shape.
      blocks: the array's bytes, in order; empty if they are in the file already.
      crc32: the checksum of the bytes; None computes it while ``blocks`` are written.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Iterable[Any]
    crc32: int | None = None

    @classmethod
    def of(cls, array: np.ndarray) -> StoredArray:
        return cls(array.dtype, array.shape, _blocks(array))


def save_packed(columns: Mapping[str, Any], offsets: np.ndarray, client_ids: Iterable[str], path: StrPath) -> None:
    """Writes a population to a packed file; see `FederatedData.save`."""
    check_names(columns)
    arrays: dict[str, StoredArray] = {}
    for name, column in columns.items():
        if isinstance(column, TextColumn):
            arrays |= text_arrays(name, StoredArray.of(column.buffer), StoredArray.of(column.starts))
        else:
            arrays[f"columns/{name}"] = StoredArray.of(column)
    write_packed(path, offsets, encode_client_ids(client_ids), arrays)


def text_arrays(name: str, buffer: StoredArray, starts: StoredArray) -> dict[str, StoredArray]:
    """Returns the two arrays of a text column by name."""
    return {f"columns/{name}/bytes": buffer, f"columns/{name}/starts": starts}


def check_names(features: Iterable[str]) -> None:
    """Raises ``ValueError`` for names of features that HDF5 cannot store; those of the arrays of a text column have a slash."""
    for feature in features:
        if feature in ("", ".") or "/" in feature or "\0" in feature:
            raise ValueError(f"Feature name {feature!r} cannot be the name of an HDF5 dataset: rename the feature.")


def encode_client_ids(client_ids: Iterable[str]) -> np.ndarray:
    """Returns client ids as fixed-length UTF-8, ``S [clients]``.

    Raises:
      ValueError: an id ends with a NUL or is not valid Unicode.
    """
    if isinstance(client_ids, ClientIds):
        return client_ids.names
    encoded = []
    for client_id in client_ids:
        if client_id.endswith("\0"):
            raise ValueError(f"Client id {client_id!r} ends with a NUL, which a packed file cannot store: rename the client.")
        try:
            encoded.append(client_id.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"Client id {client_id!r} is not valid Unicode, which a packed file requires: rename the client."
            ) from None
    # HDF5 has no strings of zero bytes.
    return np.array(encoded, f"S{max(1, max(map(len, encoded)))}")


def write_packed(path: StrPath, offsets: np.ndarray, client_ids: np.ndarray, columns: Mapping[str, StoredArray]) -> None:
    """Writes a packed file, which appears under its name only when it is complete.

    Args:
      path: the file.
      offsets: ``int64 [clients + 1]``.
      client_ids: ``S [clients]``, see `encode_client_ids`.
      columns: ``columns/<feature>``, or the two names of `text_arrays`, to the array.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: HDF5 cannot store the dtype of a feature.
      OSError: the disk is full.
    """
    with atomic_write(path) as target:
        fill_packed(target, offsets, client_ids, columns)


def fill_packed(target: Path, offsets: np.ndarray, client_ids: np.ndarray, columns: Mapping[str, StoredArray]) -> None:
    """Writes a packed file into ``target``; see `write_packed`. An array without blocks keeps the bytes in the file."""
    _check(columns)
    arrays = {"offsets": StoredArray.of(offsets), "client_ids": StoredArray.of(client_ids), **columns}
    structure, starts = _structure(arrays, _user_block_bytes(columns))
    checksums = {}
    with open(target, "r+b") as file:
        for page, content in structure.pages.items():
            file.seek(page * _PAGE)
            file.write(content)
        file.truncate(structure.size)  # The last page may be incomplete.
        for name, array in arrays.items():
            file.seek(starts[name])
            checksum = 0
            for block in array.blocks:
                file.write(block)
                checksum = zlib_ng.crc32(block, checksum)
            checksums[name] = checksum if array.crc32 is None else array.crc32
        layout = json.dumps(_layout(arrays, starts, structure.size, checksums)).encode()
        file.seek(_HEADER_BYTES)
        file.write(layout)
        file.flush()
        checksum = _checksum(np.memmap(file, np.uint8, "r"), json.loads(layout)["arrays"])
        file.seek(0)
        file.write(MAGIC + f"{len(layout):08x} {checksum:08x}\n".encode())


def first_column(columns: Mapping[str, StoredArray]) -> tuple[str, int]:
    """Returns which column a file stores first, and its byte offset; neither depends on the number of rows."""
    _check(columns)
    name = _largest_column(columns)
    one_row = columns[name]._replace(shape=(1, *columns[name].shape[1:]))
    return name, _structure({name: one_row}, _user_block_bytes(columns))[1][name]


def _check(columns: Mapping[str, StoredArray]) -> None:
    for name, array in columns.items():
        if array.dtype.kind not in "biufcS" or not array.dtype.itemsize:
            raise ValueError(
                f"Feature {name.removeprefix('columns/')!r} has dtype {array.dtype}, which a packed file cannot store: convert "
                "it first."
            )


def _largest_column(arrays: Mapping[str, StoredArray]) -> str:
    """Returns the name of the column that is probably the largest: a text column, or the one with the largest rows."""

    def size(name: str) -> tuple[bool, int]:
        is_text = name.count("/") == 2 and name.endswith("/bytes")
        return is_text, arrays[name].dtype.itemsize * int(np.prod(arrays[name].shape[1:]))

    return max((name for name in arrays if name.startswith("columns/")), key=size)


def _user_block_bytes(columns: Mapping[str, StoredArray]) -> int:
    """Returns a size of the user block that suffices for any number of rows and clients and any length of client ids."""
    largest = 2**62
    arrays = {name: array._replace(shape=(largest,) * len(array.shape)) for name, array in columns.items()}
    arrays |= {
        "offsets": StoredArray(np.dtype(np.int64), (largest,), ()),
        "client_ids": StoredArray(np.dtype("S1000000000"), (largest,), ()),
    }
    longest = json.dumps(_layout(arrays, dict.fromkeys(arrays, largest), largest, dict.fromkeys(arrays, 2**32 - 1)))
    return max(_PAGE, 1 << (len(longest) + _HEADER_BYTES - 1).bit_length())


def open_packed(path: StrPath, build: Callable[..., T]) -> T:
    """Opens a packed file with its columns memory-mapped, and returns ``build(columns, offsets, client_ids)``.

    The content of a file of up to `CHECKED_BYTES` bytes is compared with its checksums.
    """
    with _mapped(path) as (file, mapped):
        layout = _read_layout(mapped)
        if len(mapped) <= CHECKED_BYTES:
            _check_content(file, layout)
        return _build(mapped, layout, build)


def verify_packed(path: StrPath) -> bool:
    """Compares every array of a packed file with its checksum; see `FederatedData.verify`."""
    with _mapped(path) as (file, mapped):
        layout = _read_layout(mapped)
        checked = _check_content(file, layout)
        _build(mapped, layout, lambda *_: None)
        return checked


@contextlib.contextmanager
def _mapped(path: StrPath) -> Iterator[tuple[io.FileIO, np.ndarray]]:
    """Yields an open file and its bytes, mapped; adds the file's name to a `FormatError`."""
    if os.path.isdir(path):
        raise FormatError(f"{os.fspath(path)} is a folder: give the path of a packed file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"No file {os.fspath(path)}: check the path.")
    try:
        with open(path, "rb", buffering=0) as file:
            yield file, np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else np.zeros(0, np.uint8)
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)} {error}") from None


def _read_layout(mapped: np.ndarray) -> dict[str, Any]:
    """Returns the layout in the user block after comparing the checksum of everything but the columns' content."""
    head = mapped[:_HEADER_BYTES].tobytes()
    if not head.startswith(MAGIC):
        other = "is HDF5 of another layout (fedsim.formats.read_tff_hdf5 reads TFF's)" if head.startswith(_HDF5) else ""
        raise FormatError(
            f"({len(mapped)} bytes) {other or 'is of another format, or damaged'}: expected a packed file, which "
            "FederatedData.save or fedsim datasets convert writes."
        )
    with _as_damage():
        length, checksum = (int(word, 16) for word in head[len(MAGIC) :].split(b"\n")[0].split())
        layout = json.loads(mapped[_HEADER_BYTES : _HEADER_BYTES + length].tobytes())
        if len(mapped) != layout["bytes"]:
            raise FormatError(f"is truncated or damaged: it has {len(mapped)} bytes instead of {layout['bytes']}. {_REMEDY}")
        if _checksum(mapped, layout["arrays"]) != checksum:
            where = _described(_damaged_tables(mapped, layout) or ["structure"])
            raise FormatError(f"is truncated or damaged: checksums differ in {where}. {_REMEDY}")
        return layout


def _damaged_tables(mapped: np.ndarray, layout: Mapping[str, Any]) -> list[str]:
    """Returns which of the offsets and the client ids differ from their checksums, if the file has these."""
    tables = [name for name in ("offsets", "client_ids") if name in layout.get("crc32", {})]
    return [name for name in tables if zlib_ng.crc32(_map(mapped, **layout["arrays"][name])) != layout["crc32"][name]]


def _build(mapped: np.ndarray, layout: Mapping[str, Any], build: Callable[..., T]) -> T:
    with _as_damage():
        arrays = {name: _map(mapped, **array) for name, array in layout["arrays"].items()}
        columns: dict[str, Any] = {}
        for name in arrays:
            kind, _, feature = name.partition("/")
            if kind == "columns" and feature.endswith("/bytes"):
                feature = feature.removesuffix("/bytes")
                columns[feature] = TextColumn(arrays[name], np.asarray(arrays[f"columns/{feature}/starts"]))
            elif kind == "columns" and "/" not in feature:
                columns[feature] = arrays[name]
        return build(columns, arrays["offsets"], ClientIds(np.asarray(arrays["client_ids"])))


def _check_content(file: io.FileIO, layout: Mapping[str, Any]) -> bool:
    """Raises a `FormatError` if an array differs from its checksum; returns False if the file has no checksums.

    The file is read instead of mapped, because pages of a mapped file would count as memory of this process.
    """
    with _as_damage():
        if "crc32" not in layout:
            return False
        buffer = memoryview(bytearray(_READ_BYTES))
        damaged = []
        for name, array in layout["arrays"].items():
            checksum, left = 0, _nbytes(array)
            file.seek(array["start"])
            while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
                checksum, left = zlib_ng.crc32(buffer[:count], checksum), left - count
            if left or checksum != layout["crc32"][name]:
                damaged.append(name)
    if damaged:
        raise FormatError(f"is damaged: checksums differ in {_described(damaged)}. {_REMEDY}")
    return True


def _described(arrays: Sequence[str]) -> str:
    """Names arrays in an error message.

    >>> print(_described(["offsets", "columns/x", "columns/text/starts"]))
    the offsets, column 'x', the row starts of text column 'text'
    """
    names = []
    for name in arrays:
        kind, _, feature = name.partition("/")
        feature, _, role = feature.partition("/")
        what = {"bytes": "the bytes of text column", "starts": "the row starts of text column"}.get(role, "column")
        names.append(f"{what} {feature!r}" if kind == "columns" else f"the {kind.replace('_', ' ')}")
    return ", ".join(names)


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Converts the exceptions that a damaged user block can cause into a `FormatError`."""
    try:
        yield
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise FormatError(f"is truncated or damaged. {_REMEDY}") from error


def _layout(
    arrays: Mapping[str, StoredArray], starts: Mapping[str, int], size: int, checksums: Mapping[str, int]
) -> dict[str, Any]:
    entries = {
        name: {"dtype": array.dtype.str, "shape": list(array.shape), "start": starts[name]} for name, array in arrays.items()
    }
    # The checksums are not in the arrays' entries, so versions of fedsim without checksums can read the file.
    return {"bytes": size, "arrays": entries, "crc32": dict(checksums)}


class _SparseFile(io.RawIOBase):
    """A sparse file in memory, which stores only the pages that were written.

    HDF5 writes its structure here, with space for columns of any size, instead of to a disk. On a full disk, HDF5 raises
    various errors and leaves a file open that it cannot close.
    """

    def __init__(self) -> None:
        self.pages, self.position, self.size = collections.defaultdict[int, bytearray](lambda: bytearray(_PAGE)), 0, 0

    def write(self, content: Any) -> int:
        content = memoryview(content).cast("B")
        for piece, page, start, stop in self._page_ranges(len(content)):
            self.pages[page][start:stop] = content[piece : piece + stop - start]
        self.position += len(content)
        self.size = max(self.size, self.position)
        return len(content)

    def readinto(self, buffer: Any) -> int:
        buffer = memoryview(buffer).cast("B")
        for piece, page, start, stop in self._page_ranges(len(buffer)):
            buffer[piece : piece + stop - start] = self.pages[page][start:stop] if page in self.pages else bytes(stop - start)
        self.position += len(buffer)
        return len(buffer)

    def _page_ranges(self, length: int) -> Iterator[tuple[int, int, int, int]]:
        piece = 0
        while piece < length:
            page, start = divmod(self.position + piece, _PAGE)
            stop = min(_PAGE, start + length - piece)
            yield piece, page, start, stop
            piece += stop - start

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def truncate(self, size: int | None = None) -> int:
        self.size = self.position if size is None else size
        return self.size


def _structure(arrays: Mapping[str, StoredArray], user_block: int) -> tuple[_SparseFile, dict[str, int]]:
    """Returns the HDF5 file without the content of its arrays, and the byte offset of each array."""
    import h5py  # here, because only writing a file needs HDF5
    from h5py import h5d, h5p, h5s, h5t

    make_groups = h5p.create(h5p.LINK_CREATE)
    make_groups.set_create_intermediate_group(True)
    reserve = h5p.create(h5p.DATASET_CREATE)
    reserve.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    reserve.set_fill_time(h5d.FILL_TIME_NEVER)
    reserve.set_obj_track_times(False)  # Equal data give equal bytes.
    pages, starts = _SparseFile(), {}
    with h5py.File(pages, "w", userblock_size=user_block, alignment_threshold=1, alignment_interval=_PAGE) as file:
        file.attrs["format"], file.attrs["version"] = "fedsim.packed", 2
        first = _largest_column(arrays)
        for name in sorted(arrays, key=lambda name: name != first):
            array = arrays[name]
            dtype, space = h5t.py_create(array.dtype, logical=True), h5s.create_simple(array.shape)
            dataset = h5d.create(file.id, name.encode(), dtype, space, reserve, make_groups)
            starts[name] = dataset.get_offset() if np.prod(array.shape) else 0
    return pages, starts


def _blocks(array: np.ndarray) -> Iterator[Any]:
    """Yields an array's bytes in blocks of rows, because the array may be a mapped file that is larger than memory."""
    rows = max(1, BLOCK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    for start in range(0, len(array) if array.size else 0, rows):
        yield np.ascontiguousarray(array[start : start + rows]).view(np.uint8).data


def _checksum(whole: np.ndarray, arrays: Mapping[str, Any]) -> int:
    """Returns the CRC-32 of all bytes except the header line and the columns' content."""
    extents = sorted((array["start"], _nbytes(array)) for name, array in arrays.items() if name.startswith("columns/"))
    checksum, at = 0, _HEADER_BYTES
    for start, size in [*extents, (len(whole), 0)]:
        if size or start == len(whole):
            checksum = zlib.crc32(whole[at:start].data, checksum)
            at = start + size
    return checksum


def _nbytes(array: Mapping[str, Any]) -> int:
    size = np.dtype(array["dtype"]).itemsize
    for length in array["shape"]:
        size *= length
    return size


def _map(whole: np.ndarray, dtype: str, shape: list[int], start: int) -> np.ndarray:
    kind = np.dtype(dtype)
    size = _nbytes({"dtype": dtype, "shape": shape})
    if kind.kind not in "biufcS" or min(start, *shape) < 0 or start + size > len(whole):
        raise ValueError("an array is outside of the file")
    return whole[start : start + size].view(kind).reshape(shape)
