"""The cache: where fetched and converted files are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedsim.names import parse_call


def dataset_folder(name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of one dataset in the cache (which is ``$FEDSIM_CACHE`` by default); it may not exist."""
    name, _ = parse_call(name)
    return cache_folder(cache) / re.sub(r"[^\w.-]+", "_", name).strip("_")


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
