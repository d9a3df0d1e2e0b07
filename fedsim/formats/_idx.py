"""idx, the format of MNIST's files: a big-endian header and one array. See http://yann.lecun.com/exdb/mnist."""

from __future__ import annotations

import os
import struct
from math import prod

import numpy as np

from fedsim.data import FormatError
from fedsim.formats._source import DAMAGE, StrPath, existing, located, opened, read_exactly

# The third byte of a file says the type of its values.
IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: StrPath) -> np.ndarray:
    """Reads an idx file, also ``.gz``, as an array in the machine's byte order. It knows no clients: give it to a partitioner.

    Raises:
      FileNotFoundError: no such file.
      FormatError: not an idx file, or a damaged one.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     read_idx(f"{folder}/labels")
    array([7, 2, 1], dtype=uint8)
    """
    source = existing(path)
    with located(os.fspath(path), *DAMAGE), opened(source) as file:
        head = read_exactly(file, 4)
        if head[:2] != b"\0\0" or head[2] not in IDX_TYPES:
            raise FormatError(f"an idx file begins with 0, 0, a type and a number of dimensions, and this one with {head!r}.")
        dtype, shape = np.dtype(IDX_TYPES[head[2]]), struct.unpack(f">{head[3]}I", read_exactly(file, 4 * head[3]))
        content = read_exactly(file, prod(shape) * dtype.itemsize)
        if file.read(1):
            raise FormatError(f"bytes follow after the {dtype} {list(shape)} that its header states.")
        return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))
