"""Functions that readers and writers share: opening files, error messages, and conversion of values to columns."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedsim.data import ClientDataset, ClientStream, FormatError

StrPath = str | os.PathLike[str]
Columns = Mapping[str, np.ndarray]
# The names of the features to read, or their (shape, dtype) by name; None: all features, unchanged.
Spec = Mapping[str, tuple[tuple[int, ...], Any]]
Features = Sequence[str] | Spec | None
Clients = Iterable[ClientDataset]  # the argument of writers: a FederatedData or a ClientStream

# The limit on the decompressed bytes of one client, and on one line of text. The header of a damaged or malicious file may
# state any length, but not more than this is ever allocated. The largest client of Stack Overflow has a fifth of it.
MAX_CLIENT_BYTES = 1 << 28
_PIECE = 1 << 20


@contextlib.contextmanager
def locating_errors(where: str, *damage: type[Exception]) -> Iterator[None]:
    """Prepends ``where`` to a `FormatError` in the block, and converts the exceptions in ``damage`` to `FormatError`."""
    prefix = f"{where}: " if where else ""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{prefix}{error}") from error.__cause__
    except damage as error:
        reason = str(error) or type(error).__name__
        raise FormatError(f"{prefix}truncated or damaged, download or write it again ({reason})") from error


def check_exists(path: StrPath, *, folder: bool = False) -> Path:
    """Returns ``path`` if it is a readable file or, with ``folder``, a folder; raises an error otherwise."""
    source = Path(path)
    if source.is_dir():
        if folder:
            return source
        raise FormatError(f"{source} is a folder: give a file.")
    if not source.exists():
        raise FileNotFoundError(f"There is no file {source}.")
    with source.open("rb"):  # Raises an error if the file is unreadable.
        return source


def suffix_of(path: StrPath) -> str:
    """Returns the suffix that says the format of a file: the last one, or that before ``.gz``."""
    source = Path(path)
    return source.with_suffix("").suffix if source.suffix == ".gz" else source.suffix


def stream(
    path: StrPath, read: Callable[[], Iterator[tuple[str, Columns | None]]], num_clients: int | None = None
) -> ClientStream:
    """Returns a stream of the clients that ``read`` yields; ``read`` may yield None as the columns of an empty client.

    Such a client gets empty columns like those of the first client with examples, so it is delayed until that client is read.
    """

    def filled() -> Iterator[tuple[str, Columns]]:
        blank: Columns | None = None
        waiting: list[str] = []
        for client_id, columns in read():
            if columns is not None and blank is None:
                blank = {name: array[:0] for name, array in columns.items()}
                yield from ((empty, blank) for empty in waiting)
            if blank is None:
                waiting.append(client_id)
            else:
                yield client_id, blank if columns is None else columns
        if blank is None:
            raise FormatError(f"none of the {len(waiting)} clients has examples, so the features are unknown.")

    return ClientStream(filled, num_clients, path)


def choose_split(path: StrPath, names: list[str], split: str | None) -> str:
    """Returns ``split`` if it is one of ``names``; None stands for the only one of them."""
    if not names:
        raise FormatError(f"{os.fspath(path)}: the file has no splits, so it has no clients.")
    if split is None and len(names) == 1:
        return names[0]
    if split is None or split not in names:
        raise FormatError(f"Expected split= one of {sorted(names)}, the splits of {os.fspath(path)}; got split={split!r}.")
    return split


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file, and decompresses it while it is read if its first bytes are those of gzip, xz or lzma."""
    with path.open("rb") as raw:
        head = raw.read(6)
        raw.seek(0)
        if head[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        elif head == b"\xfd7zXZ\0" or head[:3] == b"]\0\0":
            with lzma.LZMAFile(raw) as file:
                yield file
        else:
            yield raw


# The exceptions of `open_decompressed` for damaged bytes.
DAMAGE_ERRORS: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, UnicodeDecodeError)


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """Reads the next ``count`` bytes in pieces, so a damaged header with a wrong length allocates no memory."""
    pieces = []
    while count:
        piece = file.read(min(count, _PIECE))
        if not piece:
            raise EOFError(f"{count} bytes are missing")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def column(name: str, values: list[Any], floats: Any = np.float32) -> np.ndarray:
    """Converts parsed values, one per example, to a column: ``int64``, ``floats`` or bool ``[n, ...]``, or text ``[n]``.

    Raises:
      FormatError: text and numbers are mixed; text is not UTF-8; rows have different shapes; a value is missing; an integer
        needs more than 64 bits.
    """
    if any(isinstance(value, str) for value in values):
        wrong = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
        if wrong is not None:
            raise FormatError(
                f"Feature {name!r} is text in some examples, but {abbreviated(values[wrong])} in example {wrong}."
            )
        try:
            return texts([value.encode() for value in values])
        except UnicodeEncodeError as error:
            raise FormatError(f"Feature {name!r} has text that is not UTF-8: {abbreviated(error.object)}.") from None
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if array.dtype.kind == "b" or array.dtype.kind == "i":
        return array
    if array.dtype.kind == "f":
        return array.astype(floats, copy=False)
    example = next((i for i, value in enumerate(values) if _kind(value) != _kind(values[0])), len(values) - 1)
    raise FormatError(
        f"Feature {name!r} is {abbreviated(values[0])} in example 0 and {abbreviated(values[example])} in example {example}: "
        "expected numbers of one shape (integers of at most 64 bits), or text."
    )


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list):
        return "list", len(value), *(sorted({_kind(each) for each in value}, key=repr))
    return ("number",) if isinstance(value, (int, float)) else (type(value).__name__,)


