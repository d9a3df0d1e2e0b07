"""Files that a configuration names, together with a hash of their content, so that a run cannot go on with another content."""

from __future__ import annotations

from pathlib import Path

from fedsim.descriptions import hash_of
from fedsim.saved_arrays import FILES

_MARK = "#sha256="


def pinned(text: str) -> str:
    """Returns the absolute path of a file with a hash of its content, ``PATH#sha256=HASH``; a text with a hash as it is.

    The file may also be the folder of a checkpoint.

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
    return f"{path}{_MARK}{_hash(path)}"


def pinned_path(text: str) -> Path:
    """Returns the path of a file that `pinned` has named, if the file still has this content.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file has changed.
    """
    name, _, expected = text.partition(_MARK)
    path = Path(name)
    if (found := _hash(path)) != expected:
        raise ValueError(
            f"{path} has changed since the run was configured: its hash was {expected} and is {found}. Restore the file, or "
            "start a new run with the changed one."
        )
    return path


def _hash(path: Path) -> str:
    try:
        # A checkpoint has a list of the checksums of its files, by which they are verified when they are read.
        return hash_of((path / FILES if path.is_dir() else path).read_bytes())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"There is no file {path}, which the configuration of the run names.") from error
