"""Tests of files with an example per row."""

import json

import numpy as np
import pandas as pd
import pytest

from fedsim.data import FederatedData, FormatError
from fedsim.formats import is_data_file, read_rows, write_leaf

TABLE = pd.DataFrame({"user": ["bob", "ann", "bob", "eve"], "x": [1.5, -2.0, 3.0, 0.25], "y": [0, 1, 1, 0]})


def write_npz(table, path):
    np.savez(path, **{name: np.array(table[name].tolist()) for name in table})


WRITERS = {
    "a.csv": lambda table, path: table.to_csv(path, index=False),
    "a.csv.gz": lambda table, path: table.to_csv(path, index=False),
    "a.tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    "a.parquet": lambda table, path: table.to_parquet(path),
    "a.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
    "a.npz": write_npz,
}


def read_table(rows):
    return pd.DataFrame({name: column.tolist() for name, column in rows.columns.items()})


@pytest.mark.parametrize("name", WRITERS)
def test_tables_that_pandas_writes_are_read(tmp_path, name):
    WRITERS[name](TABLE, tmp_path / name)
    assert is_data_file(str(tmp_path / name))
    rows = read_rows(tmp_path / name)
    pd.testing.assert_frame_equal(read_table(rows), TABLE)
    assert (len(rows), rows.missing, rows.clients, rows.test) == (4, {}, None, None)


def test_datasets_of_hugging_face_on_disk_are_read_with_their_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_pandas(TABLE)
    whole.select([3, 1]).save_to_disk(tmp_path / "one")  # save_to_disk applies the selection
    pd.testing.assert_frame_equal(read_table(read_rows(tmp_path / "one")), TABLE.iloc[[3, 1]].reset_index(drop=True))
    datasets.DatasetDict(train=whole, test=whole.select([2])).save_to_disk(tmp_path / "two")
    rows = read_rows(tmp_path / "two")
    pd.testing.assert_frame_equal(read_table(rows), pd.concat([TABLE, TABLE.iloc[[2]]]).reset_index(drop=True))
    assert rows.test.tolist() == [False] * 4 + [True]
    assert rows.place(4) == "row 0 of test" and rows.validation is None
    datasets.DatasetDict(train=whole, dev=whole.select([1]), test=whole.select([2])).save_to_disk(tmp_path / "three")
    rows = read_rows(tmp_path / "three")
    pd.testing.assert_frame_equal(read_table(rows), pd.concat([TABLE, TABLE.iloc[[2, 1]]]).reset_index(drop=True))
    assert rows.test.tolist() == [False] * 4 + [True, False] and rows.validation.tolist() == [False] * 5 + [True]
    assert rows.place(5) == "row 0 of validation"
    datasets.DatasetDict(train=whole, validation=whole).save_to_disk(tmp_path / "no test")
    with pytest.raises(FormatError, match="with the parts train, validation: expected train and test; give the folder of one"):
        read_rows(tmp_path / "no test")


