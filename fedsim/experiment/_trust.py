"""Whether a run folder's configuration may name code: only if this user wrote it, or says that it can be trusted."""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import hmac
import json
import os
import secrets
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.configuration import RunConfig, fields_that_name
from fedsim.datasets import cache_folder, is_family
from fedsim.durable_files import replace_text
from fedsim.names import imported_module, references, texts_in


def named_code(stored: Mapping[str, Any], leave_out: Collection[str] = ()) -> list[str]:
    """Returns all code that the file of a run or a sweep names, as ``FILE.py:NAME`` or ``MODULE:NAME``, without options.

    Every text that could lead to an import counts, in whatever field it is, except for the names of files and folders.

    Args:
      stored: the content of ``config.json`` or ``sweep.json``.
      leave_out: fields of the configuration whose values are not used.

    >>> named_code({"config": {"dataset": "tfds:mnist", "model": "my.py:net(width=3)", "algorithm": "fedavg"}})
    ['my.py:net']
    """
    return list(dict.fromkeys(name for _, names in _code_texts(stored, leave_out) for name in names))


def imported_modules(config: Any) -> list[types.ModuleType]:
    """Returns the modules of the code that a `RunConfig` names; none for other values.

    >>> [module.__name__ for module in imported_modules(RunConfig(algorithm="fedsim.algorithms:FedAvg"))]
    ['fedsim.algorithms']
    """
    if not isinstance(config, RunConfig):
        return []
    names = named_code({"config": dataclasses.asdict(config)})
    return [module for name in names if (module := imported_module(name)) is not None]


def signature(stored: Mapping[str, Any]) -> str | None:
    """Returns what shows that this user wrote a run or a sweep: a keyed hash of its whole content, without signature.

    The key is a random file in the user's cache folder that only the user can read, so somebody else's folder cannot have the
    signature, nor one that somebody has changed. None if no text names code, or the cache folder cannot be used.
    """
    # JSON changes values (a tuple becomes a list), which must not count as a change.
    content = json.loads(json.dumps({name: value for name, value in stored.items() if name != "signature"}, default=str))
    key = _key() if named_code(content) else None
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest() if key else None


def signed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a run or a sweep with its signature, if it needs one.

    >>> signed({"config": {"dataset": "digits"}})
    {'config': {'dataset': 'digits'}}
    """
    content = {name: value for name, value in stored.items() if name != "signature"}
    made = signature(content)
    return content | ({"signature": made} if made else {})


def write_signed(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file of a run or a sweep, with its signature if it needs one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> write_signed(path, {"config": {"dataset": "digits"}})
    >>> json.loads(path.read_text())
    {'config': {'dataset': 'digits'}}
    """
    _write(path, signed(content))


def rewrite(path: Path, content: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Writes other content into the file of a run or a sweep. What somebody else wrote gets no signature.

    Args:
      path: the file.
      content: the new content.
      before: the content of the file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> rewrite(path, {"config": {"rounds": 2}}, {"config": {"rounds": 1}})
    >>> json.loads(path.read_text())
    {'config': {'rounds': 2}}
    """
    _write(path, signed(content) if is_signed(before) else content)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2, default=str) + "\n")


def is_signed(stored: Mapping[str, Any]) -> bool:
    """Returns whether this user has written the content as it is.

    >>> is_signed({"config": {"model": "my.py:net"}, "signature": "0" * 64})
    False
    """
    expected = signature(stored)
    return expected is not None and hmac.compare_digest(expected, str(stored.get("signature")))


def check_trusted(folder: str, stored: Mapping[str, Any], leave_out: Collection[str] = ()) -> None:
    """Checks that this user wrote the configuration of a run folder, if it names code.

    Args:
      folder: of the run.
      stored: what `read_config` or `read_sweep` returns.
      leave_out: fields of the configuration whose values are not used.

    Raises:
      ValueError: somebody else may have written it; the message names the code.

    >>> check_trusted("runs/a", {"config": {"model": "my.py:net"}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: The configuration of runs/a runs Python code, and fedsim cannot tell that you wrote it on this machine: ...
    """
    if (code := named_code(stored, leave_out)) and not is_signed(stored):
        raise ValueError(
            f"The configuration of {folder} runs Python code, and fedsim cannot tell that you wrote it on this machine: "
            f"{', '.join(code)}. Read this code; if you trust it, repeat the command with --trust."
        )


def _code_texts(stored: Mapping[str, Any], leave_out: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yields each text of a run or a sweep that names code, and this code, in a fixed order."""
    skipped = {*fields_that_name("file"), *leave_out}
    of_sweep = [(name, stored.get(name)) for name in ("varied", "differing")]
    parts = [*stored["config"].items(), *stored.get("settings", {}).items(), *of_sweep]
    for field, value in sorted(parts, key=lambda part: part[0]):
        for text in texts_in([field, value]) if field not in skipped else ():
            names = references(text)
            if field == "dataset" and names and is_family(names[0]) and text.strip().startswith(names[0]):
                names = names[1:]  # tfds:NAME is no module
            if names:
                yield text, names


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
