"""FedJAX's SQLite layout. The file in the shared data was written by FedJAX itself."""

import sqlite3
import threading
import tracemalloc
import zlib

import h5py
import msgpack
import numpy as np
import pytest
from formats.clients import REAL, contents, needs_real, some_clients, text

from fedsim.data import ClientDataset, FormatError
from fedsim.formats import read_fedjax_sqlite, write_fedjax_sqlite

FEDJAX_FILE = REAL / "formats" / "femnist_20_writers_fedjax.sqlite"


def rewrite(path, statement, *values):
    with sqlite3.connect(path) as connection:
        connection.execute(statement, values)
    connection.close()


def packed(array):
    return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))


def file_of(path, data, client_id=b"ann", num_examples=2):
    """Writes a file with one row of ``data``: bytes as they are, other values packed and compressed."""
    write_fedjax_sqlite([], path)
    data = data if isinstance(data, bytes) else zlib.compress(msgpack.packb(data))
    rewrite(path, "INSERT INTO federated_data VALUES (?, ?, ?)", client_id, data, num_examples)
    return path


def test_round_trip(tmp_path):
    data = some_clients()
    write_fedjax_sqlite(data, tmp_path / "a.sqlite")
    read = read_fedjax_sqlite(tmp_path / "a.sqlite")
    assert read.num_clients == 3
    assert contents(read) == contents(data)
    assert contents(read) == contents(data), "again"


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u8", "f2", "f8", "?", "c8"])
def test_round_trip_of_dtypes(tmp_path, dtype):
    rows = np.arange(6).reshape(3, 2).astype(dtype)
    write_fedjax_sqlite([ClientDataset("a", {"x": rows})], tmp_path / "a.sqlite")
    (client,) = read_fedjax_sqlite(tmp_path / "a.sqlite")
    assert client["x"].dtype == rows.dtype
    np.testing.assert_array_equal(client["x"], rows)


def test_many_clients_keep_their_order(tmp_path):
    """There are more clients than the reader decompresses in advance."""
    ids = [f"{i:03d}" for i in np.random.default_rng(0).permutation(100)]
    write_fedjax_sqlite((ClientDataset(i, {"y": np.array([int(i)])}) for i in ids), tmp_path / "a.sqlite")
    assert [(c.client_id, c["y"].tolist()) for c in read_fedjax_sqlite(tmp_path / "a.sqlite")] == [(i, [int(i)]) for i in ids]


def test_no_thread_remains_after_stopping_early(tmp_path):
    write_fedjax_sqlite((ClientDataset(str(i), {"y": np.zeros(10)}) for i in range(50)), tmp_path / "a.sqlite")
    before = threading.active_count()
    for client in read_fedjax_sqlite(tmp_path / "a.sqlite"):
        assert client.client_id == "0"
        break
    assert threading.active_count() == before


@needs_real
class TestFedjaxsOwnFile:
    def test_pixels_are_those_of_the_hdf5_file_from_which_it_was_written(self):
        with h5py.File(REAL / "femnist" / "femnist_train.h5") as source:
            clients = list(read_fedjax_sqlite(FEDJAX_FILE))
            assert len(clients) == 20
            for client in clients:
                writer = source["examples"][client.client_id]
                np.testing.assert_array_equal(client["pixels"], writer["pixels"][()] / np.float32(255))
                np.testing.assert_array_equal(client["label"], writer["label"][()])

    def test_a_written_file_equals_that_of_fedjax(self, tmp_path):
        """The table, order, ids, sizes and decompressed bytes are equal, so FedJAX can read the file."""
        write_fedjax_sqlite(read_fedjax_sqlite(FEDJAX_FILE), tmp_path / "a.sqlite")

        def rows(path):
            connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            columns = [tuple(row[1:4]) for row in connection.execute("PRAGMA table_info(federated_data)")]
            table = connection.execute("SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid").fetchall()
            connection.close()
            return columns, [(client_id, zlib.decompress(data), size) for client_id, data, size in table]

        assert rows(tmp_path / "a.sqlite") == rows(FEDJAX_FILE)

    def test_features_can_be_chosen_and_narrowed(self):
        client = next(iter(read_fedjax_sqlite(FEDJAX_FILE, {"label": ((), np.uint8)})))
        assert list(client.examples) == ["label"]
        assert client["label"].dtype == np.uint8


def test_texts_are_packed_as_fedjax_packs_object_arrays(tmp_path):
    """They have extension 4 with (shape, list of byte strings), as in fedjax.core.serialization of version 0.0.17."""
    write_fedjax_sqlite([ClientDataset("a", {"words": text(b"to", b"\xff")})], tmp_path / "a.sqlite")
    connection = sqlite3.connect(tmp_path / "a.sqlite")
    (data,) = connection.execute("SELECT data FROM federated_data").fetchone()
    connection.close()
    expected = {"words": msgpack.ExtType(4, msgpack.packb(((2,), [b"to", b"\xff"])))}
    assert zlib.decompress(data) == msgpack.packb(expected)


