"""The child process of `fedsim.formats.read_tff_hdf5`, in which libhdf5 parses a file that may be damaged.

On a heap of zeros, libhdf5 2.0 loops forever, and earlier versions crash on smaller damage. In a child process this does not
end the user's process. The child is started by its path and does not import fedsim, so it starts in a tenth of a second.

A request is a line of JSON. The reply has, for each client, a line of JSON and the bytes of its arrays.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

# The highest compression ratio of deflate, that of zeros.
_MAX_COMPRESSION_RATIO = 1100


class RefusedError(Exception):
    """The file is not damaged, but does not have the expected content."""


def main() -> None:
    """Answers requests until the input ends."""
    replies = sys.stdout.buffer
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        timeout = request.pop("timeout")
        try:
            clients = _clients(**request)
            while True:
                faulthandler.dump_traceback_later(timeout, exit=True)  # A native thread, which ends loops in C, too.
                client = next(clients, None)
                faulthandler.cancel_dump_traceback_later()  # The limit is on HDF5, not on the reader of the pipe.
                if client is None:
                    break
                head, blocks = client
                replies.write(json.dumps(head).encode() + b"\n")
                replies.writelines(blocks)
            last: dict[str, Any] = {"end": True}
        except RefusedError as error:
            last = {"refused": str(error)}
        except Exception as error:
            last = {"damaged": f"{type(error).__name__}: {error}"}
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps(last).encode() + b"\n")
        replies.flush()


def _clients(path: str, features: Sequence[str] | None) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    size = os.path.getsize(path)
    with h5py.File(path, "r") as file:
        examples: Any = file.get("examples")
        if not isinstance(examples, h5py.Group):
            raise RefusedError(f"No group /examples; the file has {sorted(file)}: expected /examples/<client>/<feature>.")
        for client_id in list(examples):
            client = examples[client_id]
            if not isinstance(client, h5py.Group):
                raise RefusedError(f"/examples/{client_id} is not a group of features: expected /examples/<client>/<feature>.")
            arrays, blocks = [], []
            for name in list(client) if features is None else features:
                if name not in client:
                    raise RefusedError(f"Client {client_id!r} has no feature {name!r}; it has {sorted(client)}.")
                head, *content = _read(client[name], f"Feature {name!r} of client {client_id!r}", size)
                arrays.append([name, *head])
                blocks += content
            yield {"client": client_id, "arrays": arrays}, blocks


def _read(dataset: Any, what: str, file_size: int) -> tuple[Any, ...]:
    """Returns ``(dtype, shape), bytes`` of numbers, or ``("text", rows), lengths, bytes``."""
    if not isinstance(dataset, h5py.Dataset) or not dataset.shape:
        raise RefusedError(f"{what} is not an array with one row per example.")
    claimed, stored = dataset.size * dataset.dtype.itemsize, min(dataset.id.get_storage_size(), file_size)
    if claimed > (stored if dataset.chunks is None else 2**20 + _MAX_COMPRESSION_RATIO * stored):
        raise ValueError(f"{what} should have {claimed} bytes, but the file has only {stored} bytes for it")
    if h5py.check_string_dtype(dataset.dtype) is not None:
        if dataset.ndim != 1:
            raise RefusedError(f"{what} is text of shape {list(dataset.shape)}: expected one string per example.")
        rows = [bytes(row) for row in dataset[()].tolist()]
        return ("text", len(rows)), np.array([len(row) for row in rows], np.int64).data, b"".join(rows)
    if dataset.dtype.kind not in "biufc":
        raise RefusedError(
            f"{what} has dtype {dataset.dtype} (rows of varying length, or records), which is not supported: convert it to "
            "numbers of one shape first, or leave the feature out by features=[...]."
        )
    array = np.empty(dataset.shape, dataset.dtype.newbyteorder("="))
    if array.size:
        dataset.read_direct(array)
    return (array.dtype.str, array.shape), array.reshape(-1).view(np.uint8).data


if __name__ == "__main__":
    main()
