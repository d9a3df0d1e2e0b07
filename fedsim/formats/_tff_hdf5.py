"""TensorFlow Federated's HDF5 layout: ``/examples/<client>/<feature> [n, ...]``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from fedsim.data import ClientStream, FormatError

StrPath = str | os.PathLike[str]


def read_tff_hdf5(path: StrPath, features: Sequence[str] | None = None) -> ClientStream:
    """Reads a file in TensorFlow Federated's layout, ``/examples/<client>/<feature> [n, ...]``.

    Clients come in the file's order (by name, unless whoever wrote it tracked another order).

    Args:
      path: the file.
      features: which features to read; by default all, which must be the same for every client.

    Raises:
      FileNotFoundError: no such file.
      FormatError: (when read) not an HDF5 file, a truncated or damaged one, no ``/examples``; a client without a feature.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5py.File(f"{folder}/a_train.h5", "w") as file:
    ...         file["examples/ann/label"] = np.array([3, 4])
    ...         file["examples/bob/label"] = np.array([5])
    ...     data = read_tff_hdf5(f"{folder}/a_train.h5").load()
    >>> {client.client_id: client["label"].tolist() for client in data.clients()}
    {'ann': [3, 4], 'bob': [5]}
    """
    if os.path.isdir(path):
        raise FormatError(f"{os.fspath(path)} is a folder: give an HDF5 file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"No file {os.fspath(path)}.")

    def read() -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
        try:
            with h5py.File(path, "r") as file:
                examples: Any = file.get("examples")
                if not hasattr(examples, "keys"):
                    raise FormatError(f"No group /examples; the file holds {sorted(file)}: expected TFF's layout.")
                for client_id, client in examples.items():
                    yield client_id, {name: client[name][()] for name in features or client}
        except (OSError, RuntimeError, KeyError) as error:
            raise FormatError(f"{os.fspath(path)} is truncated or damaged: HDF5 says: {error}") from error

    return ClientStream(read, source=path)
