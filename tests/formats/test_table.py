"""CSV and Parquet files with a client column, compared with pyarrow and the standard library's csv."""

import csv
import datetime
import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from formats.clients import contents, some_clients, text

from fedsim.data import ClientDataset, FederatedData, FormatError
from fedsim.formats import read_table, write_table


def csv_file(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def parquet_file(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


def test_clients_are_in_order_of_first_appearance_and_keep_their_row_order(tmp_path):
    path = csv_file(tmp_path / "a.csv", "y,user,word", "1,bob,to", "2,ann,be", "3,bob,or", "4,ann,né", '5,bob,"not, ""to"""')
    read = read_table(path, "user")
    assert read.num_clients == 2
    expected = {
        "bob": {"y": ("int64", (), [1, 3, 5]), "word": ("object", (), [b"to", b"or", b'not, "to"'])},
        "ann": {"y": ("int64", (), [2, 4]), "word": ("object", (), [b"be", "né".encode()])},
    }
    assert contents(read) == contents(read) == expected


def test_quoted_line_breaks_are_read_wherever_a_block_of_the_file_ends(tmp_path):
    """Arrow reads blocks of 8 MiB, the first of which ends inside of the second text."""
    long = "line\n" * (6 << 18)
    path = csv_file(tmp_path / "a.csv", "user,text", f'ann,"{long}"', f'bob,"{long}"')
    assert [client["text"].tolist() for client in read_table(path, "user")] == [[long.encode()]] * 2


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".parquet"])
def test_round_trip(tmp_path, suffix):
    data = some_clients((3, 1, 2))
    path = tmp_path / f"a{suffix}"
    write_table(data, path)
    if suffix == ".parquet":
        assert contents(read_table(path, "client_id")) == contents(data)
    else:
        features = {"x": ((2, 3), np.float32), "y": ((), np.int64), "words": ((), bytes)}
        assert contents(read_table(path, "client_id", features, stack={"x": "x_*"})) == contents(data)


def test_other_libraries_read_the_written_files(tmp_path):
    ann = {"x": np.array([[1.5, 2], [3, 4]]), "t": text(b"p,q", b"r")}
    data = FederatedData.from_clients({"a": ann, "b": {"x": np.zeros([1, 2]), "t": text(b"")}})
    write_table(data, tmp_path / "a.csv.gz", client="who")
    rows = list(csv.DictReader(gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).decode().splitlines()))
    assert rows[0] == {"who": "a", "x_0": "1.5", "x_1": "2", "t": "p,q"}
    assert [row["who"] for row in rows] == ["a", "a", "b"]
    write_table(data, tmp_path / "a.parquet", client="who")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["x"].to_pylist() == [[1.5, 2], [3, 4], [0, 0]]
    assert table["t"].to_pylist() == ["p,q", "r", ""]


@pytest.mark.parametrize("bucket", [1, 300, 10_000])
def test_the_bucket_size_does_not_change_the_result(tmp_path, monkeypatch, bucket):
    """The rows of 20 clients are mixed, and the expected groups are computed by a loop over the rows."""
    random = np.random.default_rng(0)
    users, values = random.integers(20, size=500), random.random((500, 3))
    words = [f"w{i}" for i in range(500)]
    path = parquet_file(tmp_path / "a.parquet", user=users, x=list(values), word=words)
    expected = {}
    for user, value, word in zip(users, values, words, strict=True):
        expected.setdefault(str(user), []).append((value.tolist(), word.encode()))
    monkeypatch.setattr("fedsim.formats._table._BUCKET_BYTES", bucket)
    read = {c.client_id: list(zip(c["x"].tolist(), c["word"].tolist(), strict=True)) for c in read_table(path, "user")}
    assert read == expected
    assert list(read) == list(expected)


