"""Recognition of formats, and conversion between them."""

import errno
import gzip
import io
import lzma
import sqlite3
import tarfile
import zipfile

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from formats.clients import REAL, contents, needs_real, some_clients

from fedsim import formats
from fedsim.data import ClientDataset, FederatedData, FormatError
from fedsim.formats import convert, read, recognize, write_fedjax_sqlite, write_leaf, write_table, write_tff_sqlite


def tff_hdf5(data, path):
    with h5py.File(path, "w") as file:
        for client in data:
            for name, column in client.examples.items():
                file[f"examples/{client.client_id}/{name}"] = column


def jsonl(data, path):
    path.write_text('{"client_id": "ann", "train": [{"y": 1}]}\n')


WRITERS = {
    "packed": FederatedData.save,
    "tff_hdf5": lambda data, path: tff_hdf5(FederatedData.from_clients({"a": {"y": data["w0"]["y"]}}), path),
    "tff_sqlite": write_tff_sqlite,
    "fedjax_sqlite": write_fedjax_sqlite,
    "leaf": write_leaf,
    "json_lines": jsonl,
    "csv": lambda data, path: path.write_text("client_id,y\nann,1\n"),
    "parquet": write_table,
}


@pytest.mark.filterwarnings("ignore:Clients without examples")
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_recognized_under_any_name(tmp_path, name):
    WRITERS[name](some_clients(), tmp_path / "file")
    assert recognize(tmp_path / "file") == name
    options = {"client": "client_id"} if name in ("csv", "parquet") else {}
    assert sum(len(client) for client in read(tmp_path / "file", **options)) > 0


@pytest.mark.parametrize(("name", "compress"), [("leaf", gzip.compress), ("csv", gzip.compress), ("tff_sqlite", lzma.compress)])
def test_a_compressed_file_is_recognized(tmp_path, name, compress):
    WRITERS[name](some_clients(), tmp_path / "file")
    (tmp_path / "file").write_bytes(compress((tmp_path / "file").read_bytes()))
    assert recognize(tmp_path / "file") == name


@needs_real
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("femnist/femnist_test.h5", "tff_hdf5"),
        ("femnist/leaf_sample/test", "leaf"),
        ("formats/femnist_20_writers_fedjax.sqlite", "fedjax_sqlite"),
        ("stackexchange/stackexchange.jsonl.gz", "json_lines"),
        ("tabular_vfl/breast_hetero_guest.csv.gz", "csv"),
    ],
)
def test_real_files_are_recognized(file, name):
    assert recognize(REAL / file) == name


def zipped():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a", "b")
    return content.getvalue()


def tarred():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"", "an empty file"),
        (zipped(), "a ZIP archive: unpack it"),
        (tarred(), "a tar archive: unpack it"),
        (gzip.compress(tarred(), mtime=0), "a tar archive: unpack it"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 0]), "an idx file, which has no clients: read its array by read_idx"),
        (b"\x93NUMPY\x01\0", "a NumPy array"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "binary data beginning with b'.*PNG"),
        (b"once upon a time", "text beginning with 'once upon a time'"),
    ],
)
def test_the_error_for_an_unknown_file_describes_its_content(tmp_path, content, looks):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FormatError, match=f"file looks like {looks}.* Known formats: packed, tff_hdf5, .*tfds"):
        read(tmp_path / "file")


def test_an_unknown_folder_or_database_is_refused(tmp_path):
    with pytest.raises(FormatError, match="looks like a folder without"):
        recognize(tmp_path)
    connection = sqlite3.connect(tmp_path / "a.sqlite")
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(FormatError, match=r"looks like SQLite with tables \['mine'\]"):
        recognize(tmp_path / "a.sqlite")
    with pytest.raises(FileNotFoundError):
        recognize(tmp_path / "none")


@pytest.mark.filterwarnings("ignore:Clients without examples")
def test_options_that_do_not_fit_the_format_are_refused(tmp_path):
    write_leaf(some_clients(), tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"Format leaf has no option 'split'. Its options are: features"):
        read(tmp_path / "a.json", split="train")
    write_table(some_clients(), tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"Format csv needs client= .*: the name of the column of client ids"):
        read(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="Expected format= .*to be one of .*parquet.*, got 'excel'"):
        read(tmp_path / "a.csv", format="excel")


@pytest.mark.parametrize(
    ("suffix", "target_format"),
    [(".h5", None), (".json", None), (".parquet", None), (".sqlite", "fedjax_sqlite"), (".bin", "packed"), (".h5", "tff_hdf5")],
)
def test_conversion_to_a_format_and_back_changes_nothing(tmp_path, suffix, target_format):
    data = some_clients((3, 1, 2))
    write_fedjax_sqlite(data, tmp_path / "source")
    target = tmp_path / f"target{suffix}"
    convert(tmp_path / "source", target, target_format=target_format, progress=False)
    options = {"client": "client_id"} if suffix == ".parquet" else {}
    convert(target, tmp_path / "back.h5", progress=False, **options)
    assert contents(FederatedData.open(tmp_path / "back.h5")) == contents(data)


