"""MNIST's idx files."""

import gzip
import tracemalloc

import numpy as np
import pytest
from formats.clients import REAL, needs_real

from fedsim.data import FormatError
from fedsim.formats import read_idx


def idx(kind, array):
    return bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.mark.parametrize(("kind", "dtype"), [(8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
@pytest.mark.parametrize("compress", [False, True])
def test_every_type_is_read_in_native_byte_order(tmp_path, kind, dtype, compress):
    array = np.arange(-12, 12).reshape(2, 3, 4).astype(dtype)
    content = idx(kind, array)
    (tmp_path / "a").write_bytes(gzip.compress(content) if compress else content)
    read = read_idx(tmp_path / "a")
    assert read.dtype == np.dtype(dtype).newbyteorder("=")
    assert read.dtype.isnative
    np.testing.assert_array_equal(read, array)


@needs_real
def test_mnist_has_the_published_counts():
    """The training set has the published number of images of each digit, and the mean that is commonly used to normalize it."""
    labels = read_idx(REAL / "mnist" / "train-labels-idx1-ubyte.gz")
    images = read_idx(REAL / "mnist" / "train-images-idx3-ubyte.gz")
    assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert images.shape == (60_000, 28, 28)
    assert images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)


GOOD = idx(8, np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "4 bytes are missing"),
        (b"\0\0\x07\x01\0\0\0\0", "begins with 0, 0, a type"),
        (b"PK\x03\x04", "begins with 0, 0, a type"),
        (GOOD[:9], "3 bytes are missing"),
        (GOOD[:-1], "1 bytes are missing"),
        (GOOD + b"\0", r"further bytes after the uint8 \[2, 3\]"),
        (gzip.compress(GOOD, mtime=0)[:-3], "truncated or damaged"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "truncated or damaged.*CRC"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    (tmp_path / "bad.idx").write_bytes(content)
    with pytest.raises(FormatError, match=f"bad.idx: .*{message}"):
        read_idx(tmp_path / "bad.idx")


def test_a_header_that_declares_petabytes_allocates_nothing(tmp_path):
    (tmp_path / "bomb").write_bytes(b"\0\0\x0e\x03" + b"\xff" * 12 + bytes(100))
    tracemalloc.start()
    with pytest.raises(FormatError, match="bytes are missing"):
        read_idx(tmp_path / "bomb")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
