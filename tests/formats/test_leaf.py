"""LEAF's JSON, and the incremental JSON reader."""

import gzip
import io
import json
import tracemalloc

import numpy as np
import pytest
from formats.clients import REAL, contents, needs_real, some_clients, text

import fedsim
from fedsim.data import ClientDataset, FederatedData, FormatError
from fedsim.formats import read_leaf, write_leaf
from fedsim.formats._json import JsonReader


def leaf_file(path, user_data, sizes=None, **options):
    sizes = [len(data["y"]) for data in user_data.values()] if sizes is None else sizes
    path.write_text(json.dumps({"users": list(user_data), "num_samples": sizes, "user_data": user_data, **options}))
    return path


def test_round_trip(tmp_path):
    data = some_clients()
    write_leaf(data, tmp_path / "a.json")
    assert contents(read_leaf(tmp_path / "a.json")) == contents(data)
    whole = json.loads((tmp_path / "a.json").read_text())
    assert whole["users"] == ["w0", "w1", "w2"]
    assert whole["num_samples"] == [3, 0, 2]
    assert whole["user_data"]["w2"]["y"] == data["w2"]["y"].tolist()


@needs_real
class TestLeafsOwnFiles:
    def test_users_and_pixels_are_read_as_by_json(self):
        folder = REAL / "femnist" / "leaf_sample" / "train"
        (file,) = folder.iterdir()
        expected = json.loads(gzip.decompress(file.read_bytes()))
        clients = list(read_leaf(folder, {"x": ((28, 28), np.float32), "y": ((), np.uint8)}))
        assert [c.client_id for c in clients] == expected["users"]
        for client, size in zip(clients, expected["num_samples"], strict=True):
            data = expected["user_data"][client.client_id]
            assert len(client) == size
            np.testing.assert_array_equal(client["x"].reshape(size, -1), np.array(data["x"], np.float32))
            assert client["y"].tolist() == data["y"]

    def test_the_files_of_a_folder_are_read_in_order(self, tmp_path):
        for split in ("train", "test"):
            (file,) = (REAL / "femnist" / "leaf_sample" / split).iterdir()
            (tmp_path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(FormatError, match="occurs more than once"):  # the splits of a user have the same client id
            read_leaf(tmp_path).load()


def test_hidden_files_and_links_to_nothing_are_no_part_of_a_folder(tmp_path):
    """The hash that a configuration records has no hidden files either."""
    users = {"ann": {"x": [[0.5, 1.5], [2.5, 3.5]] * 4, "y": [0, 1] * 4}, "bob": {"x": [[4.5, 5.5]] * 3, "y": [1] * 3}}
    leaf_file(tmp_path / "all.json", users)
    name = fedsim.datasets.with_hash(str(tmp_path))
    leaf_file(tmp_path / ".more.json", {"eve": users["ann"]})
    (tmp_path / "._all.json").write_bytes(b"\x00\x05\x16\x07")  # as macOS writes
    (tmp_path / "a.json").symlink_to("nowhere")
    assert fedsim.datasets.with_hash(str(tmp_path)) == name
    splits = fedsim.datasets.load(name)
    assert set(splits.train.client_ids) | set(splits.test.client_ids) == {"ann", "bob"}


def test_strings_become_text_and_lists_of_strings_become_features(tmp_path):
    users = {"ann": {"x": ["to be", "né"], "y": ["o", "!"]}, "bob": {"x": ["or"], "y": ["n"]}}
    read = read_leaf(leaf_file(tmp_path / "shakespeare.json", users, hierarchies=["a", "b"])).load()
    assert read["ann"]["x"].tolist() == [b"to be", "né".encode()]
    tweets = {"ann": {"x": [["1", "day", "hm"], ["2", "day", "oh"]], "y": [0, 4]}}
    read = read_leaf(leaf_file(tmp_path / "sent140.json", tweets)).load()
    assert [read["ann"][name].tolist() for name in ("x_0", "x_2", "y")] == [[b"1", b"2"], [b"hm", b"oh"], [0, 4]]


def test_keys_may_come_in_any_order(tmp_path):
    whole = {"user_data": {"a": {"y": [1], "x": [[0.5]]}}, "num_samples": [1], "extra": {"deep": [{}]}, "users": ["a"]}
    (tmp_path / "a.json").write_text("﻿ \n" + json.dumps(whole, indent=3))
    assert contents(read_leaf(tmp_path / "a.json")) == {"a": {"y": ("int64", (), [1]), "x": ("float32", (1,), [[0.5]])}}


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"a": {"x": [[1, 2], [3]], "y": [1, 2]}}, r"client 'a': Feature 'x' is \[1, 2\] in example 0 and \[3\] in example 1"),
        ({"a": {"x": [1, 2, 3], "y": [1, 2]}}, r"client 'a': Features have different lengths: {'x': 3, 'y': 2}"),
        ({"a": {"x": [1, 2], "y": [1, "two"]}}, "client 'a': Feature 'y' is text in some examples, but 1 in example 0"),
        ({"a": {"x": [1, 2], "y": [1, None]}}, "client 'a': Feature 'y' is 1 in example 0 and None in example 1"),
        ({"a": {"x": [1, 2], "y": [1, 2**70]}}, "client 'a': Feature 'y' is 1 in example 0.*integers of at most 64 bits"),
        ({"a": {"x": [1], "y": [1]}, "b": {"x": [1], "y": [0.5]}}, "'y' of client 'b' is float32.*'a' is int64"),
        ({"a": {"x": [1], "y": [1]}, "b": {"y": [1]}}, r"'b' has features \['y'\].*'a' has"),
        ({"a": {"x": [["p", "q"], ["r"]], "y": [1, 2]}}, "client 'a': Feature 'x' has lists of strings of different lengths"),
        ({"a": {"x": 5, "y": [1]}}, "client 'a': its data are not an object of lists"),
    ],
)
def test_data_that_do_not_form_columns_are_refused(tmp_path, users, message):
    path = leaf_file(tmp_path / "bad.json", users)
    with pytest.raises(FormatError, match=f"bad.json: .*{message}"):
        read_leaf(path).load()


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({"users": ["a"], "num_samples": [2], "user_data": {"a": {"y": [1]}}}, "'a' has 1 examples, but num_samples has 2"),
        ({"users": ["a", "b"], "num_samples": [1, 1], "user_data": {"a": {"y": [1]}}}, "'b' has no examples, but"),
        ({"users": [], "num_samples": [], "user_data": {"a": {"y": [1]}}}, "user_data has 1 users, but users has 0"),
        ({"user_data": {"a": {"y": [1]}}}, "Expected LEAF's users, num_samples and user_data"),
        ({"users": ["a"], "num_samples": [0], "user_data": {"a": {"y": []}}}, "none of the 1 clients has examples"),
        ([1], "Expected '{', found"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, whole, message):
    (tmp_path / "bad.json").write_text(json.dumps(whole))
    with pytest.raises(FormatError, match=f"bad.json: .*{message}"):
        read_leaf(tmp_path / "bad.json").load()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_truncated_anywhere_is_refused(tmp_path, compressed):
    write_leaf(some_clients(), tmp_path / "a.json")
    whole = (tmp_path / "a.json").read_bytes().strip()
    whole = gzip.compress(whole, mtime=0) if compressed else whole
    for length in range(len(whole)):
        (tmp_path / "cut.json").write_bytes(whole[:length])
        with pytest.raises(FormatError, match="cut.json: "):
            read_leaf(tmp_path / "cut.json").load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"y": [1], "y": [2]}}}', "client 'a': .*key 'y' twice"),
        ('{"users": ["b"], "users": ["a"], "num_samples": [1], "user_data": {"a": {"y": [1]}}}', "key 'users' twice"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"y": [1]}, "a": {"y": [2]}}}', "'a'.* twice|more than once"),
    ],
)
def test_a_repeated_key_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(FormatError, match=f"a.json: .*{message}"):
        read_leaf(tmp_path / "a.json").load()


