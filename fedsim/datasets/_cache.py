"""The cache of downloaded files and converted populations.

Each dataset has one folder in the cache. It holds the downloaded files, and the populations converted from them as packed
files ``packed-<key>/<split>.h5``. The key is a digest of the dataset's version and options and of the source files' names,
sizes and times, so another option or another file leads to a new conversion. A packed file gets its final name when it is
complete.
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
except ImportError:  # Windows has no such locks, so two first runs at once may download twice there.
    fcntl = None  # type: ignore[assignment]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Returns ``cache``, or ``$FEDSIM_CACHE``, or the user's cache folder.

    >>> cache_folder("my/cache").as_posix()
    'my/cache'
    """
    if cache is None:
        cache = os.environ.get("FEDSIM_CACHE")
    if cache:
        return Path(cache).expanduser()
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):  # The second is for Windows.
        if os.environ.get(variable):
            return Path(os.environ[variable]) / "fedsim"
    return Path.home() / ".cache" / "fedsim"


def dataset_folder(name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of one dataset in the cache, which may not exist."""
    return cache_folder(cache) / re.sub(r"[^\w.-]+", "_", name).strip("_")


def is_cached(name: str, cache: str | os.PathLike[str] | None = None) -> bool:
    """Returns whether a dataset has been downloaded, so that it loads without a network.

    Args:
      name: name of the dataset, without options.
      cache: see `load`.

    >>> is_cached("emnist62", cache="/nowhere")
    False
    """
    folder = dataset_folder(name, cache)
    entries = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # Packed files do not count, because they may have been converted from the user's own files.
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
    """Writes the splits that ``streams`` yield to packed files, once, and opens these memory-mapped.

    If several processes do this at the same time, one converts and the others wait for it. A process that is killed leaves no
    file that a later one would take for complete.

    Args:
      name: name of the dataset, for progress bars and errors.
      cache: the dataset's folder in the cache; it is created if it does not exist.
      streams: split to a function that starts to read it.
      files: the files that are read. The conversion is repeated when their names, sizes or times change. A folder stands for
        all files in it.
      version: version of the conversion; increase it when ``streams`` yield something else from the same files.
      **options: everything else that the result depends on.

    Raises:
      OSError: the cache is full or cannot be written; no incomplete file is left.
      FormatError: raised by the streams.
    """
    key = json.dumps([version, fingerprint(files), options], sort_keys=True)
    folder = cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    paths = {split: folder / f"{split}.h5" for split in streams}
    if not all(path.is_file() for path in paths.values()):
        with _writing_for(name, folder), exclusive(folder / ".lock"):
            for split, path in paths.items():
                if not path.is_file():
                    streams[split]().save(path, progress=f"converting {name}, {split}")
    try:
        return {split: FederatedData.open(path) for split, path in paths.items()}
    except FormatError as error:
        raise FormatError(f"{error} It is in the cache: delete the folder {folder}.") from None


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock between processes, on a file whose folder is created; the system releases it if the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of files, and of all files in folders."""
    found = []
    for path in files:
        parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
        found += [(part.relative_to(path.parent).as_posix(), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    return sorted(set(found))


@contextlib.contextmanager
def _writing_for(name: str, folder: Path) -> Iterator[None]:
    """Adds a remedy to the error of a cache that is full or cannot be written."""
    try:
        yield
    except OSError as error:
        problem = "is full" if error.errno in _FULL else "cannot be written" if error.errno in _CLOSED else None
        if problem is None:
            raise
        message = f"{name!r} could not be converted: {folder} {problem} ({error.strerror})"
        raise OSError(error.errno, f"{message}. Free some space, or set FEDSIM_CACHE or cache= to another folder") from error
