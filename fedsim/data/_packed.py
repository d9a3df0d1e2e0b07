"""The packed file: HDF5 for everybody, and readable here without HDF5.

The file is HDF5 behind a user block: contiguous datasets ``/offsets`` (int64 [clients + 1]), ``/client_ids`` (fixed-length
UTF-8) and under ``/columns`` one array a feature, each on a page of its own; a text column is a group of ``bytes`` (uint8) and
``starts`` (int64 [rows + 1]). The user block says where every array lies, and holds a checksum of all that is not a
column's content. So a file is opened by mapping it, and its structure is known to be whole before anything trusts it: libhdf5
never parses what may be damaged, for it can crash on that.

The user block also holds the CRC-32 of each array, computed while the array is written. CRC-32 detects every error of up to 32
neighboring bits, and zlib-ng computes it at 22 GB/s (zlib: 3 GB/s, BLAKE2b: 0.8 GB/s; one core of the README's machine). It
adds at most 0.1 s to the 0.4 to 0.6 s that writing 537 MB takes. Opening a file of 66 MB takes 8 ms instead of 0.2 ms, and
verifying one of 537 MB takes 70 ms (both from the page cache).
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
from typing import IO, Any, NamedTuple, TypeVar

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t
from zlib_ng import zlib_ng

from fedsim.data._client_ids import ClientIds
from fedsim.data._errors import FormatError
from fedsim.data._text_column import TextColumn
from fedsim.data._whole_file import whole_file

T = TypeVar("T")
StrPath = str | os.PathLike[str]

MAGIC = b"fedsim.packed 2 "
_HDF5 = b"\x89HDF\r\n\x1a\n"
# Arrays start on a page of the file, so that they are aligned for any dtype when mapped.
_PAGE = 4096
BLOCK_BYTES = 1 << 24
_LINE = 64
_REMEDY = "Delete it and load the dataset again, or convert or save its source again."
# Files up to this size are compared with their checksums whenever they are opened, which takes about 10 ms for that size.
CHECKED_BYTES = 1 << 26
_READ_BYTES = 1 << 20  # A buffer of this size stays in the processor's cache.


class Part(NamedTuple):
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
    def of(cls, array: np.ndarray) -> Part:
        return cls(array.dtype, array.shape, _blocks(array))


def save_packed(columns: Mapping[str, Any], offsets: np.ndarray, client_ids: Iterable[str], path: StrPath) -> None:
    """Writes the parts of a population as one packed file; see `FederatedData.save`."""
    parts: dict[str, Part] = {}
    for name, column in columns.items():
        if isinstance(column, TextColumn):
            parts |= text_parts(name, Part.of(column.buffer), Part.of(column.starts))
        else:
            parts[f"columns/{name}"] = Part.of(column)
    write_packed(path, offsets, packed_names(client_ids), parts)


def text_parts(name: str, buffer: Part, starts: Part) -> dict[str, Part]:
    """The two arrays of a text column."""
    return {f"columns/{name}/bytes": buffer, f"columns/{name}/starts": starts}


def packed_names(client_ids: Iterable[str]) -> np.ndarray:
    """Names as fixed-length UTF-8.

    Raises:
      ValueError: a name that cannot be held so.
    """
    if isinstance(client_ids, ClientIds):
        return client_ids.names
    encoded = []
    for client_id in client_ids:
        if client_id.endswith("\0"):
            raise ValueError(f"Client id {client_id!r} ends with a NUL, which packed names cannot hold: rename it.")
        try:
            encoded.append(client_id.encode())
        except UnicodeEncodeError:
            raise ValueError(f"Client id {client_id!r} is no valid Unicode, which packed names must be: rename it.") from None
    # Not one byte wide: HDF5 has no strings of no bytes.
    return np.array(encoded, f"S{max(1, max(map(len, encoded)))}")


def write_packed(path: StrPath, offsets: np.ndarray, names: np.ndarray, columns: Mapping[str, Part]) -> None:
    """Writes one packed file, which takes its name only once it is whole.

    Args:
      path: the file.
      offsets: ``int64 [clients + 1]``.
      names: ``S [clients]``.
      columns: ``columns/<feature>``, or the two of `text_parts`, to what it holds.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: a feature's name or dtype that the file cannot hold.
      OSError: the disk is full.
    """
    with whole_file(path) as target:
        fill_packed(target, offsets, names, columns)


def fill_packed(target: Path, offsets: np.ndarray, names: np.ndarray, columns: Mapping[str, Part]) -> None:
    """Writes a packed file over ``target``; see `write_packed`. The bytes of an array without blocks stay as they are."""
    _check(columns)
    parts = {"offsets": Part.of(offsets), "client_ids": Part.of(names), **columns}
    pages, starts = _structure(parts, _user_block(columns))
    checksums = {}
    with open(target, "r+b") as file:
        for page, content in pages.pages.items():
            file.seek(page * _PAGE)
            file.write(content)
        file.truncate(pages.size)  # The last page may be a part of one.
        for name, part in parts.items():
            file.seek(starts[name])
            checksum = 0
            for block in part.blocks:
                file.write(block)
                checksum = zlib_ng.crc32(block, checksum)
            checksums[name] = checksum if part.crc32 is None else part.crc32
        layout = json.dumps(_layout(parts, starts, pages.size, checksums)).encode()
        file.seek(_LINE)
        file.write(layout)
        file.flush()
        checksum = _checksum(np.memmap(file, np.uint8, "r"), json.loads(layout)["arrays"])
        file.seek(0)
        file.write(MAGIC + f"{len(layout):08x} {checksum:08x}\n".encode())


def first_place(columns: Mapping[str, Part]) -> tuple[str, int]:
    """Which of these columns lies first in a file, and from which byte on: that does not depend on the number of rows."""
    _check(columns)
    name = _first(columns)
    one_row = columns[name]._replace(shape=(1, *columns[name].shape[1:]))
    return name, _structure({name: one_row}, _user_block(columns))[1][name]


def _check(columns: Mapping[str, Part]) -> None:
    for name, part in columns.items():
        feature = name.removeprefix("columns/").removesuffix("/bytes").removesuffix("/starts")
        if feature in ("", ".") or "/" in feature or "\0" in feature:
            raise ValueError(f"Feature name {feature!r} cannot name an HDF5 dataset: rename it.")
        if part.dtype.kind not in "biufcS" or not part.dtype.itemsize:
            raise ValueError(f"Feature {feature!r} has dtype {part.dtype}, which a packed file cannot hold: convert it first.")


def _first(parts: Mapping[str, Part]) -> str:
    """The column that is probably the largest: a text, or the widest."""

    def size(name: str) -> tuple[bool, int]:
        is_text = name.count("/") == 2 and name.endswith("/bytes")
        return is_text, parts[name].dtype.itemsize * int(np.prod(parts[name].shape[1:]))

    return max((name for name in parts if name.startswith("columns/")), key=size)


def _user_block(columns: Mapping[str, Part]) -> int:
    """Room for the first line and the layout of these columns, whatever the numbers of rows, clients and letters in names."""
    most = 2**62
    parts = {name: part._replace(shape=(most,) * len(part.shape)) for name, part in columns.items()}
    parts |= {"offsets": Part(np.dtype(np.int64), (most,), ()), "client_ids": Part(np.dtype("S1000000000"), (most,), ())}
    longest = json.dumps(_layout(parts, dict.fromkeys(parts, most), most, dict.fromkeys(parts, 2**32 - 1)))
    return max(_PAGE, 1 << (len(longest) + _LINE - 1).bit_length())


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
def _mapped(path: StrPath) -> Iterator[tuple[IO[bytes], np.ndarray]]:
    """Yields an open file and its bytes, mapped; adds the file's name to a `FormatError`."""
    if os.path.isdir(path):
        raise FormatError(f"{os.fspath(path)} is a folder: give a packed file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"No file {os.fspath(path)}.")
    try:
        with open(path, "rb", buffering=0) as file:
            yield file, np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else np.zeros(0, np.uint8)
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)} {error}") from None


