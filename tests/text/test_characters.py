"""`fedsim.text.CharacterTokenizer` compared with ids of shakespeare.preprocess_client of FedJAX 0.0.17."""

import collections
import os
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import FormatError
from fedsim.text import TFF_SHAKESPEARE, CharacterTokenizer

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "shakespeare_tff"

FEDJAX = [  # length, snippets, x, y
    (3, [b"ABCD", b"E"], [[1, 73, 51], [29, 10, 2], [1, 74, 0]], [[73, 51, 29], [10, 2, 1], [74, 2, 0]]),
    (5, [b""], [[1, 0, 0, 0, 0]], [[2, 0, 0, 0, 0]]),
    (5, [], [], []),
    (3, [b"a"], [[1, 66, 0]], [[66, 2, 0]]),
    (4, [b"abc"], [[1, 66, 44, 23]], [[66, 44, 23, 2]]),
    (4, [b"abcd"], [[1, 66, 44, 23], [3, 0, 0, 0]], [[66, 44, 23, 3], [2, 0, 0, 0]]),
    (
        4,
        [b"ab", b"", b"To be,\nor not\r"],
        [[1, 66, 44, 2], [1, 2, 1, 14], [26, 16, 44, 67], [19, 65, 26, 48], [16, 47, 26, 7], [88, 0, 0, 0]],
        [[66, 44, 2, 1], [2, 1, 14, 26], [16, 44, 67, 19], [65, 26, 48, 16], [47, 26, 7, 88], [2, 0, 0, 0]],
    ),
    (8, ["café~".encode()], [[1, 23, 66, 45, 89, 89, 89, 0]], [[23, 66, 45, 89, 89, 89, 2, 0]]),
]


@pytest.mark.parametrize(("length", "snippets", "x", "y"), FEDJAX)
def test_ids_are_those_of_fedjax(length, snippets, x, y):
    ours = CharacterTokenizer(length=length)(np.array(snippets, object))
    assert [part.tolist() for part in ours] == [x, y]
    assert [part.shape for part in ours] == [(len(x), length)] * 2 and ours[0].dtype == np.int16


def test_every_character_has_its_id():
    tokenize = CharacterTokenizer(length=90)
    x, y = tokenize([TFF_SHAKESPEARE])
    assert x.tolist() == [[1, *range(3, 89), 0, 0, 0]] and y.tolist() == [[*range(3, 89), 2, 0, 0, 0]]
    assert tokenize.size == 90 and len(TFF_SHAKESPEARE) == 86


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"characters": b""}, "at least one"),
        ({"characters": b"aba"}, "distinct"),
        ({"characters": "abc"}, "bytes"),
        ({"length": 0}, "length=0"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"characters": bytes(range(256)), "dtype": "uint8"}, "ids up to 259"),
    ],
)
def test_invalid_characters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CharacterTokenizer(**arguments)


def test_text_that_is_not_utf8_is_refused_by_client_and_feature():
    with pytest.raises(FormatError, match=r"Client 'HAMLET', feature 'snippets': Text 1 is not UTF-8: byte 0 is 0xe9"):
        CharacterTokenizer().client("HAMLET", {"snippets": [b"To be", b"\xe9"]})


@pytest.mark.skipif(not REAL.is_dir(), reason="no real data here")
def test_no_character_of_the_real_shakespeare_is_lost():
    """Every byte of every snippet is recovered, in order; all sequences of a client except the last are full."""
    import h5py

    tokenize = CharacterTokenizer()
    back = np.frombuffer(b"\0\0\0" + TFF_SHAKESPEARE + b"?", np.uint8)
    unknown = collections.Counter()
    with h5py.File(REAL / "shakespeare_test.h5") as file:
        clients = [list(group["snippets"][()]) for group in file["examples"].values()]
    for snippets in clients[:100]:
        x, y = tokenize(snippets)
        ids = np.concatenate([x.ravel()[:1], y.ravel()])
        ids = ids[ids != 0]
        texts = np.split(ids, np.flatnonzero(ids == 1)[1:])
        assert [back[text[1:-1]].tobytes() for text in texts] == snippets
        assert all(text[0] == 1 and text[-1] == 2 for text in texts)
        assert (x[:-1] != 0).all() and np.array_equal(x.ravel()[1:], np.where(x.ravel()[1:] == 0, 0, y.ravel()[:-1]))
        unknown.update((ids == tokenize.size - 1).tolist())
    assert unknown[True] == 0
