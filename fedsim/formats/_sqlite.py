"""Reading and writing SQLite files, including compressed and damaged ones."""

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
from fedsim.durable_files import atomic_write
from fedsim.formats._source import DAMAGE_ERRORS, MAX_CLIENT_BYTES, StrPath, check_exists, locating_errors

HEADER = b"SQLite format 3\0"
_LZMA_MEMORY = 1 << 28  # because the header of an archive may require a dictionary of gigabytes
_PIECE = 1 << 20


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a file read-only, with SQLite's checks for damaged files; errors of SQLite become `FormatError`."""
    with locating_errors("", sqlite3.Error, sqlite3.Warning, UnicodeDecodeError, OverflowError):
        with path.open("rb") as file:
            if file.read(len(HEADER)) != HEADER:
                raise FormatError("not a SQLite file, by its first bytes")
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CLIENT_BYTES)
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
                connection.execute(f"PRAGMA {pragma}")
            yield connection


def check_table(connection: sqlite3.Connection, table: str, names: list[str], origin: str) -> None:
    """Raises `FormatError` unless ``table`` has these columns."""
    columns = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
    if not set(names) <= set(columns):
        raise FormatError(f"Expected {origin}'s table {table}({', '.join(names)}), found columns {columns}.")


def text(value: Any, what: str) -> str:
    """Returns a client id or another name from a table, which may be text or UTF-8 bytes."""
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
    """Opens a connection to a new file after running ``statements``; ``path`` is created when the block ends without error.

    Raises:
      OSError: the disk is full.
    """
    with atomic_write(path) as temporary, contextlib.closing(sqlite3.connect(temporary)) as connection:
        try:
            # An incomplete file is deleted, so SQLite needs no journal.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            for statement in statements:
                connection.execute(statement)
            yield connection
            connection.commit()
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(code, f"The file could not be written ({error})", os.fspath(path)) from error


class Database:
    """A SQLite file that can be opened repeatedly. A compressed file is decompressed to a temporary file once.

    The temporary file is deleted together with this object.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = self.source = check_exists(path)
        with self.path.open("rb") as file:
            head = file.read(6)
            if head == b"\xfd7zXZ\0" or head[:3] == b"]\0\0":
                file.seek(0)
                handle, name = tempfile.mkstemp(suffix=".sqlite")
                remove = weakref.finalize(self, _remove, name)
                self.path = Path(name)
                try:
                    with locating_errors(os.fspath(path), *DAMAGE_ERRORS), os.fdopen(handle, "wb") as target:
                        decompress(file, target)
                except BaseException:
                    remove()  # now, because whoever keeps the error keeps this object, too
                    raise

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Opens a connection; see `reading`."""
        return reading(self.path)


def _remove(name: str, unlink: Callable[[str], None] = os.unlink) -> None:
    with contextlib.suppress(OSError):
        unlink(name)


def decompress(source: IO[bytes], target: IO[bytes]) -> None:
    """Decompresses an ``.lzma`` or ``.xz`` stream, piece by piece."""
    decompressor = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    while not decompressor.eof:
        piece = source.read(_PIECE) if decompressor.needs_input else b""
        if decompressor.needs_input and not piece:
            raise EOFError("the archive ends too early")
        target.write(decompressor.decompress(piece, _PIECE))
