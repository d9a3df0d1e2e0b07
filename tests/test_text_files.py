"""Text, JSON and CSV files: what is read, and that errors name the file and the line."""

import gzip
import json

import numpy as np
import pytest

from fedsim.data import FormatError
from fedsim.text_files import parse_json, read_csv, read_json, read_table, read_text, separator_hint


def test_text_may_have_a_byte_order_mark_and_be_compressed(tmp_path):
    path = tmp_path / "a.txt"
    for content in ("Zoë\n".encode("utf-8-sig"), gzip.compress("Zoë\n".encode())):
        path.write_bytes(content)
        assert read_text(path) == "Zoë\n"
    whole = gzip.compress(b"text " * 1000)
    for damaged in (whole[:-9], whole[:5], whole[:20] + b"\xff\xff" + whole[22:]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="a.txt is truncated or damaged"):
            read_text(path)


@pytest.mark.parametrize(
    ("content", "line"), [(b"\xff", 1), (b"one\ntwo\xe9", 2), (b"one\r\ntwo\r\n\r\n\xc3(", 4), (b"\n\n\xed\xa0\x80", 3)]
)
def test_the_line_that_is_not_utf8_is_named(content, line, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(FormatError, match=f"a.txt, line {line} is not UTF-8"):
        read_text(tmp_path / "a.txt")


def _random_value(draw, depth=3):
    kind = draw.integers(6 if depth else 4)
    if kind == 4:
        return [_random_value(draw, depth - 1) for _ in range(draw.integers(4))]
    if kind == 5:
        return {draw.choice(['a"b', "c:d", "{", "\\", "e", "é"]): _random_value(draw, depth - 1) for _ in range(4)}
    return [int(draw.integers(100)), float(draw.normal()), 'te:xt "{', None][kind]


def test_json_without_repeated_keys_is_read_as_by_the_standard_library():
    draw = np.random.default_rng(0)
    for _ in range(100):
        text = json.dumps(_random_value(draw), indent=1)
        assert parse_json(text, "a.json") == json.loads(text)


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ('{"x": 1, "x": 2}', 1, "x"),
        ('{"x": {"y": 1},\n "z": [{"y": 1,\n "y": 2}]}', 3, "y"),
        ('{"a": "b:",\n"b:": {"a": 0},\n "c": [{"a": 1}, {"a": 2}],\n"a": 3}', 4, "a"),
        ('{"\\u0061": 1,\n"a": 2}', 2, "a"),
        ('{"q\\"": {}, "":\n1,\n"q\\"": []}', 3, 'q"'),
    ],
)
def test_a_repeated_key_is_named_with_its_line(text, line, key, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError) as caught:
        read_json(tmp_path / "a.json")
    assert f"a.json, line {line} has the key {key!r} a second time" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": 1,\n}', "a.json, line 2 is not JSON"),
        ("", "a.json, line 1 is not JSON"),
        ("[" * 100_000, "a.json, line 1 is not JSON .*recursion"),
        ("9" * 5000, "a.json, line 1 is not JSON"),
        ("[]", r"a.json is not a JSON object: expected {\"x\": 1}"),
        ("null", "a.json is not a JSON object"),
    ],
)
def test_json_of_another_form_is_refused(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_json(tmp_path / "a.json", '{"x": 1}')


def test_tables_have_the_fields_and_lines_of_the_file():
    text = 'id, "a, b",c \n1,"x\ny", \n\n2,,"3"\n'
    names, rows = read_table(text, "t.csv")
    assert names == ["id", "a, b", "c"]
    assert rows == [("t.csv, line 3", ["1", "x\ny", ""]), ("t.csv, line 5", ["2", "", "3"])]
    assert [row for _, row in read_csv("a\n\nb,c\n", "t.csv")] == [["a"], [], ["b", "c"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n\n3\n", "t.csv, line 4: .* got 1 for 2 names"),
        ("a,b\n1,2,3\n", "t.csv, line 2: .* got 3 for 2 names"),
        ("a;b\n1,5;2\n", "line 2: .*it seems to be separated by ';': convert it to commas"),
        ("a,b\n", "t.csv: .*got no row"),
        ("", "t.csv: .*got no row"),
        ("a,b,a\n1,2,3\n", "t.csv: .*different names, got 'a' 2 times"),
        ('a,b\n1,"2\n', "t.csv, line 2 is not CSV"),
    ],
)
def test_tables_of_another_form_are_refused(text, message):
    with pytest.raises(FormatError, match=message):
        read_table(text, "t.csv")
    assert separator_hint(["a", "b;c"]) == "" and "'\\t'" in separator_hint(["a\tb"])
