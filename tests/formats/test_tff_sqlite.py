"""TFF's SQLite layout."""

import lzma
import sqlite3

import numpy as np
import pytest
from formats.clients import contents, some_clients

from fedsim.data import ClientDataset, FederatedData, FormatError
from fedsim.formats import read_tff_sqlite, write_tff_sqlite
from fedsim.formats._example_proto import serialized


def tff_file(path, examples, metadata, index=True):
    """Writes a file with the SQL statements of TFF's sql_client_data_utils.py; only the published files have an index."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);"
    )
    connection.execute(
        "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);"
    )
    if index:
        connection.execute("CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);")
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", examples)
    connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
    connection.commit()
    connection.close()
    return path


def row(split, client_id, y):
    return split, client_id, serialized({"y": np.array(y), "word": b"%d" % y})


ROWS = [row("train", "b", 1), row("train", "a", 2), row("test", "a", 3), row("train", "b", 4), row("train", "a", 5)]
CLIENTS = [("b", "train", 2), ("a", "train", 2), ("a", "test", 1), ("c", "train", 0)]


@pytest.mark.parametrize("index", [True, False])
def test_each_split_has_its_clients_by_name_and_their_rows_in_order(tmp_path, index):
    path = tff_file(tmp_path / "a.sqlite", ROWS, CLIENTS, index)
    train = read_tff_sqlite(path, "train")
    assert train.num_clients == 3
    assert [(c.client_id, c["y"].tolist(), c["word"].tolist()) for c in train] == [
        ("a", [2, 5], [b"2", b"5"]),
        ("b", [1, 4], [b"1", b"4"]),
        ("c", [], []),
    ]
    assert [(c.client_id, c["y"].tolist()) for c in read_tff_sqlite(path, "test")] == [("a", [3])]


def test_round_trip_of_two_splits(tmp_path):
    train, test = some_clients((3, 0, 2)), some_clients((1, 1))
    write_tff_sqlite({"train": train, "test": test}, tmp_path / "a.sqlite")
    features = {"x": ((2, 3), np.float32), "y": ((), np.int64), "words": ((), bytes)}
    assert contents(read_tff_sqlite(tmp_path / "a.sqlite", "train", features)) == contents(train)
    assert contents(read_tff_sqlite(tmp_path / "a.sqlite", "test", features)) == contents(test)


def test_the_split_must_be_named_if_there_are_several(tmp_path):
    path = tff_file(tmp_path / "a.sqlite", ROWS, CLIENTS)
    for split in (None, "held_out"):
        with pytest.raises(ValueError, match=rf"split= one of \['test', 'train'\].*a.sqlite; got split={split!r}"):
            read_tff_sqlite(path, split)


@pytest.mark.parametrize("container", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_an_archive_is_read_and_its_copy_is_deleted_with_the_stream(tmp_path, monkeypatch, container):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    path = tff_file(tmp_path / "a.sqlite", ROWS, CLIENTS)
    (tmp_path / "a.sqlite.lzma").write_bytes(lzma.compress(path.read_bytes(), container))
    stream = read_tff_sqlite(tmp_path / "a.sqlite.lzma", "train")
    assert len(list(temporary.iterdir())) == 1
    assert contents(stream) == contents(read_tff_sqlite(path, "train"))
    del stream
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_an_archive_truncated_anywhere_is_refused_and_leaves_no_copy(tmp_path, monkeypatch, share):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    whole = lzma.compress(tff_file(tmp_path / "a.sqlite", ROWS, CLIENTS).read_bytes())
    (tmp_path / "cut.lzma").write_bytes(whole[: max(7, int(share * len(whole)))])
    with pytest.raises(FormatError, match="cut.lzma: truncated or damaged"):
        read_tff_sqlite(tmp_path / "cut.lzma", "train")
    assert list(temporary.iterdir()) == []


def test_an_archive_that_requires_gigabytes_of_memory_is_refused(tmp_path):
    """The second to fifth byte of a legacy archive are the size of its dictionary."""
    archive = bytearray(lzma.compress(tff_file(tmp_path / "a.sqlite", ROWS, CLIENTS).read_bytes(), lzma.FORMAT_ALONE))
    archive[1:5] = (2**31).to_bytes(4, "little")
    (tmp_path / "bomb.lzma").write_bytes(archive)
    with pytest.raises(FormatError, match="bomb.lzma.*Memory usage limit exceeded"):
        read_tff_sqlite(tmp_path / "bomb.lzma", "train")


@pytest.mark.parametrize(
    ("examples", "metadata", "message"),
    [
        (ROWS[:1], [("b", "train", 2)], "client 'b': 1 examples, but client_metadata has 2"),
        ([*ROWS[:1], row("train", "z", 9)], [("b", "train", 1)], "'z' has examples, but is not listed"),
        (ROWS[:1], [("b", "train", 1), ("b", "train", 1)], "client 'b': 0 examples, but"),
        ([("train", "b", b"\x0a\xff")], [("b", "train", 1)], "client 'b': example 0 is not a complete tf.train.Example"),
        ([("train", "b", "text")], [("b", "train", 1)], "client 'b': an example is not bytes"),
        ([ROWS[0], ("train", "b", serialized({"y": b"1", "word": b""}))], [("b", "train", 2)], "client 'b': .*'y' is bytes"),
        ([], [("b", "train", 0)], "none of the 1 clients has examples"),
        ([], [], "no splits, so it has no clients"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, examples, metadata, message):
    path = tff_file(tmp_path / "bad.sqlite", examples, metadata)
    with pytest.raises(FormatError, match=f"bad.sqlite: .*{message}"):
        read_tff_sqlite(path).load()


def test_other_tables_are_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / "other.sqlite")
    connection.execute("CREATE TABLE examples (client_id TEXT)")
    connection.close()
    with pytest.raises(FormatError, match="other.sqlite: Expected TFF's table examples"):
        read_tff_sqlite(tmp_path / "other.sqlite")


def test_integers_that_a_feature_cannot_hold_are_refused_naming_it(tmp_path):
    data = FederatedData.from_clients({"ann": {"y": np.array([1, 300])}})
    write_tff_sqlite(data, tmp_path / "a.sqlite")
    with pytest.raises(
        FormatError, match="a.sqlite: client 'ann': Feature 'y' has values from 1 to 300, which uint8 cannot represent"
    ):
        read_tff_sqlite(tmp_path / "a.sqlite", features={"y": ((), np.uint8)}).load()


def test_clients_may_be_a_stream(tmp_path):
    write_tff_sqlite((ClientDataset(i, {"y": np.arange(3)}) for i in "ab"), tmp_path / "a.sqlite", "held_out")
    assert [c.client_id for c in read_tff_sqlite(tmp_path / "a.sqlite", "held_out")] == ["a", "b"]