@pytest.mark.parametrize(
    ("suffix", "ids"),
    [
        ("csv", ["007", "7", "07"]),
        ("tsv", ["7", "7.0", "1e3", "1000", "12345678901234567890", "12345678901234567891"]),
        ("csv.gz", ["true", "True", "TRUE"]),
    ],
)
def test_client_ids_in_csv_are_the_text_of_the_file(tmp_path, suffix, ids):
    """Read as numbers or truth values, several of them would be equal."""
    lines = ["user,y", *[f"{each},{i}" for i, each in enumerate(ids)], f"{ids[1]},100", f"{ids[0]},200"]
    content = "\n".join(lines).replace(",", "\t" if suffix == "tsv" else ",").encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == "csv.gz" else content)
    expected = {each: [i] for i, each in enumerate(ids)} | {ids[0]: [0, 200], ids[1]: [1, 100]}
    for features in (None, ["y"], {"y": ((), np.int64)}):
        assert {client.client_id: client["y"].tolist() for client in read_table(path, "user", features)} == expected


def test_temporary_files_are_deleted(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("fedsim.formats._table._BUCKET_BYTES", 100)
    path = parquet_file(tmp_path / "a.parquet", user=np.arange(100) % 7, y=np.arange(100))
    for _ in read_table(path, "user"):
        assert list(temporary.iterdir())
        break
    assert list(temporary.iterdir()) == []


def test_columns_can_be_stacked_by_name_or_pattern(tmp_path):
    path = csv_file(tmp_path / "a.csv", "x10,user,x2,y", "1,a,2.5,0", "3,a,4,1")
    for members in ("x*", ["x10", "x2"]):
        assert read_table(path, "user", stack={"x": members}).load()["a"]["x"].tolist() == [[1, 2.5], [3, 4]]
    for members, message in (("z*", "names no columns"), (["x2", "z"], "names no columns"), (["user"], "names no columns")):
        with pytest.raises(FormatError, match=f"a.csv.*{message}"):
            read_table(path, "user", stack={"x": members}).load()
    path = csv_file(tmp_path / "b.csv", "x0,user,x1", "1,a,word")
    with pytest.raises(FormatError, match="needs numbers, but column 'x1' is text"):
        read_table(path, "user", stack={"x": "x*"}).load()


def test_parquet_types(tmp_path):
    path = parquet_file(
        tmp_path / "a.parquet",
        user=pa.array([b"u"] * 2, pa.binary()),
        flag=[True, False],
        small=pa.array([1, 2], pa.uint8()),
        half=pa.array(np.array([1, 2], np.float16)),
        word=pa.array(["a", "b"]).dictionary_encode(),
        image=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int16()))),
    )
    assert contents(read_table(path, "user")) == {
        "u": {
            "flag": ("bool", (), [True, False]),
            "small": ("uint8", (), [1, 2]),
            "half": ("float16", (), [1, 2]),
            "word": ("object", (), [b"a", b"b"]),
            "image": ("int16", (2, 2), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        }
    }


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(user=["ann", None], y=[1, 2]), "rows have no client id"),
        (dict(user=["ann", ""], y=[1, 2]), "rows have no client id"),
        (dict(user=[1.0, float("nan")], y=[1, 2]), "rows have no client id"),
        (dict(user=["ann", "ann"], y=[1, None]), "client 'ann': Feature 'y' has no value in row 1 of the client"),
        (dict(user=["ann", "ann"], y=[[1, 2], [1]]), "client 'ann': Feature 'y' has lists of 1 to 2 values"),
        (dict(user=["ann", "bob"], y=[[1, 2], [1]]), "'y' of client 'bob' is int64 \\[1\\]"),
        (dict(user=["ann"], y=[{"a": 1}]), "client 'ann': Feature 'y' has type struct.*Leave the feature out"),
        (dict(user=pa.array([b"\xff"]), y=[1]), "client id .*xff.* is not UTF-8"),
        (dict(who=["ann"], y=[1]), r"the column of clients must be one of \['who', 'y'\], got client='user'"),
        (dict(user=pa.array([], pa.string()), y=pa.array([], pa.int64())), "no rows, so it has no clients"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, columns, message):
    path = parquet_file(tmp_path / "bad.parquet", **columns)
    with pytest.raises(FormatError, match=f"bad.parquet: .*{message}"):
        read_table(path, "user").load()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["user,y", "a,1", "a,1,2"], "Expected 2 columns, got 3"),
        (["user,y", "a,1", ",2"], "rows have no client id"),
        (["user,y", "1,1", ",2"], "rows have no client id"),
        (["user,y,y", "a,1,2"], "two columns have the same name"),
        ([""], "truncated or damaged"),
    ],
)
def test_invalid_csv_is_refused(tmp_path, lines, message):
    path = csv_file(tmp_path / "bad.csv", *lines)
    with pytest.raises(FormatError, match=f"bad.csv: .*{message}"):
        read_table(path, "user").load()


