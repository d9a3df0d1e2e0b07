"""A file that takes its name only once it is whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves there stays until somebody deletes it.
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".fedsim-part"


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a name beside ``path`` to write to; afterwards the file is brought to disk and takes the place of ``path``.

    After an error nothing is left. A killed process leaves a file ``*.fedsim-part``, which nobody takes for whole and which
    the next call in this folder deletes.

    Raises:
      FileNotFoundError: the folder does not exist.
      FileExistsError: ``path`` is a folder or a device, which no file may take the place of.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(f"{folder}/a.txt") as part:
    ...         _ = part.write_text("all of it")
    ...     os.listdir(folder)
    ['a.txt']
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"No folder {target.parent} to write {target.name} into: create it first.")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"{target} is a folder or a device: give the name of a file.")
    for leftover in target.parent.glob(f"*{_SUFFIX}"):
        _delete_if_abandoned(leftover)
    with _claimed(target) as part:
        yield part
        with open(part, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(part, target)


@contextlib.contextmanager
def _claimed(target: Path) -> Iterator[Path]:
    """A new file that is locked for as long as this process works on it."""
    while True:
        part = target.with_name(f"{target.name[:100]}.{secrets.token_hex(4)}{_SUFFIX}")
        claim = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(claim, fcntl.LOCK_EX)
                if not part.exists():  # Another process took it for abandoned before it was locked.
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
    with contextlib.suppress(OSError):  # It is gone by now, or locked, or another user's.
        claim = os.open(part, os.O_RDWR)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()
        finally:
            os.close(claim)
