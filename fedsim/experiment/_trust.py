"""Whether a run folder's configuration may name code: only if this user wrote it, or says that it can be trusted."""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.datasets._cache import cache_folder
from fedsim.names import parse_call

# The fields of `RunConfig` that may name Python code as FILE.py:NAME or MODULE:NAME.
CODE_FIELDS = (
    "dataset", "model", "algorithm", "aggregator", "compressor", "downlink", "attack", "synchronization", "client_devices",
    "download_rate", "upload_rate",
)  # fmt: skip
_BUILT_IN = "tfds:"  # a dataset of TensorFlow Datasets, and no module


def named_code(config: Mapping[str, Any], fields: Iterable[str] = CODE_FIELDS) -> list[str]:
    """Code that a configuration names, as ``FILE.py:NAME`` or ``MODULE:NAME``, without options.

    >>> named_code({"dataset": "digits", "model": "my.py:net(width=3)", "algorithm": "fedavg"})
    ['my.py:net']
    """
    names = [parse_call(config[field])[0] for field in fields if isinstance(config.get(field), str) and ":" in config[field]]
    return [name for name in names if ":" in name and not name.startswith(_BUILT_IN)]


def signature(config: Mapping[str, Any]) -> str | None:
    """What shows that this user wrote a configuration: a keyed hash of the code that it names.

    The key is a random file in the user's cache folder that only the user can read, so somebody else's folder cannot have the
    signature. None if the configuration names no code, or the cache folder cannot be used.
    """
    code = named_code(config)
    key = _key() if code else None
    return hmac.new(key, "\n".join(code).encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest() if key else None


def check_trusted(folder: str, stored: Mapping[str, Any], fields: Iterable[str] = CODE_FIELDS) -> None:
    """Checks that this user wrote the configuration of a run folder, if it names code.

    Args:
      folder: of the run.
      stored: what `read_config` returns.
      fields: the fields whose code would be run.

    Raises:
      ValueError: somebody else may have written it; the message names the code.
    """
    code = named_code(stored["config"], fields)
    expected = signature(stored["config"]) if code else None
    if code and (expected is None or not hmac.compare_digest(expected, str(stored.get("signature")))):
        raise ValueError(
            f"The configuration of {folder} runs Python code, and fedsim cannot tell that you wrote it on this machine: "
            f"{', '.join(code)}. Read this code; if you trust it, repeat the command with --trust."
        )


def _key() -> bytes | None:
    """The key of this user, made at first use; None if it cannot be stored so that only this user can read it."""
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    path = cache_folder() / f"run-key-{user}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        # In a cache folder that users share, somebody else could have written the file.
        if hasattr(os, "getuid") and (path.stat().st_uid != user or path.stat().st_mode & 0o077):
            return None
        return path.read_bytes() or None
    except OSError:
        return None


def _create(path: Path) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
