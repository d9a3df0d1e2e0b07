"""The packed file: HDF5 for everybody, and readable here without HDF5.

The file is HDF5 behind a user block: contiguous datasets ``/offsets`` (int64 [clients + 1]), ``/client_ids`` (fixed-length
UTF-8) and under ``/columns`` one array a feature, each on a page of its own; a text column is a group of ``bytes`` (uint8) and
``starts`` (int64 [rows + 1]). The user block says where every array lies, and holds a checksum of all that is not a
column's content. So a file is opened by mapping it, and its structure is known to be whole before anything trusts it: libhdf5
never parses what may be damaged, for it can crash on that.
"""

from __future__ import annotations

import collections
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

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


class Part(NamedTuple):
    """One array of the file: ``[shape] dtype``, and its content as blocks of bytes, in order."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Iterable[Any]

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
    """Writes a packed file over ``target``; see `write_packed`. What lies in the place of a column without blocks stays."""
    _check(columns)
    parts = {"offsets": Part.of(offsets), "client_ids": Part.of(names), **columns}
    pages, starts = _structure(parts, _user_block(columns))
    layout = json.dumps(_layout(parts, starts, pages.size)).encode()
    with open(target, "r+b") as file:
        for page, content in pages.pages.items():
            file.seek(page * _PAGE)
            file.write(content)
        file.truncate(pages.size)  # The last page may be a part of one.
        for name, part in parts.items():
            file.seek(starts[name])
            for block in part.blocks:
                file.write(block)
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
    longest = json.dumps(_layout(parts, dict.fromkeys(parts, most), most))
    return max(_PAGE, 1 << (len(longest) + _LINE - 1).bit_length())


def open_packed(path: StrPath, build: Callable[..., T]) -> T:
    """Opens a packed file with its columns memory-mapped, and returns ``build(columns, offsets, client_ids)``."""
    if os.path.isdir(path):
        raise FormatError(f"{os.fspath(path)} is a folder: give a packed file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"No file {os.fspath(path)}.")
    try:
        with open(path, "rb") as file:
            whole = np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else np.zeros(0, np.uint8)
            return _open(whole, build)
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)} {error}") from None


def _open(whole: np.ndarray, build: Callable[..., T]) -> T:
    head = whole[:_LINE].tobytes()
    if not head.startswith(MAGIC):
        other = "is HDF5 of another layout (fedsim.formats.read_tff_hdf5 reads TFF's)" if head.startswith(_HDF5) else ""
        raise FormatError(
            f"({len(whole)} bytes) {other or 'is of another format, or damaged'}: expected a packed population, which "
            "FederatedData.save writes."
        )
    damaged = FormatError("is truncated or damaged: fetch or write it again.")
    try:
        length, checksum = (int(word, 16) for word in head[len(MAGIC) :].split(b"\n")[0].split())
        layout = json.loads(whole[_LINE : _LINE + length].tobytes())
        arrays = layout["arrays"]
        if len(whole) != layout["bytes"] or _checksum(whole, arrays) != checksum:
            raise damaged
        found = {name: _map(whole, **array) for name, array in arrays.items()}
        columns: dict[str, Any] = {}
        for name in found:
            kind, _, feature = name.partition("/")
            if kind == "columns" and feature.endswith("/bytes"):
                feature = feature.removesuffix("/bytes")
                columns[feature] = TextColumn(found[name], np.asarray(found[f"columns/{feature}/starts"]))
            elif kind == "columns" and "/" not in feature:
                columns[feature] = found[name]
        return build(columns, found["offsets"], ClientIds(np.asarray(found["client_ids"])))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged from error


def _layout(parts: Mapping[str, Part], starts: Mapping[str, int], size: int) -> dict[str, Any]:
    arrays = {name: {"dtype": part.dtype.str, "shape": list(part.shape), "start": starts[name]} for name, part in parts.items()}
    return {"bytes": size, "arrays": arrays}


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
