"""HDF5 files: TensorFlow Federated's layout, read; the packed layout, written and memory-mapped."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedsim.data._federated_data import FederatedData, check_same_features

StrPath = str | os.PathLike[str]
Transform = Callable[[str, dict[str, np.ndarray]], Mapping[str, np.ndarray]]

_FORMAT, _VERSION = "fedsim.packed", 1
_BLOCK_BYTES = 1 << 26
# Columns start on a page of the file, so that the mapped arrays are aligned for any dtype.
_PAGE = 4096


def read_tff_hdf5(path: StrPath, features: Sequence[str] | None = None, *, transform: Transform | None = None) -> FederatedData:
    """Reads a file in TensorFlow Federated's layout, ``/examples/<client>/<feature> [n, ...]``, into packed columns.

    Clients come in the file's order (by name, unless whoever wrote it tracked another order). Each client's rows go
    straight into columns of their final size, so nothing is held twice.

    Args:
      path: the file.
      features: which features to read; by default those of the first client, which every client must then have exactly.
      transform: ``(client id, examples) -> examples``, applied to each client as it is read; it must keep the number
        of rows.

    Returns:
      One column per feature (or per feature of ``transform``'s answer), in the machine's byte order.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not an HDF5 file, a truncated or damaged one, no ``/examples``, no clients; a client without a
        feature, or with features of different lengths; features whose shape or dtype differ between clients. The
        message names path and client.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5py.File(f"{folder}/a_train.h5", "w") as file:
    ...         file["examples/ann/label"] = np.array([3, 4])
    ...         file["examples/bob/label"] = np.array([5])
    ...     data = read_tff_hdf5(f"{folder}/a_train.h5")
    >>> {client.client_id: client["label"].tolist() for client in data.clients()}
    {'ann': [3, 4], 'bob': [5]}
    """
    with _reading(path) as file:
        examples: Any = file.get("examples")
        if not hasattr(examples, "keys"):
            raise ValueError(f"No group /examples; the file holds {sorted(file)}: expected TFF's /examples/<client>/<feature>.")
        client_ids = list(examples)
        if not client_ids:
            raise ValueError("The population is empty: /examples holds no clients.")
        first = _client_features(examples, client_ids[0], features)
        sizes = np.zeros(len(client_ids), np.int64)
        for i, client_id in enumerate(client_ids):
            datasets = _client_features(examples, client_id, features)
            check_same_features(client_ids[0], first, client_id, datasets)
            lengths = {name: dataset.shape[0] for name, dataset in datasets.items()}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"Client {client_id!r} has features of different lengths: {lengths}.")
            sizes[i] = next(iter(lengths.values()))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        columns: dict[str, np.ndarray] = {}
        for i, client_id in enumerate(client_ids):
            rows: Mapping[str, np.ndarray] = {name: _read(examples[client_id][name]) for name in first}
            if transform is not None:
                rows = transform(client_id, dict(rows))
            if not columns:
                columns = {name: np.empty((offsets[-1], *a.shape[1:]), a.dtype) for name, a in rows.items()}
            check_same_features(client_ids[0], columns, client_id, rows)
            for name, array in rows.items():
                if len(array) != sizes[i]:
                    raise ValueError(
                        f"The transform made {len(array)} rows of {sizes[i]} of client {client_id!r}: keep their number."
                    )
                columns[name][offsets[i] : offsets[i + 1]] = array
        return FederatedData(columns, offsets, client_ids)


def save_packed(data: FederatedData, path: StrPath) -> None:
    """Writes ``data`` as one packed HDF5 file; see `FederatedData.save`."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"No folder {target.parent} to write {target.name} into: create it first.")
    for client_id in data.client_ids:
        if client_id.endswith("\0"):
            raise ValueError(f"Client id {client_id!r} ends with a NUL, which packed names cannot hold: rename it.")
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        with h5py.File(part, "w", alignment_threshold=1, alignment_interval=_PAGE) as file:
            file.attrs["format"], file.attrs["version"] = _FORMAT, _VERSION
            file["offsets"] = data.offsets
            file["client_ids"] = np.array([client_id.encode() for client_id in data.client_ids])
            columns = file.create_group("columns", track_order=True)
            for name, column in data.columns.items():
                _write(columns, name, column)
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def open_packed(path: StrPath) -> FederatedData:
    """Opens a packed HDF5 file with its columns memory-mapped; see `FederatedData.open`."""
    with _reading(path) as file:
        found = file.attrs.get("format"), file.attrs.get("version")
        if found != (_FORMAT, _VERSION):
            raise ValueError(
                f"Not a packed population: expected format {_FORMAT!r} version {_VERSION}, found {found[0]!r} version "
                f"{found[1]}. Files in TFF's layout are read by fedsim.data.read_tff_hdf5."
            )
        columns = {name: _map(path, name, dataset) for name, dataset in file["columns"].items()}
        client_ids = [client_id.decode() for client_id in file["client_ids"][()].tolist()]
        return FederatedData(columns, file["offsets"][()], client_ids)


@contextlib.contextmanager
def _reading(path: StrPath) -> Iterator[Any]:
    """The open `h5py.File`; whatever is wrong with it becomes an error that names it."""
    if os.path.isdir(path):
        raise ValueError(f"{os.fspath(path)} is a folder: give an HDF5 file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"No file {os.fspath(path)}.")
    with open(path, "rb"):  # An unreadable file says so itself, better than HDF5 would.
        pass
    if not h5py.is_hdf5(path):
        raise ValueError(
            f"{os.fspath(path)} ({os.path.getsize(path)} bytes) is not an HDF5 file: fetch it again, or convert it."
        )
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{os.fspath(path)} is truncated or damaged: fetch or write it again. HDF5 says: {error}") from error


def _client_features(examples: Any, client_id: str, features: Sequence[str] | None) -> dict[str, h5py.Dataset]:
    client = examples[client_id]
    if not isinstance(client, h5py.Group):
        raise ValueError(f"/examples/{client_id} is not a group of features: expected /examples/<client>/<feature>.")
    names = list(client) if features is None else features
    if not names:
        raise ValueError(f"Client {client_id!r} has no features: expected at least one array per client.")
    datasets = {}
    for name in names:
        if name not in client:
            raise ValueError(f"Client {client_id!r} has no feature {name!r}; it has {sorted(client)}.")
        dataset = datasets[name] = client[name]
        if not isinstance(dataset, h5py.Dataset) or not dataset.shape:
            raise ValueError(f"Feature {name!r} of client {client_id!r} is not an array with one row per example.")
        if dataset.dtype.kind == "O":
            raise ValueError(
                f"Feature {name!r} of client {client_id!r} holds strings or rows of varying length, which no column "
                "can: convert them to numbers of one shape first, or leave the feature out by features=[...]."
            )
    return datasets


def _read(dataset: Any) -> np.ndarray:
    array = np.empty(dataset.shape, dataset.dtype.newbyteorder("="))
    if array.size:
        dataset.read_direct(array)
    return array


def _write(group: h5py.Group, name: str, column: np.ndarray) -> None:
    try:
        dataset = group.create_dataset(name, shape=column.shape, dtype=column.dtype)
    except TypeError as error:
        message = f"Feature {name!r} has dtype {column.dtype}, which HDF5 cannot hold: convert it first."
        raise ValueError(message) from error
    # In blocks: the column may itself be a mapped file that is larger than memory.
    row_bytes = max(1, column.dtype.itemsize * int(np.prod(column.shape[1:])))
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(column) if column.size else 0, rows):
        dataset[start : start + rows] = column[start : start + rows]


def _map(path: StrPath, name: str, dataset: Any) -> np.ndarray:
    if dataset.size == 0:
        return np.empty(dataset.shape, dataset.dtype)
    start = dataset.id.get_offset()
    if start is None:
        raise ValueError(f"Column {name!r} is not stored contiguously: write the file with FederatedData.save.")
    if start + dataset.size * dataset.dtype.itemsize > os.path.getsize(path):
        raise ValueError(f"Column {name!r} reaches beyond the end of the file, which is truncated: write it again.")
    return np.memmap(path, dataset.dtype, "r", start, dataset.shape)
