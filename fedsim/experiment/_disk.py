"""Errors of writing a run's files: which file could not be written, and how to continue the run."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from fedsim.data._atomic_write import replace_durably, sync_file, sync_folder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(OSError):
    """A file of a run could not be written; ``filename`` is its path and ``strerror`` the reason."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `WriteError` with ``path`` in place of an ``OSError``, or of another library's error about a full disk.

    >>> with writing(Path("/nowhere/metrics.jsonl")):
    ...     open("/nowhere/metrics.jsonl", "a")
    Traceback (most recent call last):
    ...
    fedsim.experiment._disk.WriteError: [Errno 2] No such file or directory: '/nowhere/metrics.jsonl'
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


def replace_text(path: Path, text: str) -> None:
    """Writes a file of a run. After an error, a killed process or a power failure, it has the old content or the new one.

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


def sync_files(folder: Path) -> None:
    """Synchronizes all files in a folder, and the names in it and its folders, to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(folder)


def is_full(error: OSError) -> bool:
    """Whether there was no space on the disk, or none left of a quota or limit."""
    return error.errno in _FULL


def explained(error: OSError, saved: int, command: str) -> OSError:
    """An error with a message that names the file, the last saved round, and how to continue.

    Args:
      error: from `writing`, or with a message that names the file.
      saved: the round of the newest checkpoint; 0 if there is none.
      command: what continues the run.

    >>> explained(WriteError(errno.ENOSPC, "No space left on device", "r/metrics.jsonl"), 40, "fedsim resume r")
    OSError('Cannot write r/metrics.jsonl: No space left on device. Free disk space, then continue after round 40 with: \
fedsim resume r')
    """
    reason = f"Cannot write {error.filename}: {error.strerror}." if isinstance(error, WriteError) else str(error.strerror)
    remedy = "Free disk space" if is_full(error) else "Make the file writable"
    return OSError(f"{reason} {remedy}, then continue {f'after round {saved}' if saved else 'from the start'} with: {command}")
