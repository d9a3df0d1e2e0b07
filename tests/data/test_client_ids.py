"""Tests of `ClientIds`: a sequence of names that is none until asked."""

import numpy as np
import pytest

from fedsim.data import FederatedData
from fedsim.data._client_ids import ClientIds
from fedsim.data._packed import packed_names

SORTED = ["a", "aa", "b", "é"]


@pytest.fixture(params=[SORTED, SORTED[::-1], ["b", "é", "a", "aa"]], ids=["sorted", "reversed", "mixed"])
def names(request):
    return request.param


def test_it_is_a_sequence_of_strings(names):
    ids = ClientIds(packed_names(names))
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


def test_every_name_is_found_and_no_other(names):
    ids = ClientIds(packed_names(names))
    assert [ids.position(name) for name in names] == [0, 1, 2, 3]
    for other in ("", "0", "ab", "c", "a\0", "éé", "longer than any", "\ud800"):
        assert ids.position(other) is None


def test_a_repeated_name_is_found(names):
    assert ClientIds(packed_names(names)).first_repeated() is None
    assert ClientIds(packed_names([*names, "aa", "c"])).first_repeated() == "aa"


def test_the_repr_is_a_line_however_many_there_are():
    assert repr(ClientIds(packed_names(map(str, range(1000))))) == "['0', '1', ..., '999']"


def test_an_opened_population_finds_clients_as_one_in_memory_does(tmp_path):
    ids = [str(i) for i in np.random.default_rng(0).permutation(500)]
    data = FederatedData.from_arrays({"x": np.arange(500)}, sizes=[1] * 500, client_ids=ids)
    data.save(tmp_path / "a.h5")
    again = FederatedData.open(tmp_path / "a.h5")
    assert [again.index(client_id) for client_id in ids] == list(range(500))
    assert again.select(ids[7:3:-1]).client_ids == ids[7:3:-1]
    assert "500" not in again
    with pytest.raises(KeyError, match="'500' among 500 clients"):
        again["500"]
