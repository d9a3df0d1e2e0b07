"""What every reader and writer of a format shares: how a file is opened, decompressed, and blamed; columns from parsed text."""

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
# Names of the features to read, or of each its (shape, dtype); None: all, as they are.
Spec = Mapping[str, tuple[tuple[int, ...], Any]]
Features = Sequence[str] | Spec | None
Clients = Iterable[ClientDataset]  # what writers take: a FederatedData or a ClientStream

# The most bytes that one client may hold when decompressed or in one line of text. A damaged or hostile file may claim
# any length; nothing beyond this is ever allocated for it. The largest client of Stack Overflow is a fifth of it.
MAX_CLIENT_BYTES = 1 << 28
_PIECE = 1 << 20


@contextlib.contextmanager
def located(where: str, *damage: type[Exception]) -> Iterator[None]:
    """Errors of bad content inside become `FormatError`, each ``located`` around them adding where it happened."""
    place = f"{where}: " if where else ""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{place}{error}") from error.__cause__
    except damage as error:
        said = str(error) or type(error).__name__
        raise FormatError(f"{place}truncated or damaged, fetch or write it again ({said})") from error


def existing(path: StrPath, *, folder: bool = False) -> Path:
    """``path``, if a file is there that may be read (or a folder, where that is as good)."""
    found = Path(path)
    if found.is_dir():
        if folder:
            return found
        raise FormatError(f"{found} is a folder: give a file.")
    if not found.exists():
        raise FileNotFoundError(f"No file {found}.")
    with found.open("rb"):  # An unreadable file says so itself.
        return found


def stream(
    path: StrPath, read: Callable[[], Iterator[tuple[str, Columns | None]]], num_clients: int | None = None
) -> ClientStream:
    """The clients that ``read`` yields, where ``None`` stands for one without examples, of which no column is known.

    Such a client gets empty columns like those of the first client with examples, which it waits for.
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
            raise FormatError(f"None of its {len(waiting)} clients has an example: nothing says what the features are.")

    return ClientStream(filled, num_clients, path)


def only_split(path: StrPath, names: list[str], split: str | None) -> str:
    """``split`` if it is one of ``names``; by default the only one there is."""
    if not names:
        raise FormatError(f"{os.fspath(path)}: no split, hence no clients.")
    if split is None and len(names) == 1:
        return names[0]
    if split is None or split not in names:
        raise FormatError(f"Expected split= one of {sorted(names)}, those of {os.fspath(path)}; got split={split!r}.")
    return split


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed as they are read if its first bytes say gzip, xz or lzma."""
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


# What reading from `opened` raises for damaged bytes.
DAMAGE: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, UnicodeDecodeError)


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """The next ``count`` bytes. Memory grows with what is there, not with what a damaged header claims."""
    pieces = []
    while count:
        piece = file.read(min(count, _PIECE))
        if not piece:
            raise EOFError(f"{count} bytes are missing")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def column(name: str, values: list[Any]) -> np.ndarray:
    """One feature from parsed text, a value per example: ``int64``, ``float32`` or bool ``[n, ...]``, or text ``[n]``.

    Raises:
      FormatError: texts among numbers or not UTF-8, rows of different shapes, missing values, integers beyond 64 bits.
    """
    if any(isinstance(value, str) for value in values):
        wrong = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
        if wrong is not None:
            raise FormatError(f"Feature {name!r} is text, and in example {wrong} it is {shortened(values[wrong])}.")
        try:
            return texts([value.encode() for value in values])
        except UnicodeEncodeError as error:
            raise FormatError(f"Feature {name!r} has text that is not UTF-8, {shortened(error.object)}.") from None
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if array.dtype.kind == "b" or array.dtype.kind == "i":
        return array
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    example = next((i for i, value in enumerate(values) if _kind(value) != _kind(values[0])), len(values) - 1)
    raise FormatError(
        f"Feature {name!r} is {shortened(values[0])} in example 0 and {shortened(values[example])} in example {example}: "
        "expected numbers of one shape (integers of 64 bits), or texts."
    )


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list):
        return "list", len(value), *(sorted({_kind(each) for each in value}, key=repr))
    return ("number",) if isinstance(value, (int, float)) else (type(value).__name__,)


def shortened(value: Any, length: int = 60) -> str:
    """``repr(value)``, cut: a damaged file may put anything there."""
    text = repr(value) if not isinstance(value, (str, bytes, list)) else repr(value[:length])
    return text if len(text) <= length else f"{text[:length]}..."


def texts(values: list[bytes]) -> np.ndarray:
    """Byte strings as a feature: an object array ``[n]``."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def held(client: ClientDataset, kinds: str = "biuf") -> Columns:
    """A client's columns as writers take them: numbers in this machine's byte order, text as objects.

    Args:
      client: its name and examples.
      kinds: those of numbers that the format holds, as ``np.dtype.kind`` has them.

    Raises:
      ValueError: a column that the format cannot hold; it names the client and the feature.
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
                "this format cannot hold: convert it first, or leave it out."
            )
        columns[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return columns


def decoded(client_id: str, name: str, rows: np.ndarray) -> list[str]:
    """Text for a format that holds nothing but UTF-8.

    Raises:
      ValueError: something else; it names the client and the feature.
    """
    try:
        return [row.decode() for row in rows]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Text {name!r} of client {client_id!r} is not UTF-8, which this format must be: {shortened(error.object)}."
        ) from None


def selected(columns: Columns, features: Features) -> Columns:
    """Those of a client's columns that are wanted, as they are wanted.

    Raises:
      FormatError: one is missing; see `cast`.
    """
    if features is None:
        return columns
    missing = [name for name in features if name not in columns]
    if missing:
        raise FormatError(f"Feature {missing[0]!r} is missing: there are {sorted(columns)}.")
    if isinstance(features, Mapping):
        return {name: cast(name, columns[name], *how) for name, how in features.items()}
    return {name: columns[name] for name in features}


def cast(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """``array [n, ...]`` as ``dtype [n, *shape]``.

    Raises:
      FormatError: another number of values per example; text for numbers or the reverse; integers that do not fit.
    """
    wanted = np.dtype(dtype)
    if (wanted.kind in "OS") != (array.dtype.kind == "O"):
        raise FormatError(f"Feature {name!r} holds {array.dtype} and not {wanted}: correct its dtype in features=.")
    if int(np.prod(array.shape[1:])) != int(np.prod(shape)):
        raise FormatError(f"Feature {name!r} has {list(array.shape[1:])} values per example and not {list(shape)}.")
    array = array.reshape(len(array), *shape)
    if wanted.kind in "OS":
        return array
    if wanted.kind in "iub" and array.size:
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        if not (low <= array.min() and array.max() <= high) or (array.dtype.kind == "f" and (array % 1).any()):
            raise FormatError(f"Feature {name!r} spans {array.min()} to {array.max()}, which {wanted} cannot hold.")
    return array.astype(wanted, copy=False)
