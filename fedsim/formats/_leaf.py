"""LEAF's JSON files: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019, https://arxiv.org/abs/1812.01097.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.data._atomic_write import atomic_write
from fedsim.formats._json import JsonReader
from fedsim.formats._source import (
    DAMAGE,
    Clients,
    Columns,
    Features,
    StrPath,
    column,
    decoded,
    existing,
    held,
    located,
    opened,
    selected,
    stream,
)

_HEADS = ("users", "num_samples", "hierarchies")


def read_leaf(path: StrPath, features: Features = None) -> ClientStream:
    """Reads a LEAF JSON file, also ``.gz``, or all in a folder, by name; memory is that of one user, whatever the size.

    Numbers become int64 or float32 ``[n, ...]``, strings text ``[n]``; rows that are lists of k strings become features
    ``x_0`` to ``x_{k-1}``.

    Args:
      path: the file or folder.
      features: names of those to keep, or name to ``(shape, dtype)``, for instance ``{"x": ((28, 28), np.float32)}``.

    Raises:
      FileNotFoundError: no such file or folder.
      FormatError: no LEAF file in the folder; when read, a file that is not of this layout, or is damaged.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros([2, 3]), "y": np.array([3, 4])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_leaf(data, f"{folder}/a.json")
    ...     {client.client_id: client["y"].tolist() for client in read_leaf(f"{folder}/a.json")}
    {'ann': [3, 4]}
    """
    source = existing(path, folder=True)
    files = leaf_files(source) if source.is_dir() else [source]
    if not files:
        raise FormatError(f"{source} has no *.json or *.json.gz: give a folder of LEAF files.")

    def read() -> Iterator[tuple[str, Columns | None]]:
        for file in files:
            with located(os.fspath(file) if source.is_dir() else "", ValueError, RecursionError, *DAMAGE):
                yield from _users(file, features)

    return stream(path, read)


def leaf_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, by name."""
    return sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])


def _users(path: Path, features: Features) -> Iterator[tuple[str, Columns | None]]:
    heads: dict[str, Any] = {}
    met: dict[str, int] = {}
    with opened(path) as file:
        reader = JsonReader(file)
        for key in reader.members():
            if key != "user_data":
                heads[key] = reader.value()
                continue
            for user in reader.members():
                with located(f"client {user!r}", ValueError, RecursionError):
                    columns = _columns(reader.value(), features)
                    met[user] = 0 if columns is None else len(next(iter(columns.values())))
                yield user, columns
        reader.end()
    users, sizes = (heads.get(head) for head in ("users", "num_samples"))
    if not isinstance(users, list) or not isinstance(sizes, list) or len(users) != len(sizes):
        raise FormatError(f"Expected LEAF's users, num_samples and user_data, found {sorted(heads)}.")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str) or met.get(user) != size:
            raise FormatError(f"Client {user!r} has {met.get(user, 'no')} examples where num_samples says {size!r}.")
    if len(met) != len(users):
        raise FormatError(f"user_data has {len(met)} users where users lists {len(users)}.")


def _columns(data: Any, features: Features) -> Columns | None:
    if not isinstance(data, dict) or not all(isinstance(values, list) for values in data.values()):
        raise FormatError("its data are not lists by feature")
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) != 1:
        raise FormatError(f"Features have different lengths: {lengths}.")
    if not any(lengths.values()):
        return None
    made: dict[str, np.ndarray] = {}
    for name, values in data.items():
        if isinstance(values[0], list) and values[0] and isinstance(values[0][0], str):
            if not all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
                raise FormatError(f"Feature {name!r} has lists of strings of different lengths.")
            made |= {f"{name}_{i}": column(f"{name}_{i}", [value[i] for value in values]) for i in range(len(values[0]))}
        else:
            made[name] = column(name, values)
    return selected(made, features)


def write_leaf(clients: Clients, path: StrPath) -> None:
    """Writes one LEAF JSON file, client by client; it takes its name only once it is whole.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: text that is not UTF-8 or a dtype that JSON cannot hold, or two clients of one id; the client is named.

    >>> import pathlib, tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_leaf(data, f"{folder}/a.json")
    ...     pathlib.Path(f"{folder}/a.json").read_text()
    '{"user_data": {"ann": {"y": [3, 4]}}, "users": ["ann"], "num_samples": [2]}\\n'
    """
    sizes: dict[str, int] = {}
    with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"user_data": {')
        for client in clients:
            if client.client_id in sizes:
                raise ValueError(f"Client ids must be unique, and {client.client_id!r} occurs more than once.")
            file.write(", " if sizes else "")
            sizes[client.client_id] = len(client)
            data = {
                name: decoded(client.client_id, name, array) if array.dtype == object else array.tolist()
                for name, array in held(client).items()
            }
            file.write(f"{json.dumps(client.client_id)}: {json.dumps(data)}")
        file.write(f'}}, "users": {json.dumps(list(sizes))}, "num_samples": {json.dumps(list(sizes.values()))}}}\n')