def _read_layout(mapped: np.ndarray) -> dict[str, Any]:
    """Returns what the user block says, once the checksum of everything but the columns' content agrees."""
    head = mapped[:_LINE].tobytes()
    if not head.startswith(MAGIC):
        other = "is HDF5 of another layout (fedsim.formats.read_tff_hdf5 reads TFF's)" if head.startswith(_HDF5) else ""
        raise FormatError(
            f"({len(mapped)} bytes) {other or 'is of another format, or damaged'}: expected a packed population, which "
            "FederatedData.save writes."
        )
    with _as_damage():
        length, checksum = (int(word, 16) for word in head[len(MAGIC) :].split(b"\n")[0].split())
        layout = json.loads(mapped[_LINE : _LINE + length].tobytes())
        if len(mapped) != layout["bytes"]:
            raise FormatError(f"is truncated or damaged: it has {len(mapped)} bytes instead of {layout['bytes']}. {_REMEDY}")
        if _checksum(mapped, layout["arrays"]) != checksum:
            where = _described(_damaged_tables(mapped, layout) or ["structure"])
            raise FormatError(f"is truncated or damaged: checksums differ in {where}. {_REMEDY}")
        return layout


def _damaged_tables(mapped: np.ndarray, layout: Mapping[str, Any]) -> list[str]:
    """Returns which of the offsets and the client ids disagree with their own checksums, as far as the layout has them."""
    tables = [name for name in ("offsets", "client_ids") if name in layout.get("crc32", {})]
    return [name for name in tables if zlib_ng.crc32(_map(mapped, **layout["arrays"][name])) != layout["crc32"][name]]


