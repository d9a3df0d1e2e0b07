"""A reader for idx, the format of MNIST's files: a header and one array. See http://yann.lecun.com/exdb/mnist."""

from __future__ import annotations

import os
import struct
from math import prod

import numpy as np

from fedsim.data import FormatError
from fedsim.formats._source import DAMAGE_ERRORS, StrPath, check_exists, locating_errors, open_decompressed, read_exactly

# The type of the values, by the third byte of the file.
IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: StrPath) -> np.ndarray:
    """Reads an idx file, also ``.gz``, as an array in the machine's byte order.

    An idx file has no clients; divide its array among clients by a partitioner.

    Raises:
      FileNotFoundError: there is no such file.
      FormatError: the file is not an idx file, or is damaged.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     read_idx(f"{folder}/labels")
    array([7, 2, 1], dtype=uint8)
    """
    source = check_exists(path)
    with locating_errors(os.fspath(path), *DAMAGE_ERRORS), open_decompressed(source) as file:
        head = read_exactly(file, 4)
        if head[:2] != b"\0\0" or head[2] not in IDX_TYPES:
            raise FormatError(
                f"expected an idx file, which begins with 0, 0, a type and a number of dimensions, but it begins with {head!r}."
            )
        dtype, shape = np.dtype(IDX_TYPES[head[2]]), struct.unpack(f">{head[3]}I", read_exactly(file, 4 * head[3]))
        content = read_exactly(file, prod(shape) * dtype.itemsize)
        if file.read(1):
            raise FormatError(f"there are further bytes after the {dtype} {list(shape)} of its header.")
        return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))
