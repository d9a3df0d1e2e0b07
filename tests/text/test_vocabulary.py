"""Vocabularies from files of counts and from texts."""

import collections
import json
import os
import tarfile
from pathlib import Path

import pytest

from fedsim.data import FormatError
from fedsim.text import vocabulary_from_counts, vocabulary_from_texts

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "stackexchange"


def test_the_first_words_of_the_file_in_its_order(tmp_path):
    path = tmp_path / "stackoverflow.word_count"
    path.write_text("the 9\n, 7\ncafé 7\nto 8\n")
    assert vocabulary_from_counts(path, 3) == ["the", ",", "café"]
    assert vocabulary_from_counts(str(path), 4) == ["the", ",", "café", "to"]


def test_tags_in_json_are_sorted_by_count(tmp_path):
    path = tmp_path / "stackoverflow.tag_count"
    path.write_text(json.dumps({"sql": 5, "python": 9, "c#": 5}))
    assert vocabulary_from_counts(path, 3) == ["python", "sql", "c#"]


@pytest.mark.parametrize(("text", "expected"), [("the 9\nto 8\n", ["the", "to"]), ('{"a": 1, "b": 2}', ["b", "a"])])
def test_an_archive_of_one_file_is_read(tmp_path, text, expected):
    inside, path = tmp_path / "counts", tmp_path / "counts.tar.bz2"
    inside.write_text(text)
    with tarfile.open(path, "w:bz2") as archive:
        archive.add(inside, "counts")
    assert vocabulary_from_counts(path, 2) == expected


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (b"the 9\nto\n", 2, r"counts, line 2: b'to\\n' is not a word and its count"),
        (b"the many\n", 1, "line 1"),
        (b"\xff 9\n", 1, "line 1"),
        (b"the 9\nto 8\n", 3, "has only 2 words, got size=3: give at most size=2"),
        (b"the 9\nto 8\nthe 7\n", 3, "contains the word 'the' twice"),
        (b"", 1, "has only 0 words"),
        (b'{"the": 9', 1, "not a JSON object"),
        (b'{"the": "many"}', 1, "not a JSON object"),
        (b'{"the": 9, "to": 3,\n"the": 1}', 1, "line 2 has the key 'the' a second time"),
        (b'{"the": 9,\n"\xff": 3}', 1, "line 2 is not UTF-8"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, content, size, message):
    path = tmp_path / "counts"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        vocabulary_from_counts(path, size)


def test_archives_of_several_files_and_damaged_ones_are_refused(tmp_path):
    inside, path = tmp_path / "counts", tmp_path / "counts.tar.bz2"
    inside.write_text("".join(f"word{i} {10_000 - i}\n" for i in range(10_000)))
    with tarfile.open(path, "w:bz2") as archive:
        archive.add(inside, "a")
        archive.add(inside, "b")
    with pytest.raises(FormatError, match="archive of 2 files"):
        vocabulary_from_counts(path, 1)
    with tarfile.open(path, "w:bz2") as archive:
        archive.add(inside, "a")
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(FormatError):
            vocabulary_from_counts(path, 10_000)


def test_words_are_counted_and_ties_are_sorted():
    texts = [b"b a", "a c", b"  c", "é"]
    assert vocabulary_from_texts(texts, 9) == ["a", "c", "b", "é"]
    assert vocabulary_from_texts(reversed(texts), 2) == ["a", "c"]
    assert vocabulary_from_texts([b"sql|c++", b"c++", b""], 9, separator="|") == ["c++", "sql"]
    with pytest.raises(FormatError, match="Text 1 is not UTF-8"):
        vocabulary_from_texts([b"a", b"\xff"], 1)
    with pytest.raises(ValueError, match="size=0"):
        vocabulary_from_texts([], 0)


@pytest.mark.skipif(not REAL.is_dir(), reason="no real data here")
def test_published_counts_agree_with_the_published_texts():
    """The published counts and counts of the texts have the same most frequent words, in order of count."""
    import gzip

    with gzip.open(REAL / "stackexchange.jsonl.gz", "rt", encoding="utf-8") as file:
        users = [json.loads(line) for line in file]
    texts = [post["tokens"] for user in users for split in ("train", "test") for post in user[split]]
    ours = vocabulary_from_texts(texts, 1000)
    counts = collections.Counter(word for text in texts for word in text.split(" "))
    theirs = vocabulary_from_counts(REAL / "stackexchange.word_count", 1000)
    assert [counts[word] for word in ours] == [counts[word] for word in theirs]