def test_a_third_part_is_validation_data(tmp_path):
    """In folders and in files of clients; without a part test, there is none."""
    lines = [{"client_id": name, "train": [{"y": 1}], "test": [{"y": 2}, {"y": 3}], "val": [{"y": 4}]} for name in "ab"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = tmp_path / "leaf"
    for part, y in (("train", [1]), ("test", [2, 3]), ("validation", [4])):
        (folder / part).mkdir(parents=True)
        write_leaf(FederatedData.from_clients({name: {"y": np.array(y)} for name in "ab"}), folder / part / "a.json")
    for path in (tmp_path / "a.jsonl", folder):
        rows = read_rows(path)
        assert rows.columns["y"].tolist() == [1, 1, 2, 3, 2, 3, 4, 4]
        assert rows.test.tolist() == [False] * 2 + [True] * 4 + [False] * 2
        assert rows.validation.tolist() == [False] * 6 + [True] * 2
        assert rows.clients.tolist() == list("abaabbab")
        assert rows.place(7) == "example 0 of client 'b' of validation"


def test_files_with_clients_are_read_with_these_and_leafs_folders_with_their_splits(tmp_path):
    data = FederatedData.from_clients({"b": {"x": np.array([[1.0, 2.0]])}, "a": {"x": np.array([[3.0, 4.0], [5.0, 6.0]])}})
    data.save(tmp_path / "a.h5")
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        write_leaf(data, tmp_path / part / "a.json")
    packed, leaf = read_rows(tmp_path / "a.h5"), read_rows(tmp_path)
    assert packed.clients.tolist() == ["b", "a", "a"] and packed.test is None
    assert packed.place(2) == "example 1 of client 'a'"
    assert leaf.clients.tolist() == ["b", "a", "a"] * 2 and leaf.test.tolist() == [False] * 3 + [True] * 3
    for rows, times in ((packed, 1), (leaf, 2)):
        np.testing.assert_array_equal(rows.columns["x"], np.tile(np.arange(1, 7).reshape(3, 2), (times, 1)))


def test_json_lines_may_begin_with_clients_without_examples(tmp_path):
    lines = [{"client_id": name, "train": [], "test": []} for name in "ab"]
    lines.append({"client_id": "c", "train": [{"x": 1}], "test": [{"x": 2}]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read_rows(tmp_path / "a.jsonl")
    assert rows.clients.tolist() == ["c", "c"] and rows.columns["x"].tolist() == [1, 2]
    assert rows.test.tolist() == [False, True]
    (tmp_path / "a.jsonl").write_text('{"x": [], "y": 1}\n{"x": [], "y": 2}\n')
    assert read_rows(tmp_path / "a.jsonl").columns["y"].tolist() == [1, 2]


def test_json_lines_with_a_client_per_line_are_read_with_their_splits(tmp_path):
    lines = [
        {"client_id": client, "train": [{"y": y}, {"y": y + 1}], "test": [{"y": -y}]} for client, y in (("a", 1), ("b", 5))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read_rows(tmp_path / "a.jsonl")
    assert rows.columns["y"].tolist() == [1, 2, 5, 6, -1, -5]
    assert rows.clients.tolist() == list("aabbab") and rows.test.tolist() == [False] * 4 + [True] * 2


def test_images_in_folders_have_the_names_of_the_folders_as_columns(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, [4, 3, 2, 3], np.uint8)
    places = [("ann", "cat"), ("ann", "dog"), ("bob", "cat"), ("bob", "dog")]
    for image, folders in zip(pixels, places, strict=True):
        tmp_path.joinpath(*folders).mkdir(parents=True)
        Image.fromarray(image).save(tmp_path.joinpath(*folders, "1.png"))
    rows = read_rows(tmp_path)
    np.testing.assert_array_equal(rows.columns["image"], pixels)
    assert list(zip(rows.columns["folder_1"], rows.columns["folder_2"], strict=True)) == places
    Image.new("L", (9, 9)).save(tmp_path / "ann" / "cat" / "2.png")
    with pytest.raises(FormatError, match=r"2.png has 9 by 9 pixels, and .*1.png has 2 by 3: resize"):
        read_rows(tmp_path)


@pytest.mark.parametrize(("mode", "suffix"), [("I;16", "png"), ("I", "tif"), ("F", "tif")])
def test_images_with_more_than_8_bits_per_channel_are_refused(tmp_path, mode, suffix):
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    Image.new(mode, (3, 2), 300).save(tmp_path / "cat" / f"1.{suffix}")
    with pytest.raises(FormatError, match=rf"1.{suffix} has more than 8 bits per channel .*mode [IF].*\.npz"):
        read_rows(tmp_path)


def test_images_in_a_table_are_those_of_hugging_face(tmp_path):
    datasets, Image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, [3, 4, 5], np.uint8)
    features = datasets.Features(image=datasets.Image())
    whole = datasets.Dataset.from_dict({"image": [Image.fromarray(each) for each in pixels]}, features=features)
    whole.save_to_disk(tmp_path / "a")
    whole.to_parquet(tmp_path / "a.parquet")
    for name in ("a", "a.parquet"):
        np.testing.assert_array_equal(read_rows(tmp_path / name).columns["image"], pixels[..., np.newaxis])


def test_missing_values_have_the_lines_of_the_file(tmp_path):
    (tmp_path / "a.csv").write_text('user,x,city\nann,1,Bern\n\nbob,,"New\nYork"\nbob,NA,NA\neve,nan,\n')
    rows = read_rows(tmp_path / "a.csv")
    places = {name: [rows.place(row) for row in np.flatnonzero(absent)] for name, absent in rows.missing.items()}
    assert places == {"x": ["line 5", "line 6", "line 7"], "city": ["line 7"]}  # NA is no number, but may be a text
    (tmp_path / "a.jsonl").write_text('{"x": 1, "z": null}\n\n{"z": null}\n')
    rows = read_rows(tmp_path / "a.jsonl")
    assert [rows.place(row) for row in np.flatnonzero(rows.missing["x"])] == ["line 3"] and rows.missing["z"].all()


def test_names_of_columns_may_follow_empty_lines_and_be_numbers_if_they_are_said_to_be_names(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf\r\n2020,2021\r\n1,2\r\n3,\r\n")
    rows = read_rows(tmp_path / "a.csv", header=True)
    assert list(rows.columns) == ["2020", "2021"] and rows.place(1) == "line 4"


def test_ids_are_read_as_text_on_request(tmp_path):
    (tmp_path / "a.csv").write_text("user,x\n07,1\n7,2\n")
    assert read_rows(tmp_path / "a.csv", text_columns=["user"]).columns["user"].tolist() == ["07", "7"]
    assert read_rows(tmp_path / "a.csv").columns["user"].tolist() == [7, 7]


def test_whole_numbers_that_are_ids_are_not_rounded_where_one_is_missing(tmp_path):
    ids = [2**53, 2**53 + 1, None, 7]
    table = pd.DataFrame({"user": pd.array(ids, "Int64"), "x": pd.array(ids, "Int64")})
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"user": id, "x": id}) + "\n" for id in ids))
    for name in ("a.parquet", "a.jsonl"):
        rows = read_rows(tmp_path / name, text_columns=["user"])
        assert rows.columns["user"].tolist() == ["9007199254740992", "9007199254740993", "", "7"]
        assert rows.columns["x"].dtype == np.float64
        assert all(rows.missing[column].tolist() == [False, False, True, False] for column in table)


