"""A reader and a writer for LEAF's JSON files.

A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019, https://arxiv.org/abs/1812.01097.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import ClientStream, FormatError
from fedsim.durable_files import atomic_write
from fedsim.formats._json import JsonReader
from fedsim.formats._source import (
    DAMAGE_ERRORS,
    Clients,
    Columns,
    Features,
    StrPath,
    check_exists,
    column,
    decoded,
    locating_errors,
    open_decompressed,
    selected,
    stream,
    writable_columns,
)

_HEADS = ("users", "num_samples", "hierarchies")


def read_leaf(path: StrPath, features: Features = None, *, floats: Any = np.float32) -> ClientStream:
    """Reads a LEAF JSON file, also ``.gz``, or all LEAF files of a folder in the order of their names, one user at a time.

    Numbers become int64 or ``floats`` ``[n, ...]``, and strings become text ``[n]``. A feature ``x`` whose rows are lists of k
    strings becomes the features ``x_0`` to ``x_{k-1}``.

    Args:
      path: the file or folder.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``, for example
        ``{"x": ((28, 28), np.float32)}``; None: all features.
      floats: the dtype of numbers with fractions, ``np.float32``, which rounds to 7 digits, or ``np.float64``.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: ``floats`` is neither of the two.
      FormatError: the folder has no LEAF file; or, when a file is read, it has another layout or is damaged.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros([2, 3]), "y": np.array([3, 4])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_leaf(data, f"{folder}/a.json")
    ...     {client.client_id: client["y"].tolist() for client in read_leaf(f"{folder}/a.json")}
    {'ann': [3, 4]}
    """
    checks.one_of(np.float32, np.float64, floats=floats)
    source = check_exists(path, folder=True)
    files = leaf_files(source) if source.is_dir() else [source]
    if not files:
        raise FormatError(f"{source} has no *.json or *.json.gz: give a folder of LEAF files.")

    def read() -> Iterator[tuple[str, Columns | None]]:
        for file in files:
            with locating_errors(os.fspath(file) if source.is_dir() else "", ValueError, RecursionError, *DAMAGE_ERRORS):
                yield from _users(file, features, floats)

    return stream(path, read)


def leaf_files(folder: Path) -> list[Path]:
    """Returns the JSON files of a folder that are not hidden, sorted by name."""
    found = [*folder.glob("*.json"), *folder.glob("*.json.gz")]
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _users(path: Path, features: Features, floats: Any) -> Iterator[tuple[str, Columns | None]]:
    heads: dict[str, Any] = {}
    sizes_read: dict[str, int] = {}
    with open_decompressed(path) as file:
        reader = JsonReader(file)
        for key in reader.members():
            if key != "user_data":
                heads[key] = reader.value()
                continue
            for user in reader.members():
                with locating_errors(f"client {user!r}", ValueError, RecursionError):
                    columns = _columns(reader.value(), features, floats)
                    sizes_read[user] = 0 if columns is None else len(next(iter(columns.values())))
                yield user, columns
        reader.end()
    users, sizes = (heads.get(head) for head in ("users", "num_samples"))
    if not isinstance(users, list) or not isinstance(sizes, list) or len(users) != len(sizes):
        raise FormatError(f"Expected LEAF's users, num_samples and user_data, found {sorted(heads)}.")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str) or sizes_read.get(user) != size:
            raise FormatError(f"Client {user!r} has {sizes_read.get(user, 'no')} examples, but num_samples has {size!r}.")
    if len(sizes_read) != len(users):
        raise FormatError(f"user_data has {len(sizes_read)} users, but users has {len(users)}.")


def _columns(data: Any, features: Features, floats: Any) -> Columns | None:
    if not isinstance(data, dict) or not all(isinstance(values, list) for values in data.values()):
        raise FormatError("its data are not an object of lists: expected {feature: [value, ...], ...}")
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) != 1:
        raise FormatError(f"Features have different lengths: {lengths}.")
    if not any(lengths.values()):
        return None
    columns: dict[str, np.ndarray] = {}
    for name, values in data.items():
        if isinstance(values[0], list) and values[0] and isinstance(values[0][0], str):
            if not all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
                raise FormatError(f"Feature {name!r} has lists of strings of different lengths.")
            columns |= {f"{name}_{i}": column(f"{name}_{i}", [value[i] for value in values]) for i in range(len(values[0]))}
        else:
            columns[name] = column(name, values, floats)
    return selected(columns, features)


def write_leaf(clients: Clients, path: StrPath) -> None:
    """Writes a LEAF JSON file, client by client. The file is created only when it is complete.

    Args:
      clients: the clients to write.
      path: the file.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: text is not UTF-8, JSON does not support a dtype, or two clients have the same id. The message names the
        client.

    >>> import pathlib, tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_leaf(data, f"{folder}/a.json")
    ...     pathlib.Path(f"{folder}/a.json").read_text()
    '{"user_data": {"ann": {"y": [3, 4]}}, "users": ["ann"], "num_samples": [2]}\\n'
    """
    sizes: dict[str, int] = {}
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"user_data": {')
        for client in clients:
            if client.client_id in sizes:
                raise ValueError(
                    f"Client ids must be unique, but {client.client_id!r} occurs more than once: rename one of the clients."
                )
            file.write(", " if sizes else "")
            sizes[client.client_id] = len(client)
            data = {
                name: decoded(client.client_id, name, array) if array.dtype == object else array.tolist()
                for name, array in writable_columns(client).items()
            }
            file.write(f"{json.dumps(client.client_id)}: {json.dumps(data)}")
        file.write(f'}}, "users": {json.dumps(list(sizes))}, "num_samples": {json.dumps(list(sizes.values()))}}}\n')
