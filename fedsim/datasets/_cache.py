"""The cache: where fetched files are kept, and populations once they are converted.

A dataset has one folder in it. Beside the files that were fetched, ``packed-<key>/<split>.h5`` are the packed populations that
were made of them; the key is a digest of the dataset's version and options and of the source files' names, sizes and times, so
that another option, or another file, is converted anew. A packed file takes its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.data import ClientStream, FederatedData, FormatError

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, two first runs at once may fetch twice.
    fcntl = None  # type: ignore[assignment]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """``cache``, or ``$FEDSIM_CACHE``, or the user's own cache folder."""
    if cache is None:
        cache = os.environ.get("FEDSIM_CACHE")
    if cache:
        return Path(cache).expanduser()
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):  # The second is Windows' own.
        if os.environ.get(variable):
            return Path(os.environ[variable]) / "fedsim"
    return Path.home() / ".cache" / "fedsim"


def dataset_folder(name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of one dataset in the cache; it may not exist."""
    return cache_folder(cache) / re.sub(r"[^\w.-]+", "_", name).strip("_")


def is_cached(name: str, cache: str | os.PathLike[str] | None = None) -> bool:
    """Whether a dataset has been fetched, so that it loads without network.

    Args:
      name: the dataset's, without options.
      cache: see `load`.

    >>> is_cached("emnist62", cache="/nowhere")
    False
    """
    folder = dataset_folder(name, cache)
    entries = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # What was converted may be of a user's own files.
    return any(not name.startswith((".", "packed-")) and not name.endswith("part") for name in entries)


def converted(
    name: str,
    cache: Path,
    streams: Mapping[str, Callable[[], ClientStream]],
    *,
    files: Iterable[Path],
    version: int = 1,
    **options: Any,
) -> dict[str, FederatedData]:
    """The splits that ``streams`` yield, written as packed files once, and memory-mapped from then on.

    Of several processes at once, one converts and the others wait for it. One that is killed leaves nothing that the next
    would take for whole.

    Args:
      name: the dataset's, for progress bars and errors.
      cache: its folder in the cache, made if need be.
      streams: split to what starts reading it.
      files: what is read; converted again when their names, sizes or times change. A folder stands for what is in it.
      version: of the conversion: raise it when ``streams`` yields something else from the same files.
      **options: what else the result depends on.

    Raises:
      OSError: the cache is full, or cannot be written; nothing half-written is left.
      FormatError: as the streams do.
    """
    key = json.dumps([version, fingerprint(files), options], sort_keys=True)
    folder = cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    paths = {split: folder / f"{split}.h5" for split in streams}
    if not all(path.is_file() for path in paths.values()):
        with _writing_for(name, folder), only_one(folder / ".lock"):
            for split, path in paths.items():
                if not path.is_file():
                    streams[split]().save(path, progress=f"converting {name}, {split}")
    try:
        return {split: FederatedData.open(path) for split, path in paths.items()}
    except FormatError as error:
        raise FormatError(f"{error} It is in the cache: delete the folder {folder}.") from None


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Holds a lock between processes, in a file whose folder is made; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files, and of what is in folders."""
    found = []
    for path in files:
        parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
        found += [(part.relative_to(path.parent).as_posix(), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    return sorted(set(found))


@contextlib.contextmanager
def _writing_for(name: str, folder: Path) -> Iterator[None]:
    """Says of a full or closed cache what to do about it."""
    try:
        yield
    except OSError as error:
        trouble = "is full" if error.errno in _FULL else "cannot be written" if error.errno in _CLOSED else None
        if trouble is None:
            raise
        message = f"{name!r} could not be converted: {folder} {trouble} ({error.strerror}). Free some room, or set FEDSIM_CACHE"
        raise OSError(error.errno, f"{message} or cache= to another folder") from error
