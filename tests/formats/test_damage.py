"""Every reader is given 500 damaged copies of a small file, and reads each or raises a `FormatError` that names the file."""

import functools
import gzip
import json
import lzma

import numpy as np
import pytest
from formats.clients import some_clients
from fuzz import assert_only_format_errors

from fedsim.data import ClientStream
from fedsim.formats import (
    read,
    read_fedjax_sqlite,
    read_idx,
    read_json_lines,
    read_leaf,
    read_table,
    read_tff_sqlite,
    write_fedjax_sqlite,
    write_leaf,
    write_table,
    write_tff_sqlite,
)

pytestmark = pytest.mark.slow


def read_array(path):
    """Reads an idx file as one client, so that it can be tested like the other formats."""
    return ClientStream(lambda: iter([("all", {"x": read_idx(path)})]), source=path)


def lines(data):
    rows = []
    for client in data:
        pairs = zip(client["y"].tolist(), client["words"], strict=True)
        rows.append({"client_id": client.client_id, "train": [{"y": y, "words": words.decode()} for y, words in pairs]})
    return "\n".join(map(json.dumps, rows)).encode()


def written(write):
    def content(tmp_path, suffix=".file"):
        path = tmp_path / f"whole{suffix}"
        write(some_clients(), path)
        return path.read_bytes()

    return content


read_clients = functools.partial(read_table, client="client_id")
IDX = bytes([0, 0, 0x0D, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2]) + np.arange(8, dtype=">f4").tobytes()
READERS = {
    "fedjax_sqlite": (read_fedjax_sqlite, ".sqlite", written(write_fedjax_sqlite)),
    "tff_sqlite": (read_tff_sqlite, ".sqlite", written(write_tff_sqlite)),
    "tff_sqlite.lzma": (read_tff_sqlite, ".lzma", lambda t: lzma.compress(written(write_tff_sqlite)(t), lzma.FORMAT_ALONE)),
    "leaf": (read_leaf, ".json", written(write_leaf)),
    "leaf.gz": (read_leaf, ".json.gz", lambda t: gzip.compress(written(write_leaf)(t), mtime=0)),
    "json_lines": (read_json_lines, ".jsonl", lambda t: lines(some_clients())),
    "csv": (read_clients, ".csv", lambda t: written(write_table)(t, ".csv")),
    "parquet": (read_clients, ".pq", lambda t: written(write_table)(t, ".pq")),
    "idx": (read_array, ".idx", lambda t: IDX),
    "idx.gz": (read_array, ".gz", lambda t: gzip.compress(IDX, mtime=0)),
    "recognized": (read, ".sqlite", written(write_fedjax_sqlite)),
}


@pytest.mark.filterwarnings("ignore:Clients without examples")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(tmp_path, name):
    reader, suffix, content = READERS[name]
    assert_only_format_errors(reader, content(tmp_path), suffix, 200)