def abbreviated(value: Any, length: int = 60) -> str:
    """Returns ``repr(value)``, cut to ``length`` characters, because the value of a damaged file may be of any size."""
    text = repr(value) if not isinstance(value, (str, bytes, list)) else repr(value[:length])
    return text if len(text) <= length else f"{text[:length]}..."


def texts(values: list[bytes]) -> np.ndarray:
    """Returns byte strings as a feature, an object array ``[n]``."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def writable_columns(client: ClientDataset, kinds: str = "biuf") -> Columns:
    """Returns a client's columns for a writer: numbers in this machine's byte order, and text as object arrays of bytes.

    Args:
      client: the client.
      kinds: the kinds of numbers that the format supports, as in ``np.dtype.kind``.

    Raises:
      ValueError: the format does not support a column. The message names the client and the feature.
    """
    columns = {}
    for name, array in client.examples.items():
        array = np.asarray(array)
        if array.dtype.kind in "SU" and array.ndim == 1:
            array = texts([each if isinstance(each, bytes) else each.encode() for each in array.tolist()])
        is_text = array.dtype.kind == "O" and array.ndim == 1
        if not is_text and (array.dtype.kind not in kinds or (array.dtype.kind == "f" and array.dtype.itemsize > 8)):
            raise ValueError(
                f"Feature {name!r} of client {client.client_id!r} is {array.dtype} {list(array.shape[1:])} per example, which "
                "this format does not support: convert it first, or leave it out."
            )
        columns[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return columns


def decoded(client_id: str, name: str, rows: np.ndarray) -> list[str]:
    """Decodes text for a format that supports only UTF-8.

    Raises:
      ValueError: the text is not UTF-8. The message names the client and the feature.
    """
    try:
        return [row.decode() for row in rows]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Text {name!r} of client {client_id!r} is not UTF-8, as this format requires: {abbreviated(error.object)}."
        ) from None


def selected(columns: Columns, features: Features) -> Columns:
    """Returns the requested columns of a client, cast to the requested shapes and dtypes.

    Raises:
      FormatError: a column is missing, or cannot be cast; see `cast`.
    """
    if features is None:
        return columns
    missing = [name for name in features if name not in columns]
    if missing:
        raise FormatError(f"Feature {missing[0]!r} is missing: the features are {sorted(columns)}.")
    if isinstance(features, Mapping):
        return {name: cast(name, columns[name], *spec) for name, spec in features.items()}
    return {name: columns[name] for name in features}


def cast(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Converts ``array [n, ...]`` to ``dtype [n, *shape]``.

    Raises:
      FormatError: the number of values per example differs; text is requested as numbers, or numbers as text; ``dtype`` cannot
        represent the values.
    """
    wanted = np.dtype(dtype)
    if (wanted.kind in "OS") != (array.dtype.kind == "O"):
        raise FormatError(f"Feature {name!r} is {array.dtype}, not {wanted}: correct its dtype in features=.")
    if int(np.prod(array.shape[1:])) != int(np.prod(shape)):
        raise FormatError(
            f"Feature {name!r} has {list(array.shape[1:])} values per example, not {list(shape)}: correct its shape in "
            "features=."
        )
    array = array.reshape(len(array), *shape)
    if wanted.kind in "OS":
        return array
    if wanted.kind in "iub" and array.size:
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        if not (low <= array.min() and array.max() <= high) or (array.dtype.kind == "f" and (array % 1).any()):
            raise FormatError(
                f"Feature {name!r} has values from {array.min()} to {array.max()}, which {wanted} cannot represent: "
                "give another dtype in features=."
            )
    return array.astype(wanted, copy=False)
