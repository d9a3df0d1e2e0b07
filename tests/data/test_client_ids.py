"""Tests of `ClientIds`, a sequence that decodes ids when they are read."""

import numpy as np
import pytest

from fedsim.data import FederatedData
from fedsim.data._client_ids import ClientIds
from fedsim.data._packed import encode_client_ids

SORTED = ["a", "aa", "b", "é"]


@pytest.fixture(params=[SORTED, SORTED[::-1], ["b", "é", "a", "aa"]], ids=["sorted", "reversed", "mixed"])
def names(request):
    return request.param


def test_it_is_a_sequence_of_strings(names):
    ids = ClientIds(encode_client_ids(names))
    assert list(ids) == names
    assert ids == names
    assert names == ids
    assert ids != names[:-1]
    assert (len(ids), ids[0], ids[-1], ids[1:3]) == (4, names[0], names[-1], names[1:3])
    assert ids.index("b") == names.index("b")
    assert [name in ids for name in ("aa", "x")] == [True, False]
    assert repr(ids) == repr(names)
    with pytest.raises(IndexError):
        ids[4]


def test_position_of_every_id_and_of_no_other(names):
    ids = ClientIds(encode_client_ids(names))
    assert [ids.position(name) for name in names] == [0, 1, 2, 3]
    for other in ("", "0", "ab", "c", "a\0", "éé", "longer than any", "\ud800"):
        assert ids.position(other) is None


def test_first_repeated(names):
    assert ClientIds(encode_client_ids(names)).first_repeated() is None
    assert ClientIds(encode_client_ids([*names, "aa", "c"])).first_repeated() == "aa"


def test_repr_is_one_line():
    assert repr(ClientIds(encode_client_ids(map(str, range(1000))))) == "['0', '1', ..., '999']"


def test_an_opened_population_has_the_positions_of_one_in_memory(tmp_path):
    ids = [str(i) for i in np.random.default_rng(0).permutation(500)]
    data = FederatedData.from_arrays({"x": np.arange(500)}, sizes=[1] * 500, client_ids=ids)
    data.save(tmp_path / "a.h5")
    again = FederatedData.open(tmp_path / "a.h5")
    assert [again.index(client_id) for client_id in ids] == list(range(500))
    assert again.select(ids[7:3:-1]).client_ids == ids[7:3:-1]
    assert "500" not in again
    with pytest.raises(KeyError, match="'500' among 500 clients"):
        again["500"]
