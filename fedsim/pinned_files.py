"""Names of files together with a hash of their content, so that a run cannot go on with another content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedsim.saved_arrays import FILES

_MARK = "#sha256="


def pinned(text: str, *, folder: bool = False) -> str:
    """Returns the absolute path of a file with a hash of its content, ``PATH#sha256=HASH``; a text with a hash as it is.

    The file may also be the folder of a checkpoint or, with ``folder``, one of data, whose hash is that of all of its files.

    Raises:
      FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "faults.json"
    >>> _ = path.write_text("{}")
    >>> pinned(str(path)).removeprefix(str(path.resolve()))
    '#sha256=44136fa355b3678a'
    """
    if _MARK in text:
        return text
    path = Path(text).expanduser().resolve()
    if path.is_dir() and not folder and not (path / FILES).is_file():
        raise FileNotFoundError(f"Expected a file, and {path} is a folder: name a file in it.")
    return f"{path}{_MARK}{_hash(path)}"


def pinned_path(text: str) -> Path:
    """Returns the path of a file that `pinned` has named, if the file still has this content.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file has changed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "faults.json"
    >>> _ = path.write_text("{}")
    >>> text = pinned(str(path))
    >>> _ = path.write_text("[]")
    >>> pinned_path(text)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ...faults.json has changed since the run was configured: its hash was 44136fa355b3678a and is ...
    """
    path, expected = unpinned(text), text.partition(_MARK)[2]
    if (found := _hash(path)) != expected:
        raise ValueError(
            f"{path} has changed since the run was configured: its hash was {expected} and is {found}. Restore the file, or "
            "start a new run with the changed one."
        )
    return path


def is_pinned(text: str) -> bool:
    """Returns whether a text is one that `pinned` has returned.

    >>> is_pinned("a.csv"), is_pinned("/a.csv#sha256=44136fa355b3678a")
    (False, True)
    """
    return _MARK in text


def unpinned(text: str) -> Path:
    """Returns the path of a file with or without a hash, which is not compared.

    >>> unpinned("/a.csv#sha256=44136fa355b3678a").as_posix(), unpinned("/a.csv").as_posix()
    ('/a.csv', '/a.csv')
    """
    return Path(text.partition(_MARK)[0]).expanduser()


def _hash(path: Path) -> str:
    try:
        if path.is_dir() and not (path / FILES).is_file():
            return _hash_of_folder(path)
        # A checkpoint has a list of the checksums of its files, by which they are verified when they are read.
        return _hash_of_file(path / FILES if path.is_dir() else path)[:16]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no file {path}, which the configuration of the run names: correct the path."
        ) from error


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of_folder(folder: Path) -> str:
    """The hash of the names and contents of all files that are not hidden."""
    whole = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(files):
        if not any(part.startswith(".") for part in name.split("/")):
            whole.update(f"{_hash_of_file(files[name])} {name}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()[:16]
