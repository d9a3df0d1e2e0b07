"""SQLite files: opened read-only and doubted; written under another name until whole; decompressed to be read."""

from __future__ import annotations

import contextlib
import errno
import lzma
import os
import sqlite3
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from fedsim.data import FormatError
from fedsim.data._atomic_write import atomic_write
from fedsim.formats._source import DAMAGE, MAX_CLIENT_BYTES, StrPath, existing, located

HEADER = b"SQLite format 3\0"
_LZMA_MEMORY = 1 << 28  # an archive's header may ask for gigabytes of dictionary
_PIECE = 1 << 20


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that changes nothing and believes little; every error of SQLite's becomes `FormatError`."""
    with located("", sqlite3.Error, sqlite3.Warning, UnicodeDecodeError, OverflowError):
        with path.open("rb") as file:
            if file.read(len(HEADER)) != HEADER:
                raise FormatError("not a SQLite file: its first bytes are others")
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CLIENT_BYTES)
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
                connection.execute(f"PRAGMA {pragma}")
            yield connection


def require(connection: sqlite3.Connection, table: str, names: list[str], origin: str) -> None:
    """Raises `FormatError` unless ``table`` has these columns."""
    there = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
    if not set(names) <= set(there):
        raise FormatError(f"Expected {origin}'s table {table}({', '.join(names)}), found columns {there}.")


def text(value: Any, what: str) -> str:
    """A client id or name out of a table: text, or the UTF-8 of bytes."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{what} {value[:40]!r} is not UTF-8: rename it.") from None
    if not isinstance(value, str):
        raise FormatError(f"{what} is {value!r}: expected text.")
    return value


@contextlib.contextmanager
def writing(path: StrPath, *statements: str) -> Iterator[sqlite3.Connection]:
    """A connection to a new file with these tables, which takes its name once the block ends well.

    Raises:
      OSError: the disk is full.
    """
    with atomic_write(path) as part, contextlib.closing(sqlite3.connect(part)) as connection:
        try:
            # The file is thrown away unless it is whole, so SQLite need not keep a journal of its own.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            for statement in statements:
                connection.execute(statement)
            yield connection
            connection.commit()
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(code, f"{error}: it could not be written", os.fspath(path)) from error


class Database:
    """A SQLite file to open as often as is liked: itself, or decompressed beside, which goes when this object goes."""

    def __init__(self, path: StrPath) -> None:
        self.path = self.source = existing(path)
        with self.path.open("rb") as file:
            head = file.read(6)
            if head == b"\xfd7zXZ\0" or head[:3] == b"]\0\0":
                file.seek(0)
                handle, name = tempfile.mkstemp(suffix=".sqlite")
                weakref.finalize(self, _remove, name)
                self.path = Path(name)
                with located(os.fspath(path), *DAMAGE), os.fdopen(handle, "wb") as target:
                    decompress(file, target)

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A connection; see `reading`."""
        return reading(self.path)


def _remove(name: str, unlink: Callable[[str], None] = os.unlink) -> None:
    with contextlib.suppress(OSError):
        unlink(name)


def decompress(source: IO[bytes], target: IO[bytes]) -> None:
    """Copies an ``.lzma`` or ``.xz`` stream, decompressed piece by piece."""
    decompressor = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    while not decompressor.eof:
        piece = source.read(_PIECE) if decompressor.needs_input else b""
        if decompressor.needs_input and not piece:
            raise EOFError("the archive ends too early")
        target.write(decompressor.decompress(piece, _PIECE))
