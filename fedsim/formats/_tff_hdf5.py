"""A reader and a writer for TensorFlow Federated's HDF5 layout, ``/examples/<client>/<feature> [n, ...]``.

Files are parsed in a child process (see `fedsim.formats._hdf5_child`), because libhdf5 can crash or hang on damaged files.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedsim.data import ClientDataset, ClientStream, FormatError, TextColumn
from fedsim.durable_files import atomic_write
from fedsim.formats._source import Clients, StrPath, writable_columns

# Child processes that are ready for another file.
_idle: list[subprocess.Popen[bytes]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


def read_tff_hdf5(path: StrPath, features: Sequence[str] | None = None, *, timeout: float = 60.0) -> ClientStream:
    """Reads a file in TensorFlow Federated's layout, ``/examples/<client>/<feature> [n, ...]``.

    Clients are in the order of the file: sorted by id, unless the file was written with another tracked order. Numbers are
    converted to the machine's byte order, and strings to text.

    Args:
      path: the file.
      features: the names of the features to read; None: all features, which must then be the same for every client.
      timeout: the seconds that HDF5 may take for one client. After this time the file counts as damaged, because HDF5 hangs on
        some damaged files.

    Raises:
      FileNotFoundError: there is no such file.
      FormatError: the file is not an HDF5 file; or, when it is read, it is truncated or damaged, it has no ``/examples``, a
        client lacks a feature, features of a client have different lengths, or shapes or dtypes differ between clients.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"label": np.array([3, 4])}, "bob": {"label": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_hdf5(data, f"{folder}/a_train.h5")
    ...     again = read_tff_hdf5(f"{folder}/a_train.h5").load()
    >>> {client.client_id: client["label"].tolist() for client in again.clients()}
    {'ann': [3, 4], 'bob': [5]}
    """
    name = os.fspath(path)
    if os.path.isdir(path):
        raise FormatError(f"{name} is a folder: give an HDF5 file.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no file {name}.")
    if not _is_hdf5(path):
        raise FormatError(f"{name} ({os.path.getsize(path)} bytes) is not an HDF5 file: download it again, or convert it.")
    request = {"path": os.path.abspath(path), "features": features and list(features), "timeout": timeout}

    def read() -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
        child = _get_child()
        try:
            _send(child, request)
            while "client" in (reply := _reply(child, name, timeout)):
                arrays = {feature: _receive(child, name, *kind) for feature, *kind in reply["arrays"]}
                yield reply["client"], arrays
        except BaseException:  # Also if the consumer stops before the end.
            child.kill()
            _close(child)
            raise
        _idle.append(child)
        if "refused" in reply:
            raise FormatError(f"{name}: {reply['refused']}")
        if "damaged" in reply:
            raise FormatError(f"{name} is truncated or damaged: download or write it again. HDF5 reports: {reply['damaged']}")

    return ClientStream(read, source=path)


def write_tff_hdf5(clients: Clients, path: StrPath) -> None:
    """Writes a file in TensorFlow Federated's layout, client by client in their order, created only when it is complete.

    Args:
      clients: the clients to write.
      path: the file.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: HDF5 does not support the name of a client or a feature (with a slash), a text with a NUL character, or a
        dtype; or two clients have the same id.
      OSError: the disk is full. No file remains.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"snippets": np.array([b"to be", b"or not"], object)}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_hdf5(data, f"{folder}/a.h5")
    ...     with h5py.File(f"{folder}/a.h5") as file:
    ...         file["examples/ann/snippets"][()].tolist()
    [b'to be', b'or not']
    """
    with atomic_write(path) as temporary, open(temporary, "r+b", buffering=0) as raw:
        disk = _Disk(raw)
        with h5py.File(disk, "w") as file:
            examples = file.create_group("examples", track_order=True)
            for client in clients:
                _check_name("Client id", client.client_id)
                if client.client_id in examples:
                    raise ValueError(
                        f"Client ids must be unique, but {client.client_id!r} occurs more than once: rename one of the clients."
                    )
                _write(examples.create_group(client.client_id), client)
                if disk.error is not None:
                    break
        if disk.error is not None:
            raise disk.error


def _write(group: Any, client: ClientDataset) -> None:
    for name, rows in writable_columns(client, "biufc").items():
        _check_name("Feature name", name)
        if rows.dtype != object:
            group.create_dataset(name, data=rows)
            continue
        if any(b"\0" in row for row in rows):
            raise ValueError(
                f"Text {name!r} of client {client.client_id!r} contains a NUL character, which ends strings in HDF5: remove it."
            )
        group.create_dataset(name, data=rows, dtype=h5py.string_dtype("ascii"))


def _check_name(kind: str, name: str) -> None:
    if name in ("", ".") or "/" in name or "\0" in name:
        raise ValueError(f"{kind} {name!r} is not a valid name in HDF5: rename it.")


class _Disk(io.RawIOBase):
    """A file that hides write errors from HDF5, which would crash on a full disk, and stores the first one in ``error``."""

    def __init__(self, raw: io.FileIO) -> None:
        self.raw = raw
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        rest = memoryview(content).cast("B")
        try:
            while len(rest) and self.error is None:
                rest = rest[self.raw.write(rest) :]
        except OSError as error:
            self.error = error
        return len(content)

    def readinto(self, buffer: Any) -> int:
        return self.raw.readinto(buffer) or 0

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.raw.seek(offset, whence)

    def tell(self) -> int:
        return self.raw.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self.raw.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0


def _is_hdf5(path: StrPath) -> bool:
    """Whether HDF5's signature is at 0, or after a user block, whose size is 512 times a power of two."""
    with open(path, "rb") as file:
        size, at = os.path.getsize(path), 0
        while at < size:
            file.seek(at)
            if file.read(8) == b"\x89HDF\r\n\x1a\n":
                return True
            at = max(512, 2 * at)
    return False