def _build(mapped: np.ndarray, layout: Mapping[str, Any], build: Callable[..., T]) -> T:
    with _as_damage():
        found = {name: _map(mapped, **array) for name, array in layout["arrays"].items()}
        columns: dict[str, Any] = {}
        for name in found:
            kind, _, feature = name.partition("/")
            if kind == "columns" and feature.endswith("/bytes"):
                feature = feature.removesuffix("/bytes")
                columns[feature] = TextColumn(found[name], np.asarray(found[f"columns/{feature}/starts"]))
            elif kind == "columns" and "/" not in feature:
                columns[feature] = found[name]
        return build(columns, found["offsets"], ClientIds(np.asarray(found["client_ids"])))


def _check_content(file: IO[bytes], layout: Mapping[str, Any]) -> bool:
    """Raises a `FormatError` unless all arrays agree with their checksums; returns False if the file has no checksums.

    The file is read, not mapped: pages of a mapped file would count as memory of this process.
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
    """Turns what a damaged user block can cause into a `FormatError`."""
    try:
        yield
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise FormatError(f"is truncated or damaged. {_REMEDY}") from error


def _layout(parts: Mapping[str, Part], starts: Mapping[str, int], size: int, checksums: Mapping[str, int]) -> dict[str, Any]:
    arrays = {name: {"dtype": part.dtype.str, "shape": list(part.shape), "start": starts[name]} for name, part in parts.items()}
    # Beside the arrays and not among their entries, so that versions without checksums read the file, too.
    return {"bytes": size, "arrays": arrays, "crc32": dict(checksums)}


class _Pages(io.RawIOBase):
    """A file in memory of which only the pages exist that were written to.

    HDF5 lays out its structure here, with room for columns of any size, and so meets no disk that could be full: it raises
    errors of many kinds then, and keeps a file open that it cannot close.
    """

    def __init__(self) -> None:
        self.pages, self.at, self.size = collections.defaultdict[int, bytearray](lambda: bytearray(_PAGE)), 0, 0

    def write(self, content: Any) -> int:
        content = memoryview(content).cast("B")
        for piece, page, start, stop in self._pieces(len(content)):
            self.pages[page][start:stop] = content[piece : piece + stop - start]
        self.at += len(content)
        self.size = max(self.size, self.at)
        return len(content)

    def readinto(self, buffer: Any) -> int:
        buffer = memoryview(buffer).cast("B")
        for piece, page, start, stop in self._pieces(len(buffer)):
            buffer[piece : piece + stop - start] = self.pages[page][start:stop] if page in self.pages else bytes(stop - start)
        self.at += len(buffer)
        return len(buffer)

    def _pieces(self, length: int) -> Iterator[tuple[int, int, int, int]]:
        piece = 0
        while piece < length:
            page, start = divmod(self.at + piece, _PAGE)
            stop = min(_PAGE, start + length - piece)
            yield piece, page, start, stop
            piece += stop - start

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def truncate(self, size: int | None = None) -> int:
        self.size = self.at if size is None else size
        return self.size


def _structure(parts: Mapping[str, Part], user_block: int) -> tuple[_Pages, dict[str, int]]:
    """The HDF5 file without its arrays' content, and where each is to begin."""
    make_groups = h5p.create(h5p.LINK_CREATE)
    make_groups.set_create_intermediate_group(True)
    reserve = h5p.create(h5p.DATASET_CREATE)
    reserve.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    reserve.set_fill_time(h5d.FILL_TIME_NEVER)
    reserve.set_obj_track_times(False)  # The same data make the same bytes.
    pages, starts = _Pages(), {}
    with h5py.File(pages, "w", userblock_size=user_block, alignment_threshold=1, alignment_interval=_PAGE) as file:
        file.attrs["format"], file.attrs["version"] = "fedsim.packed", 2
        first = _first(parts)
        for name in sorted(parts, key=lambda name: name != first):
            part = parts[name]
            dtype, space = h5t.py_create(part.dtype, logical=True), h5s.create_simple(part.shape)
            dataset = h5d.create(file.id, name.encode(), dtype, space, reserve, make_groups)
            starts[name] = dataset.get_offset() if np.prod(part.shape) else 0
    return pages, starts


def _blocks(array: np.ndarray) -> Iterator[Any]:
    """An array's bytes, in blocks of rows: it may itself be a mapped file that is larger than memory."""
    rows = max(1, BLOCK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    for start in range(0, len(array) if array.size else 0, rows):
        yield np.ascontiguousarray(array[start : start + rows]).view(np.uint8).data


def _checksum(whole: np.ndarray, arrays: Mapping[str, Any]) -> int:
    """Of all bytes but the first line and the columns' content."""
    extents = sorted((array["start"], _nbytes(array)) for name, array in arrays.items() if name.startswith("columns/"))
    checksum, at = 0, _LINE
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
        raise ValueError("an array lies outside of the file")
    return whole[start : start + size].view(kind).reshape(shape)