def test_a_type_that_is_no_feature_is_reported_and_not_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1, "z": {"a": 1}}\n{"x": 2, "z": {"a": 2}}\n')
    rows = read_rows(tmp_path / "a.jsonl")
    assert (list(rows.columns), rows.unsupported) == (["x"], {"z": "struct<a: int64>"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "1,2\n3,4\n", r"a.csv: line 1: the file seems to have no header.*'1'.*header=False \(--header False\)"),
        ("a.csv", "a,b\n1,2\n3\n", "line 3: Expected 2 columns, got 1"),
        ("a.csv", "a,a\n1,2\n", "line 1: two columns have the name 'a'"),
        ("a.csv", "a,b\n", "a.csv has no rows"),
        ("a.csv", "a;b\n1;2\n", "separated by ';'"),
        ("a.csv", "", "an empty file"),
        ("a.csv", "a,b\n1,2\nZ\xfcrich,3\n".encode("latin-1"), r"line 3: not UTF-8, got b'\\xfc': save it as UTF-8"),
        ("a.json", '[{"x": 1, "y": 2}]', "no JSON that can be read: write an object per line, without brackets"),
        ("a.jsonl", '{"x": 1}\n\n{"x": "b"}\n', "line 3: column 'x' is str here and a number in line 1"),
        ("a.jsonl", '{"x": 1}\n{"x": \n', "line 2: .*expected an object per line"),
        ("a.jsonl", '{"x": 1}\n[1]\n', r"line 2: Expected an object.* got list"),
    ],
)
def test_errors_name_the_file_the_line_and_a_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, match=message):
        read_rows(tmp_path / name)


def test_arrays_of_different_lengths_and_objects_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(2))
    with pytest.raises(FormatError, match="different lengths, {'x': 3, 'y': 2}"):
        read_rows(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.array([None, 1], object))
    with pytest.raises(FormatError, match="array 'x' cannot be read"):
        read_rows(tmp_path / "a.npz")


def test_a_file_without_a_header_gets_numbered_columns(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,\n")
    rows = read_rows(tmp_path / "a.csv", header=False)
    assert rows.columns["column_1"].tolist() == [1, 3] and rows.place(1) == "line 2"
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(FormatError, match="no CSV file, so it takes no header=False"):
        read_rows(tmp_path / "a.npz", header=False)