GOOD = np.arange(2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(data=b"not zlib"), "client 'ann': truncated or damaged.*incorrect header check"),
        (dict(data=zlib.compress(b"\x81\xa1x" + bytes(100))[:-8]), "client 'ann': its compressed data is truncated"),
        (dict(data=[1, 2]), "client 'ann': its data are a list: expected a map"),
        (dict(data={"y": [1, 2]}), "client 'ann': Feature 'y' is list: expected an array"),
        (dict(data={"y": packed(GOOD)}, num_examples=3), r"client 'ann': Feature 'y' has shape \[2\] for 3 examples"),
        (dict(data={"x": packed(GOOD), "y": packed(GOOD[:1])}), r"'y' has shape \[1\] for 2 examples"),
        (dict(data={"y": msgpack.ExtType(1, msgpack.packb(((2,), "int64", b"123")))}), r"int64 \[2\] cannot have 3 bytes"),
        (dict(data={"y": msgpack.ExtType(1, msgpack.packb(((2**62, 2**62), "int64", b"")))}), "cannot have 0 bytes"),
        (dict(data={"y": msgpack.ExtType(1, msgpack.packb(((-1,), "int64", bytes(8))))}), r"int64 \[-1\] cannot have"),
        (
            dict(data={"y": msgpack.ExtType(1, msgpack.packb(((2,), "object", bytes(16))))}),
            "an array has dtype object: expected numbers",
        ),
        (dict(data={"y": msgpack.ExtType(4, msgpack.packb(((2,), [b"a", 5])))}), "byte strings has elements of another type"),
        (dict(data={"y": msgpack.ExtType(9, b"")}), "extension 9 is not an array"),
        (dict(data={"y": packed(GOOD)}, client_id=b"\xff\xfe"), "Client id .*xff.* is not UTF-8: rename it"),
        (dict(data={"y": packed(GOOD)}, client_id=7), "Client id is 7: expected text"),
        (dict(data={}), "its data are a dict: expected a map"),
    ],
)
def test_damaged_rows_are_refused_naming_file_and_client(tmp_path, row, message):
    path = file_of(tmp_path / "bad.sqlite", **row)
    with pytest.raises(FormatError, match=f"bad.sqlite.*{message}"):
        list(read_fedjax_sqlite(path))


def test_a_decompression_bomb_is_refused(tmp_path):
    """Neither 300 MiB of zeros in 300 KB nor a list that declares 2**32 members is allocated."""
    compressor = zlib.compressobj(1)
    zeros = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(300)) + compressor.flush()
    path = file_of(tmp_path / "bomb.sqlite", zeros)
    with pytest.raises(FormatError, match="bomb.sqlite.*'ann'.*limit of 256 MiB"):
        list(read_fedjax_sqlite(path))
    path = file_of(tmp_path / "list.sqlite", zlib.compress(b"\x81\xa1x\xdd\xff\xff\xff\xff"))
    tracemalloc.start()
    with pytest.raises(FormatError, match="list.sqlite.*'ann'"):
        list(read_fedjax_sqlite(path))
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_inconsistent_or_repeated_clients_are_refused(tmp_path):
    clients = [ClientDataset("a", {"x": np.zeros(2)}), ClientDataset("b", {"x": np.zeros(2, np.float32)})]
    write_fedjax_sqlite(clients, tmp_path / "bad.sqlite")
    with pytest.raises(FormatError, match="bad.sqlite: Feature 'x' of client 'b' is float32.*client 'a' is float64"):
        read_fedjax_sqlite(tmp_path / "bad.sqlite").load()
    with pytest.raises(ValueError, match="Client ids must be unique, but 'a' occurs more than once"):
        write_fedjax_sqlite(clients[:1] * 2, tmp_path / "twice.sqlite")
    connection = sqlite3.connect(tmp_path / "twice.sqlite")
    connection.execute("CREATE TABLE federated_data (client_id, data, num_examples)")
    row = b"a", zlib.compress(msgpack.packb({"y": packed(GOOD)})), 2
    connection.executemany("INSERT INTO federated_data VALUES (?, ?, ?)", [row, row])
    connection.commit()
    connection.close()
    with pytest.raises(FormatError, match="twice.sqlite.*'a' occurs more than once"):
        read_fedjax_sqlite(tmp_path / "twice.sqlite").load()


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file .*none.sqlite"):
        read_fedjax_sqlite(tmp_path / "none.sqlite")
    with pytest.raises(FormatError, match="is a folder"):
        read_fedjax_sqlite(tmp_path)
    (tmp_path / "text.sqlite").write_text("some text")
    with pytest.raises(FormatError, match="text.sqlite.*not a SQLite file"):
        read_fedjax_sqlite(tmp_path / "text.sqlite")
    connection = sqlite3.connect(tmp_path / "other.sqlite")
    connection.execute("CREATE TABLE federated_data (client_id BLOB)")
    connection.close()
    with pytest.raises(FormatError, match=r"other.sqlite.*FedJAX's table federated_data.*found columns \['client_id'\]"):
        read_fedjax_sqlite(tmp_path / "other.sqlite")


def test_a_write_that_fails_leaves_no_file(tmp_path):
    def clients():
        yield ClientDataset("a", {"x": np.zeros(2)})
        raise KeyError("the source is broken")

    with pytest.raises(KeyError):
        write_fedjax_sqlite(clients(), tmp_path / "a.sqlite")
    assert list(tmp_path.iterdir()) == []