@pytest.mark.parametrize("compress", [False, True])
def test_a_missing_value_is_named_with_its_line_in_the_file(compress, tmp_path):
    content = b'user,x,note\nann,1,"two\nlines"\n\nbob,2,b\nann,,c\n'
    path = tmp_path / ("a.csv.gz" if compress else "a.csv")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(FormatError, match="client 'ann': Feature 'x' has no value in row 1 of the client, line 6 of the file"):
        read_table(path, "user").load()
    path = parquet_file(tmp_path / "a.parquet", user=["ann", "bob", "ann"], y=[1, 2, None])
    with pytest.raises(FormatError, match="row 1 of the client, row 2 of the file"):
        read_table(path, "user").load()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "user;x\nann;1\n", "separated by ';', and this reader expects commas"),
        ("a.csv", "user;x\nann;1,5\nbob;2\n", "separated by ';', and this reader expects commas"),
        ("a.csv", "user\tx\nann\t1\n", "separated by '\\\\t', .*suffix .tsv"),
        ("a.tsv", "user,x\nann,1\n", "separated by ',', and this reader expects tabs"),
        ("a.csv", 'user,x\n"a\nb",1\n\nbob,2,3\n', "line 5: Expected 2 columns, got 3"),
    ],
)
def test_another_separator_and_the_line_of_a_wrong_row_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(FormatError, match=f"{name}: {message}|{name}: .*{message}"):
        read_table(tmp_path / name, "user").load()


def test_a_label_of_another_type_is_refused_wherever_it_is(tmp_path):
    """In the first block it makes the column text, and later it is a conversion error; with a given dtype both are refused."""
    path = csv_file(tmp_path / "near.csv", "user,y", "a,1", "b,two")
    with pytest.raises(FormatError, match="near.csv: .*CSV column #1: CSV conversion error to int64: invalid value 'two'"):
        read_table(path, "user", {"y": ((), np.int64)}).load()
    path = csv_file(tmp_path / "far.csv", "user,y", *["a,1"] * 3_000_000, "b,two")
    with pytest.raises(FormatError, match="far.csv: .*CSV conversion error to int64: invalid value 'two'"):
        read_table(path, "user").load()


def test_csv_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"user,word\na,\xff\xfe\n")
    with pytest.raises(FormatError, match="bad.csv: .*UTF8"):
        read_table(tmp_path / "bad.csv", "user", {"word": ((), bytes)}).load()


def test_unsupported_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Text 't' of client 'ann' is not UTF-8"):
        write_table([ClientDataset("ann", {"t": text(b"\xff")})], tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="'z' has no values"):
        write_table([ClientDataset("ann", {"z": np.zeros((2, 0))})], tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="A feature is called 'client_id'"):
        write_table([ClientDataset("ann", {"client_id": np.zeros(2)})], tmp_path / "a.csv")
    with pytest.raises(ValueError, match="population is empty"):
        write_table([], tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_dates_are_text_and_other_features_are_not_checked(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        csv_file(path, "user,day,y,gap", "a,2020-01-02,1,3", "b,2020-02-03,2,")
    else:
        days = [datetime.date(2020, 1, 2), datetime.date(2020, 2, 3)]
        parquet.write_table(pa.table({"user": ["a", "b"], "day": days, "y": [1, 2], "gap": [3, None]}), path)
    data = read_table(path, "user", ["day", "y"]).load()
    assert data["a"]["day"].tolist() == [b"2020-01-02"] and data["b"]["y"].tolist() == [2]
    assert read_table(path, "user", ["x"], stack={"x": "y*"}).load()["b"]["x"].tolist() == [[2]]
    with pytest.raises(FormatError, match="Feature 'gap' has no value"):
        read_table(path, "user").load()


def test_a_warning_counts_the_clients_without_rows(tmp_path):
    clients = [ClientDataset(name, {"y": np.arange(size)}) for name, size in (("ann", 2), ("bob", 0), ("eve", 0))]
    with pytest.warns(UserWarning, match="2 of them are left out"):
        write_table(clients, tmp_path / "a.csv")
