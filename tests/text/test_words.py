"""`fedsim.text.WordTokenizer` compared with ids of StackoverflowTokenizer of FedJAX 0.0.17 (TensorFlow 2.21)."""

import numpy as np
import pytest

from fedsim.data import ClientStream, FormatError, TextColumn
from fedsim.text import WordTokenizer

VOCABULARY = ["the", ".", "to", "a", "cafe", "café", "?", "C++"]

FEDJAX = [  # sentence, x, y at length 5; 11 is oov
    (b"", [1, 11, 0, 0, 0], [11, 2, 0, 0, 0]),
    (b"the", [1, 3, 0, 0, 0], [3, 2, 0, 0, 0]),
    (b"the . to", [1, 3, 4, 5, 0], [3, 4, 5, 2, 0]),
    (b"the . to a", [1, 3, 4, 5, 6], [3, 4, 5, 6, 2]),
    (b"the . to a ?", [1, 3, 4, 5, 6], [3, 4, 5, 6, 9]),
    (b"the . to a ? the", [1, 3, 4, 5, 6], [3, 4, 5, 6, 9]),
    (b"the to a . ? the to a . ?", [1, 3, 5, 6, 4], [3, 5, 6, 4, 9]),
    (b"a a a a a a a a", [1, 6, 6, 6, 6], [6, 6, 6, 6, 6]),
    (b"zebra quagga", [1, 11, 11, 0, 0], [11, 11, 2, 0, 0]),
    (b"the  to", [1, 3, 11, 5, 0], [3, 11, 5, 2, 0]),
    (b" the", [1, 11, 3, 0, 0], [11, 3, 2, 0, 0]),
    (b"the ", [1, 3, 11, 0, 0], [3, 11, 2, 0, 0]),
    (b" ", [1, 11, 11, 0, 0], [11, 11, 2, 0, 0]),
    (b"The the.", [1, 11, 11, 0, 0], [11, 11, 2, 0, 0]),
    (b"C++ ?", [1, 10, 9, 0, 0], [10, 9, 2, 0, 0]),
    (b"the\tto", [1, 11, 0, 0, 0], [11, 2, 0, 0, 0]),
    (b"the\nto", [1, 11, 0, 0, 0], [11, 2, 0, 0, 0]),
    ("café 雪 the".encode(), [1, 8, 11, 3, 0], [8, 11, 3, 2, 0]),
]

UNKNOWN = [
    "zebra", "quagga", "yak", "雪", "x", "supercalifragilisticexpialidocious",
    "averyveryverylongwordwithmorethansixtyfourcharactersinitsothatthehashtakesitslongbranch1234567890",
    "seventeen_chars_w", "thirtythree_characters_word_abcdefg",
]  # fmt: skip
FEDJAX_BUCKETS = {
    2: [11, 11, 12, 11, 11, 12, 11, 12, 12],
    3: [13, 11, 12, 12, 13, 12, 11, 13, 12],
    5: [13, 11, 13, 13, 11, 12, 15, 11, 13],
    1000: [173, 81, 218, 853, 981, 432, 75, 126, 358],
}


@pytest.mark.parametrize(("sentence", "x", "y"), FEDJAX)
def test_ids_are_those_of_fedjax(sentence, x, y):
    tokenize = WordTokenizer(VOCABULARY, length=5)
    for text in (sentence, sentence.decode()):
        ours = tokenize([text])
        assert [part.tolist() for part in ours] == [[x], [y]]


@pytest.mark.parametrize("buckets", FEDJAX_BUCKETS)
def test_unknown_words_fall_into_the_buckets_of_fedjax(buckets):
    tokenize = WordTokenizer(VOCABULARY, oov_buckets=buckets)
    _, y = tokenize([" ".join(["the", *UNKNOWN])])
    assert y[0, :11].tolist() == [3, *FEDJAX_BUCKETS[buckets], 2]
    assert tokenize.size == 11 + buckets


def test_many_sentences_at_once_give_the_ids_of_each(monkeypatch):
    monkeypatch.setattr("fedsim.text._words._ROWS", 7)  # several blocks
    tokenize = WordTokenizer(VOCABULARY, length=5)
    x, y = tokenize([sentence for sentence, _, _ in FEDJAX])
    assert x.tolist() == [x for _, x, _ in FEDJAX] and y.tolist() == [y for _, _, y in FEDJAX]
    assert tokenize([])[0].shape == (0, 5)


def test_ids_have_the_smallest_dtype():
    words = [str(i) for i in range(40_000)]
    assert WordTokenizer(words[: 2**15 - 4]).dtype == np.int16
    assert WordTokenizer(words[: 2**15 - 3]).dtype == np.int32
    assert WordTokenizer(words[: 2**15 - 4])([words[2**15 - 5] + " unknown"])[1][0, :2].tolist() == [2**15 - 2, 2**15 - 1]
    with pytest.raises(ValueError, match="ids up to 40003.*int16.*int32"):
        WordTokenizer(words, dtype=np.int16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": []}, "vocabulary.*empty"),
        ({"vocabulary": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"vocabulary": "abc"}, "sequence of strings"),
        ({"vocabulary": [b"a"]}, "sequence of strings"),
        ({"vocabulary": ["a"], "length": 0}, "length=0"),
        ({"vocabulary": ["a"], "oov_buckets": 0}, "oov_buckets=0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WordTokenizer(**arguments)


def test_text_that_is_not_utf8_is_refused_by_client_and_feature():
    tokenize = WordTokenizer(VOCABULARY)
    good = np.array([b"the", "é".encode()], object)
    bad = np.array([b"the", b"the \xff to"], object)
    stream = ClientStream(lambda: iter([("ann", {"tokens": good}), ("bob", {"tokens": bad})])).map(tokenize.client)
    with pytest.raises(FormatError, match=r"'bob', feature 'tokens': Text 1 is not UTF-8: byte 4 is 0xff"):
        stream.load()
    with pytest.raises(FormatError, match="Text 0 is a float"):
        tokenize([1.5])


def test_an_incomplete_character_at_the_end_of_a_text_is_refused():
    first, second = "é".encode()[:1], "é".encode()[1:]
    with pytest.raises(FormatError, match="Text 0"):
        WordTokenizer(VOCABULARY)([first, second])


def test_a_stream_of_text_becomes_columns_of_ids():
    features = {"tokens": TextColumn.of(np.array([b"the", b"to a"], object))[:]}
    data = ClientStream(lambda: iter([("ann", features), ("bob", {"tokens": features["tokens"][:0]})])).map(
        WordTokenizer(VOCABULARY, length=3).client
    )
    loaded = data.load()
    assert loaded.columns["x"].tolist() == [[1, 3, 0], [1, 5, 6]] and loaded.columns["y"].tolist() == [[3, 2, 0], [5, 6, 2]]
    assert loaded.sizes.tolist() == [2, 0]