def test_text_after_the_end_is_refused(tmp_path):
    path = leaf_file(tmp_path / "a.json", {"a": {"y": [1]}})
    path.write_text(path.read_text() + " {}")
    with pytest.raises(FormatError, match="a.json: Expected the end of the file, found '{}'"):
        read_leaf(path).load()


def test_text_that_is_not_utf8_is_refused_naming_file_and_client(tmp_path):
    path = leaf_file(tmp_path / "a.json", {"ann": {"x": ["QQ"], "y": [1]}})
    path.write_bytes(path.read_bytes().replace(b"QQ", b"\xff\xfe"))
    with pytest.raises(FormatError, match="a.json: client 'ann': Feature 'x' has text that is not UTF-8"):
        read_leaf(path).load()
    with pytest.raises(ValueError, match="Text 'x' of client 'ann' is not UTF-8"):
        write_leaf([ClientDataset("ann", {"x": text(b"\xff")})], tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()


def test_deep_nesting_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"users": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(FormatError, match="a.json: .*recursion"):
        read_leaf(tmp_path / "a.json").load()


def test_a_folder_without_json_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"has no \*.json"):
        read_leaf(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_leaf(tmp_path / "none.json")


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_json_in_pieces_is_parsed_as_by_json(monkeypatch, piece):
    """A piece may end anywhere, also within a key, an escape, a character of several bytes or a number."""
    monkeypatch.setattr("fedsim.formats._json._PIECE", piece)
    whole = {"né": {'a"}': [1.5e-7, -3, True, None], "b": "x\\", "c": {}, "d": []}, "{": {"雪": '\\"]}', "n": 12345}, "e": {}}
    for content in (json.dumps(whole), json.dumps(whole, ensure_ascii=False), json.dumps(whole, indent=2)):
        reader = JsonReader(io.BytesIO(content.encode()))
        assert {key: {inner: reader.value() for inner in reader.members()} for key in reader.members()} == whole
        reader.end()


def test_only_one_user_is_in_memory(tmp_path):
    random = np.random.default_rng(0)
    users = {f"u{i}": {"x": random.random((20, 300)).astype(np.float32), "y": np.arange(20)} for i in range(40)}
    write_leaf(FederatedData.from_clients(users), tmp_path / "a.json")
    size = (tmp_path / "a.json").stat().st_size
    tracemalloc.start()
    assert sum(len(client) for client in read_leaf(tmp_path / "a.json")) == 800
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 4e6
    assert peak < size, "one user and two pieces of the file, each of a megabyte"
