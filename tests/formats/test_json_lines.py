"""The JSON lines format, as used for Stack Exchange."""

import gzip
import json

import numpy as np
import pytest
from formats.clients import REAL, needs_real

from fedsim.data import FormatError
from fedsim.formats import read_json_lines


def lines_file(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def client(name, train, test=()):
    return {"client_id": name, "train": list(train), "test": list(test)}


def test_each_split_has_all_clients_and_their_examples(tmp_path):
    path = lines_file(
        tmp_path / "a.jsonl",
        client("ann", [], [{"tokens": "x", "score": 1}]),
        "",
        client("bob", [{"tokens": "to be", "score": 3}, {"score": -1, "tokens": "né"}]),
    )
    train = [(c.client_id, c["tokens"].tolist(), c["score"].tolist()) for c in read_json_lines(path, "train")]
    assert train == [("ann", [], []), ("bob", [b"to be", "né".encode()], [3, -1])]
    assert [(c.client_id, c["score"].tolist()) for c in read_json_lines(path, "test")] == [("ann", [1]), ("bob", [])]
    with pytest.raises(FormatError, match=r"split= one of \['test', 'train'\]"):
        read_json_lines(path)


def test_features_can_be_chosen_and_narrowed(tmp_path):
    path = lines_file(tmp_path / "a.jsonl", client("ann", [{"tokens": "x", "score": 1}]))
    (ann,) = read_json_lines(path, "train", {"score": ((), np.int16)})
    assert {name: column.dtype for name, column in ann.examples.items()} == {"score": np.int16}


@needs_real
def test_stack_exchange_is_read_as_by_json():
    path = REAL / "stackexchange" / "stackexchange.jsonl.gz"
    clients = read_json_lines(path, "train", ["tokens", "tags", "title", "type", "score"])
    expected = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    examples = 0
    for read, line in zip(clients, expected, strict=True):
        assert read.client_id == line["client_id"]
        for name in read.examples:
            found = [value.decode() if isinstance(value, bytes) else value for value in read[name].tolist()]
            assert found == [example[name] for example in line["train"]]
        examples += len(read)
    assert examples == 39_157


GOOD = client("ann", [{"y": 1}])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"client_id": "bob", "train": ['], "line 2: truncated or damaged"),
        ([GOOD, "[1]"], "line 2: expected a JSON object, found a list"),
        ([GOOD, {"train": [], "test": []}], r"Line 2 has no text 'client_id'; it has \['test', 'train'\]"),
        ([GOOD, {"client_id": 5, "train": []}], "Line 2 has no text 'client_id'"),
        ([GOOD, {"client_id": "bob"}], "client 'bob': its examples are not a list"),
        ([GOOD, client("bob", [5])], "client 'bob': its examples are not a list of objects"),
        ([GOOD, client("bob", [{"y": 1}, {"z": 1}])], "client 'bob': Feature 'y' is missing in example 1"),
        (
            [GOOD, client("bob", [{"y": 1}, {"y": "one"}])],
            "client 'bob': Feature 'y' is text in some examples, but 1 in example 0",
        ),
        ([GOOD, client("bob", [{"y": "one"}])], "'y' of client 'bob' is object.*'ann' is int64"),
        ([GOOD, GOOD], "'ann' occurs more than once"),
        ([client("ann", [])], "none of the 1 clients has examples"),
        ([GOOD, '{"client_id": "bob", "train": [{"y": "\\ud800"}]}'], "client 'bob': Feature 'y' has text that is not UTF-8"),
        ([GOOD, '{"client_id": "bob", "train": [], "train": [{"y": 1}]}'], "line 2: .*key 'train' twice"),
        ([GOOD, '{"client_id": "bob", "train": [{"y": 1, "y": 2}]}'], "line 2: .*key 'y' twice"),
        ([""], "the file has no lines, so it has no clients"),
    ],
)
def test_invalid_lines_are_refused(tmp_path, lines, message):
    path = lines_file(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(FormatError, match=f"bad.jsonl: .*{message}"):
        read_json_lines(path, "train").load()


def test_bytes_that_are_not_utf8_are_refused_naming_client_and_feature(tmp_path):
    path = lines_file(tmp_path / "bad.jsonl", client("ann", [{"word": "QQ"}]))
    path.write_bytes(path.read_bytes().replace(b"QQ", b"\xff"))
    with pytest.raises(FormatError, match="bad.jsonl: client 'ann': Feature 'word' has text that is not UTF-8"):
        read_json_lines(path, "train").load()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_compressed_file_truncated_anywhere_is_refused(tmp_path, share):
    words = np.random.default_rng(0).integers(10**9, size=(50, 20)).astype(str)
    rows = [client(f"u{i}", [{"tokens": " ".join(row)}]) for i, row in enumerate(words)]
    whole = gzip.compress(lines_file(tmp_path / "a.jsonl", *rows).read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FormatError, match="cut.jsonl.gz: line .*: truncated or damaged"):
        read_json_lines(tmp_path / "cut.jsonl.gz", "train").load()


def test_a_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsim.formats._json_lines.MAX_CLIENT_BYTES", 100)
    path = lines_file(tmp_path / "long.jsonl", GOOD, client("bob", [{"y": 1}] * 50))
    with pytest.raises(FormatError, match="long.jsonl: line 2: the line is longer than"):
        read_json_lines(path, "train").load()
