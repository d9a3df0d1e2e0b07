"""TensorFlow Federated's HDF5 layout: ``/examples/<client>/<feature> [n, ...]``.

Files are parsed by a child process (see `fedsim.formats._hdf5_child`), whatever is wrong with them: libhdf5 can crash or hang.
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
from fedsim.data._atomic_write import atomic_write
from fedsim.formats._source import Clients, StrPath, held

# Children that wait for another file.
_idle: list[subprocess.Popen[bytes]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


def read_tff_hdf5(path: StrPath, features: Sequence[str] | None = None, *, patience: float = 60.0) -> ClientStream:
    """Reads a file in TensorFlow Federated's layout, ``/examples/<client>/<feature> [n, ...]``.

    Clients come in the file's order: by name, unless whoever wrote it tracked another order. Numbers come in the machine's
    byte order, strings as text.

    Args:
      path: the file.
      features: which features to read; by default all, which must then be the same for every client.
      patience: seconds that HDF5 may take for one client before the file counts as damaged, for it can hang on some.

    Raises:
      FileNotFoundError: no such file.
      FormatError: not an HDF5 file. When read: a truncated or damaged one, no ``/examples``, a client that lacks a feature,
        features of different lengths, or whose shape or dtype differ between clients.

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
        raise FileNotFoundError(f"No file {name}.")
    if not _is_hdf5(path):
        raise FormatError(f"{name} ({os.path.getsize(path)} bytes) is not an HDF5 file: fetch it again, or convert it.")
    request = {"path": os.path.abspath(path), "features": features and list(features), "patience": patience}

    def read() -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
        child = _take()
        try:
            _send(child, request)
            while "client" in (reply := _reply(child, name, patience)):
                arrays = {feature: _receive(child, name, *kind) for feature, *kind in reply["arrays"]}
                yield reply["client"], arrays
        except BaseException:  # Also when whoever reads stops before the end.
            child.kill()
            _close(child)
            raise
        _idle.append(child)
        if "refused" in reply:
            raise FormatError(f"{name}: {reply['refused']}")
        if "damaged" in reply:
            raise FormatError(f"{name} is truncated or damaged: fetch or write it again. HDF5 says: {reply['damaged']}")

    return ClientStream(read, source=path)


def write_tff_hdf5(clients: Clients, path: StrPath) -> None:
    """Writes TensorFlow Federated's layout, client by client, in their order; the file takes its name once it is whole.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: a client or a feature whose name HDF5 cannot hold (with a slash), text with a NUL in it, a dtype that it
        cannot hold, or two clients of one id.
      OSError: the disk is full; nothing is left of the file.

    >>> import tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"snippets": np.array([b"to be", b"or not"], object)}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tff_hdf5(data, f"{folder}/a.h5")
    ...     with h5py.File(f"{folder}/a.h5") as file:
    ...         file["examples/ann/snippets"][()].tolist()
    [b'to be', b'or not']
    """
    with atomic_write(path) as part, open(part, "r+b", buffering=0) as raw:
        disk = _Disk(raw)
        with h5py.File(disk, "w") as file:
            examples = file.create_group("examples", track_order=True)
            for client in clients:
                _check_name("Client id", client.client_id)
                if client.client_id in examples:
                    raise ValueError(f"Client ids must be unique, and {client.client_id!r} occurs more than once.")
                _write(examples.create_group(client.client_id), client)
                if disk.error is not None:
                    break
        if disk.error is not None:
            raise disk.error


def _write(group: Any, client: ClientDataset) -> None:
    for name, rows in held(client, "biufc").items():
        _check_name("Feature name", name)
        if rows.dtype != object:
            group.create_dataset(name, data=rows)
            continue
        if any(b"\0" in row for row in rows):
            raise ValueError(f"Text {name!r} of client {client.client_id!r} holds a NUL, where HDF5's strings end.")
        group.create_dataset(name, data=rows, dtype=h5py.string_dtype("ascii"))


def _check_name(kind: str, name: str) -> None:
    if name in ("", ".") or "/" in name or "\0" in name:
        raise ValueError(f"{kind} {name!r} cannot name anything in an HDF5 file: rename it.")


class _Disk(io.RawIOBase):
    """A file of which HDF5 never hears that the disk is full, for it would crash: what went wrong first is kept."""

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
    """Whether the signature is where HDF5 may have it: at 0, or behind a user block of 512 bytes or a power of two more."""
    with open(path, "rb") as file:
        size, at = os.path.getsize(path), 0
        while at < size:
            file.seek(at)
            if file.read(8) == b"\x89HDF\r\n\x1a\n":
                return True
            at = max(512, 2 * at)
    return False


def _take() -> subprocess.Popen[bytes]:
    """A child that waits, or a new one."""
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
        raise RuntimeError(f"{sys.executable} could not be started to parse HDF5: it ended with status {child.returncode}.")
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


def _reply(child: subprocess.Popen[bytes], name: str, patience: float) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if line.endswith(b"\n"):
        return json.loads(line)
    # 1 is what faulthandler ends a process with whose time is over.
    how = f"took more than patience={patience:g} seconds for one client" if child.wait() == 1 else "crashed"
    raise FormatError(f"{name} is damaged: HDF5 {how}. Fetch or write it again.")


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
        raise FormatError(f"{name} is damaged: HDF5 crashed. Fetch or write it again.")
    return array