def test_a_split_and_its_features_can_be_selected(tmp_path):
    write_tff_sqlite({"train": some_clients((3, 1)), "test": some_clients((1, 2))}, tmp_path / "a.sqlite")
    convert(tmp_path / "a.sqlite", tmp_path / "a.h5", split="test", features={"y": ((), np.int16)}, progress=False)
    assert FederatedData.open(tmp_path / "a.h5").columns["y"].dtype == np.int16
    assert FederatedData.open(tmp_path / "a.h5").sizes.tolist() == [1, 2]


def test_targets_without_a_format_are_refused(tmp_path):
    write_leaf(some_clients(), tmp_path / "a.json")
    for target, options in (("b.sqlite", {}), ("b", {}), ("b.h5", {"target_format": "tfds"})):
        with pytest.raises(ValueError, match="Expected a target that ends in .*target_format= .*one of .*fedjax_sqlite.*; got"):
            convert(tmp_path / "a.json", tmp_path / target, **options)
    for target, name, ending in (("b.txt", "csv", ".csv or .tsv"), ("b.csv", "parquet", ".parquet")):
        with pytest.raises(ValueError, match=f"Expected a target that ends in {ending} for {name}, got .*{target}"):
            convert(tmp_path / "a.json", tmp_path / target, target_format=name)
        assert not (tmp_path / target).exists()


def test_the_last_suffix_says_the_format_and_only_csv_is_compressed(tmp_path):
    data = some_clients((3, 1))
    write_leaf(data, tmp_path / "a.json")
    convert(tmp_path / "a.json", tmp_path / "people.csv.parquet", progress=False)
    write_table(data, tmp_path / "b.csv.parquet")
    write_table(data, tmp_path / "c.parquet.csv.gz")
    write_table(data, tmp_path / "d.tsv.csv")
    assert b"\t" not in (tmp_path / "d.tsv.csv").read_bytes()
    names = ["people.csv.parquet", "b.csv.parquet", "c.parquet.csv.gz"]
    assert [recognize(tmp_path / name) for name in names] == ["parquet", "parquet", "csv"]
    assert (tmp_path / "c.parquet.csv.gz").read_bytes()[:2] == b"\x1f\x8b"
    for target in ("b.json.gz", "b.h5.gz", "b.parquet.gz"):
        with pytest.raises(ValueError, match=rf"Expected a name without \.gz, which only CSV files may have, got .*{target}"):
            convert(tmp_path / "a.json", tmp_path / target)
        assert not (tmp_path / target).exists()
    with pytest.raises(ValueError, match=r"Expected a name without \.gz"):
        write_table(data, tmp_path / "b.gz")


@pytest.mark.parametrize("target", ["b.h5", "b.json", "b.parquet"])
def test_a_conversion_that_fails_leaves_no_file(tmp_path, target):
    write_leaf(some_clients((30, 20)), tmp_path / "a.json")
    content = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").write_bytes(content[: len(content) * 9 // 10])
    with pytest.raises(FormatError, match="a.json: "):
        convert(tmp_path / "a.json", tmp_path / target, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_nothing_is_printed_without_progress(tmp_path, capfd):
    write_leaf(some_clients(), tmp_path / "a.json")
    convert(tmp_path / "a.json", tmp_path / "b.json", progress=False)
    assert capfd.readouterr().err == ""


_WRITERS = [
    formats.write_leaf,
    formats.write_fedjax_sqlite,
    formats.write_tff_sqlite,
    formats.write_tff_hdf5,
    formats.write_table,
]


@pytest.mark.parametrize("write", _WRITERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "M8[D]", "m8[s]", "V4", [("a", "i4")], np.longdouble])
def test_a_dtype_that_a_format_cannot_hold_is_refused_naming_client_and_feature(tmp_path, write, dtype):
    with pytest.raises(ValueError, match="Feature 'v' of client 'ann' is .*convert it first"):
        write([ClientDataset("ann", {"v": np.zeros(2, dtype)})], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", _WRITERS)
def test_numpy_strings_are_written_as_text(tmp_path, write):
    write(
        [ClientDataset("ann", {"s": np.array([b"to", b""]), "u": np.array(["bé", ""]), "n": np.array([1, 2], ">i4")})],
        tmp_path / "a",
    )
    (ann,) = formats.read(tmp_path / "a", **({"client": "client_id"} if write is formats.write_table else {}))
    assert ann["s"].tolist() == [b"to", b""] and ann["u"].tolist() == ["bé".encode(), b""] and ann["n"].tolist() == [1, 2]


def test_an_integer_beyond_int64_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match="'v' of client 'ann' has 18446744073709551615"):
        formats.write_tff_sqlite([ClientDataset("ann", {"v": np.array([2**64 - 1], np.uint64)})], tmp_path / "a.sqlite")


@pytest.mark.parametrize("write", [formats.write_fedjax_sqlite, formats.write_tff_sqlite])
def test_a_full_disk_raises_an_os_error(tmp_path, monkeypatch, write):
    connect = sqlite3.connect

    def small(*where, **how):
        connection = connect(*where, **how)
        connection.execute("PRAGMA max_page_count = 4")  # SQLite raises the same error as for a full disk.
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    noise = np.random.default_rng(0).integers(0, 255, 100_000)
    with pytest.raises(OSError, match="disk is full") as caught:
        write([ClientDataset("ann", {"v": noise})], tmp_path / "a.sqlite")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
