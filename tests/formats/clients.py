"""Small populations for the tests of formats, and functions to compare them."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import FederatedData

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")


def text(*rows):
    column = np.empty(len(rows), object)
    column[:] = rows
    return column


def some_clients(sizes=(3, 0, 2)):
    """Images, labels and words; the second client is empty."""
    random = np.random.default_rng(0)
    words = [b"to be", "né".encode(), b"", b'or, "not"']
    return FederatedData.from_clients({
        f"w{i}": {
            "x": random.random((n, 2, 3), np.float32),
            "y": random.integers(-5, 300, size=n),
            "words": text(*(words[k % 4] for k in range(n))),
        }
        for i, n in enumerate(sizes)
    })  # fmt: skip


def contents(clients):
    """Returns all clients and columns, with dtypes and shapes per example, for comparison by ``==``."""
    return {
        client.client_id: {
            name: (str(column.dtype), column.shape[1:], column[:].tolist()) for name, column in client.examples.items()
        }
        for client in clients
    }
