"""Files that are complete or absent after a killed process or a power failure, and errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: the file of a killed process stays there until it is deleted by hand.
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".fedsim-part"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(OSError):
    """A file could not be written; ``filename`` is its path and ``strerror`` the reason."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `WriteError` with ``path`` in place of an ``OSError``, or of another library's error about a full disk.

    >>> with writing(Path("/nowhere/metrics.jsonl")):
    ...     open("/nowhere/metrics.jsonl", "a")
    Traceback (most recent call last):
    ...
    fedsim.durable_files.WriteError: [Errno 2] No such file or directory: '/nowhere/metrics.jsonl'
    """
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    except Exception as error:
        # tensorstore, by which orbax writes, raises ValueError with the system's text.
        reason = next((code for code in _FULL if os.strerror(code).lower() in str(error).lower()), None)
        if reason is None:
            raise
        raise WriteError(reason, os.strerror(reason), str(path)) from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary file in the folder of ``path`` that replaces ``path`` when the context ends without an error.

    The file is synchronized to disk before it is renamed, and its folder afterwards: after a power failure, ``path`` has the
    old or the new content. An error deletes the temporary file and leaves ``path`` unchanged. A killed process leaves a file
    ``*.fedsim-part``, which no reader accepts and which the next call in this folder deletes.

    Raises:
      FileNotFoundError: the folder does not exist.
      FileExistsError: ``path`` is a folder or a device, which must not be replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/a.txt") as part:
    ...         _ = part.write_text("some text")
    ...     os.listdir(folder)
    ['a.txt']
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"No folder {target.parent} to write {target.name} into: create it first.")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"{target} is a folder or a device: choose another name.")
    for leftover in target.parent.glob(f"*{_SUFFIX}"):
        _delete_if_abandoned(leftover)
    with _claimed(target) as part:
        yield part
        replace_durably(part, target)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file. After an error, a killed process or a power failure, it has the old content or the new one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> replace_text(path, "{}")
    >>> path.read_text()
    '{}'
    """
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        replace_durably(temporary, path)


def replace_durably(part: Path, target: Path) -> None:
    """Renames a file to ``target`` when its content is on the disk, and synchronizes the folder."""
    sync_file(part)
    os.replace(part, target)
    sync_folder(target.parent)


def sync_file(path: Path) -> None:
    """Synchronizes what was written to a file to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Synchronizes the names of the files in a folder to the disk, if the system can do that."""
    with contextlib.suppress(OSError):  # Windows and some network file systems cannot.
        entries = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entries)
        finally:
            os.close(entries)


def sync_files(folder: Path) -> None:
    """Synchronizes all files in a folder, and the names in it and its folders, to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif not path.name.startswith("."):  # Hidden files are the system's, and may vanish.
            sync_file(path)
    sync_folder(folder)


def is_full(error: OSError) -> bool:
    """Whether there was no space on the disk, or none left of a quota or limit."""
    return error.errno in _FULL


@contextlib.contextmanager
def _claimed(target: Path) -> Iterator[Path]:
    """Yields a new file that this process locks until the context ends."""
    while True:
        part = target.with_name(f"{target.name[:100]}.{secrets.token_hex(4)}{_SUFFIX}")
        claim = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(claim, fcntl.LOCK_EX)
                if not part.exists():  # Another process deleted it as abandoned before it was locked.
                    continue
            else:
                os.close(claim)
            yield part
            return
        finally:
            part.unlink(missing_ok=True)
            if fcntl is not None:
                os.close(claim)


def _delete_if_abandoned(part: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # The file is already deleted, locked, or owned by another user.
        claim = os.open(part, os.O_RDWR)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()
        finally:
            os.close(claim)
