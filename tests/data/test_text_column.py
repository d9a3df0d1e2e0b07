"""Tests of `TextColumn`, alone and in a population."""

import numpy as np
import pytest

from fedsim.data import FederatedData, TextColumn

ROWS = [b"to be", b"", b"or\0not", "é".encode(), b""]


@pytest.mark.parametrize(
    "rows", [slice(None), slice(1, 3), slice(3, 1), slice(-2, None), slice(None, None, -2), slice(9, 12), [4, 0, 0], [-1], []]
)
def test_indexing_agrees_with_an_object_array(rows):
    expected = np.array(ROWS, object)
    rows = rows if isinstance(rows, slice) else np.array(rows, int)
    actual = TextColumn.of(ROWS)[rows]
    assert actual.dtype == object
    assert actual.tolist() == expected[rows].tolist()


def test_a_mask_selects_rows_and_an_integer_returns_bytes():
    column = TextColumn.of(ROWS)
    assert column[np.array([True, False, True, False, False])].tolist() == [ROWS[0], ROWS[2]]
    assert [column[i] for i in range(5)] == ROWS
    assert column[-2] == ROWS[-2]
    with pytest.raises(IndexError):
        column[5]


def test_attributes_of_an_array():
    column = TextColumn.of(ROWS)
    assert (len(column), column.shape, column.ndim, column.dtype) == (5, (5,), 1, np.dtype(object))
    assert column.nbytes == len(b"".join(ROWS)) + 6 * 8
    np.testing.assert_array_equal(np.asarray(column), np.array(ROWS, object))
    assert len(TextColumn.of([])[:]) == 0


@pytest.mark.parametrize("row", ["text", None, 3, bytearray(b"x")])
def test_rows_must_be_bytes(row):
    with pytest.raises(ValueError, match=rf"Text must be bytes, got {type(row).__name__}.*encode it first"):
        TextColumn.of([b"", row])
    with pytest.raises(ValueError, match="Feature 't': Text must be bytes"):
        FederatedData.from_arrays({"t": np.array([b"", row], object)}, sizes=[2])


@pytest.mark.parametrize("starts", [[0, 1], [1, 3], [0, 4], []])
def test_invalid_starts_are_refused(starts):
    with pytest.raises(ValueError, match="starts"):
        TextColumn(np.zeros(3, np.uint8), np.array(starts, np.int64))


class TestInAPopulation:
    def population(self):
        return FederatedData.from_clients(
            {"a": {"t": np.array(ROWS[:2], object)}, "b": {"t": np.array([], object)}, "c": {"t": np.array(ROWS[2:], object)}}
        )

    def test_every_client_has_its_rows(self):
        data = self.population()
        assert isinstance(data.columns["t"], TextColumn)
        assert [client["t"].tolist() for client in data] == [ROWS[:2], [], ROWS[2:]]
        assert data.nbytes == data.columns["t"].nbytes
        assert repr(data) == "FederatedData(3 clients, 5 examples; t: object [])"

    def test_select_gather_and_rows_by_client(self):
        data = self.population()
        assert data.select(["c", "a"])["c"]["t"].tolist() == ROWS[2:]
        assert data.gather("t", [2, 0]).tolist() == ROWS[2:] + ROWS[:2]
        grouped = FederatedData.from_arrays({"t": TextColumn.of(ROWS)}, clients=[1, 0, 1, 0, 1])
        assert grouped["0"]["t"].tolist() == [ROWS[1], ROWS[3]]
        partitioned = FederatedData.from_partition({"t": TextColumn.of(ROWS)}, [np.array([4, 0]), np.array([2])])
        assert partitioned["0"]["t"].tolist() == [ROWS[4], ROWS[0]]

    def test_no_device_can_store_it(self):
        with pytest.raises(ValueError, match="'t' is text, which no device can store: convert it to tokens"):
            self.population().check_dtypes()
