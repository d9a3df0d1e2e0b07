"""`fedsim.text.TagTokenizer` compared with TFF's baseline, using lookup tables of TensorFlow 2.21."""

import numpy as np
import pytest

from fedsim.data import FormatError
from fedsim.text import TagTokenizer

WORDS, TAGS = ["the", "to", "a", "."], ["python", "sql", "c++"]

TENSORFLOW = [  # tokens, title, tags, x, y
    ("the to a", "the zebra .", "python|sql", [1 / 3, 1 / 6, 1 / 6, 1 / 6], [1, 1, 0]),
    ("", "the", "", [1, 0, 0, 0], [0, 0, 0]),
    ("zebra", "", "java|c++", [0, 0, 0, 0], [0, 0, 1]),
    ("a\u00a0to", "to\u3000a", "|sql|", [0, 0, 0, 0], [0, 1, 0]),
    ("the\x0bto", "a\x1cto", "SQL", [1 / 3, 1 / 3, 0, 0], [0, 0, 0]),
    # TensorFlow gives NaN for the first and counts the second's tag twice.
    ("", "", "", [0, 0, 0, 0], [0, 0, 0]),
    ("the  the\tto", "", "python|python", [2 / 3, 1 / 3, 0, 0], [1, 0, 0]),
]


@pytest.mark.parametrize(("tokens", "title", "tags", "x", "y"), TENSORFLOW)
def test_frequencies_and_tags_are_those_of_tensorflow(tokens, title, tags, x, y):
    shares, marks = TagTokenizer(WORDS, TAGS)([tokens.encode()], titles=[title], tags=[tags])
    np.testing.assert_allclose(shares, [x], rtol=1e-6)
    assert marks.tolist() == [y] and (shares.dtype, marks.dtype) == (np.float32, np.uint8)


def test_ids_start_at_one_and_are_cut_to_the_length():
    tokenize = TagTokenizer(WORDS, TAGS, length=4)
    x, _ = tokenize([b"the zebra", b". . a", b""], titles=[b"to", b"a the", b""], tags=[b"", b"", b""])
    assert x.tolist() == [[1, 5, 2, 0], [4, 4, 3, 3], [0, 0, 0, 0]] and x.dtype == np.int16


def test_invalid_vocabularies_and_texts_are_refused():
    with pytest.raises(ValueError, match="tags.*'a' occurs twice"):
        TagTokenizer(["a"], ["a", "a"])
    with pytest.raises(ValueError, match="words.*empty"):
        TagTokenizer([], ["a"])
    with pytest.raises(ValueError, match="length=0"):
        TagTokenizer(["a"], ["a"], length=0)
    with pytest.raises(FormatError, match="Client 'ann': Title 0 is not UTF-8"):
        TagTokenizer(["a"], ["a"]).client("ann", {"tokens": [b"a"], "title": [b"\xff"], "tags": [b""]})