def _get_child() -> subprocess.Popen[bytes]:
    """Returns an idle child process, or starts a new one."""
    while _idle:
        child = _idle.pop()
        if child.poll() is None:
            return child
        _close(child)
    paths = os.pathsep.join(filter(None, sys.path))
    child = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("_hdf5_child.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        pipesize=1 << 20,
    )
    assert child.stdout is not None
    if child.stdout.readline() != b"ready\n":
        _close(child)
        raise RuntimeError(
            f"{sys.executable} could not be started to parse HDF5: the process ended with status {child.returncode}."
        )
    return child


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    child.stdout.close()
    child.wait()


@atexit.register
def _close_all() -> None:
    while _idle:
        _close(_idle.pop())


def _send(child: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()


def _reply(child: subprocess.Popen[bytes], name: str, timeout: float) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if line.endswith(b"\n"):
        return json.loads(line)
    # faulthandler ends the process with status 1 after the timeout.
    how = f"took more than timeout={timeout:g} seconds for one client" if child.wait() == 1 else "crashed"
    raise FormatError(f"{name} is damaged: HDF5 {how}. Download or write it again.")


def _receive(child: subprocess.Popen[bytes], name: str, dtype: str, shape: Any) -> np.ndarray:
    if dtype != "text":
        return _array(child, name, np.dtype(dtype), shape)
    lengths = _array(child, name, np.dtype(np.int64), [shape])
    content = _array(child, name, np.dtype(np.uint8), [int(lengths.sum())])
    return TextColumn(content, np.concatenate([[0], np.cumsum(lengths)]))[:]


def _array(child: subprocess.Popen[bytes], name: str, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    array = np.empty(shape, dtype)
    assert child.stdout is not None
    if array.size and child.stdout.readinto(array.reshape(-1).view(np.uint8).data) < array.nbytes:  # type: ignore[attr-defined]
        raise FormatError(f"{name} is damaged: HDF5 crashed. Download or write it again.")
    return array
