"""Extracts files from archives and compressed files as a stream; each is renamed to its final name when it is complete."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from fedsim.data import FormatError
from fedsim.durable_files import atomic_write

_BLOCK = 1 << 20
_OPENERS: dict[str, Callable[..., Any]] = {".lzma": lzma.open, ".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}
_DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError)


def unpack(archive: Path, members: Sequence[str]) -> None:
    """Extracts the files ``members`` into the folder of a tar archive, or decompresses a file to the one name in ``members``.

    Raises:
      ValueError: the archive is damaged, or lacks a member.
    """
    if ".tar" in archive.suffixes:
        extract(archive, members)
    else:
        (member,) = members
        decompress(archive, member)


def extract(archive: Path, members: Sequence[str]) -> None:
    """Extracts the files named ``members`` from a tar archive into its folder, whichever folder of the archive they are in.

    No other files are written.

    Raises:
      ValueError: the archive is damaged, or lacks a member.
    """
    missing = dict.fromkeys(members)
    with _errors_of(archive), tarfile.open(archive, "r:*") as tar:
        for entry in tar:
            name = entry.name.rpartition("/")[2]
            content = tar.extractfile(entry) if entry.isreg() and name in missing else None
            if content is None:
                continue
            with bar(f"extracting {name}", entry.size) as progress:
                _copy(content, archive.with_name(name), progress.update)
            del missing[name]
            if not missing:
                break
    if missing:
        raise ValueError(f"{archive} does not contain {' and '.join(missing)}: delete it to download it again.")


def decompress(archive: Path, name: str) -> None:
    """Decompresses ``archive`` (``.lzma``, ``.xz``, ``.bz2`` or ``.gz``) to the file ``name`` in the same folder.

    Raises:
      ValueError: the file is damaged.
    """
    size = archive.stat().st_size
    with (
        _errors_of(archive),
        open(archive, "rb") as raw,
        _OPENERS[archive.suffix](raw, "rb") as content,
        bar(f"decompressing {name}", size) as progress,
    ):
        _copy(content, archive.with_name(name), lambda _: progress.update(raw.tell() - progress.n))


def bar(label: str, total: int | None, start: int = 0) -> Any:
    """Returns a progress bar of bytes, which is shown in terminals only."""
    return tqdm(desc=label, total=total, initial=start, unit="B", unit_scale=True, disable=None, leave=False)


def _copy(content: IO[bytes], target: Path, advance: Callable[[int], Any]) -> None:
    with atomic_write(target) as part, open(part, "wb") as out:
        while block := content.read(_BLOCK):
            out.write(block)
            advance(len(block))


@contextlib.contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # Errors of the disk are not errors of the archive.
            raise
        reason = str(error).partition("\n")[0].rstrip(":.") or type(error).__name__
        raise ValueError(f"{archive} is damaged ({reason}): delete it to download it again.") from error


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Returns arrays of an ``.npz`` file.

    Raises:
      FormatError: the file is damaged, of another format, or lacks one of the arrays.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "people.npz"
    >>> np.savez(path, x=np.zeros([2, 3]), y=np.array([1, 0]))
    >>> [array.tolist() for array in read_arrays(path, "y")]
    [[1, 0]]
    """
    damage = (KeyError, ValueError, TypeError, AttributeError, MemoryError, NotImplementedError, zipfile.BadZipFile, *_DAMAGE)
    with open(path, "rb") as raw:
        try:
            with np.load(raw, allow_pickle=False) as file:
                return [file[name] for name in names]
        except damage as error:
            raise FormatError(
                f"{path} does not hold the arrays {', '.join(names)}: {error}. Download it again, or give another file."
            ) from None
