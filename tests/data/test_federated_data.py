"""Tests of `FederatedData` and `ClientDataset`."""

import jax
import ml_dtypes
import numpy as np
import pytest

import fedsim
from fedsim import rng
from fedsim.data import Batches, FederatedData


def population(sizes=(3, 0, 2)):
    rows = sum(sizes)
    return FederatedData.from_arrays({"x": np.arange(rows * 2.0).reshape(rows, 2), "y": np.arange(rows)}, sizes=sizes)


def test_every_client_is_a_slice_of_the_columns():
    data = population()
    assert (data.num_clients, len(data), data.num_examples) == (3, 3, 5)
    assert data.sizes.tolist() == [3, 0, 2]
    assert data.offsets.tolist() == [0, 3, 3, 5]
    assert data.client_ids == ["0", "1", "2"]
    assert [client["y"].tolist() for client in data.clients()] == [[0, 1, 2], [], [3, 4]]
    assert np.shares_memory(data["2"]["x"], data.columns["x"])
    assert data.nbytes == 5 * 2 * 8 + 5 * 8


def test_repr_is_one_line():
    assert repr(population()) == "FederatedData(3 clients, 5 examples; x: float64 [2], y: int64 [])"


def test_clients_are_found_by_name():
    data = population()
    assert "2" in data
    assert "3" not in data
    assert data.index("2") == 2
    assert data["2"].client_id == "2"
    with pytest.raises(KeyError, match="'nobody' among 3 clients"):
        data["nobody"]


def test_from_arrays_by_client_keeps_the_order_of_rows():
    clients = np.array([7, 3, 7, 7, 3])
    data = FederatedData.from_arrays({"y": np.arange(5)}, clients=clients)
    assert data.client_ids == ["3", "7"]
    assert [client["y"].tolist() for client in data.clients()] == [[1, 4], [0, 2, 3]]


def test_from_clients_and_from_partition_agree_with_from_arrays():
    data = population()
    again = FederatedData.from_clients({c.client_id: c.examples for c in data.clients()})
    partition = [np.arange(data.offsets[i], data.offsets[i + 1]) for i in range(3)]
    third = FederatedData.from_partition(data.columns, partition)
    for other in (again, third):
        assert other.client_ids == data.client_ids
        np.testing.assert_array_equal(other.offsets, data.offsets)
        for name in data.columns:
            np.testing.assert_array_equal(other.columns[name], data.columns[name])


def test_select_and_gather_keep_the_given_order():
    data = population()
    chosen = data.select(["2", "0"])
    assert chosen.client_ids == ["2", "0"]
    assert chosen["0"]["y"].tolist() == [0, 1, 2]
    assert data.gather("y", [2, 1, 0]).tolist() == [3, 4, 0, 1, 2]
    out = np.full(7, -1)
    assert data.gather("y", np.array([2, 0]), out) is out
    assert out.tolist() == [3, 4, 0, 1, 2, -1, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FederatedData({}, np.array([0, 0]), ["a"]), "at least one feature"),
        (lambda: FederatedData({"x": np.zeros(0)}, np.array([0]), []), "population is empty"),
        (lambda: FederatedData({"x": np.zeros(3)}, np.array([0, 3]), ["a", "b"]), r"offsets of shape \[3\]"),
        (lambda: FederatedData({"x": np.zeros(3)}, np.array([1, 3]), ["a"]), "nondecreasing from 0"),
        (lambda: FederatedData({"x": np.zeros(3)}, np.array([0, 4, 3]), ["a", "b"]), "nondecreasing from 0"),
        (lambda: FederatedData({"x": np.zeros(3)}, np.array([0, 2]), ["a"]), "'x' has 3 rows.* sum to 2"),
        (lambda: FederatedData({"x": np.zeros(3)}, np.array([0, 2, 3]), ["a", "a"]), "'a' occurs more than once"),
        (lambda: FederatedData({"x": np.broadcast_to(0, 2**31)}, np.array([0, 2**31]), ["a"]), r"at most 2\*\*31 - 1"),
        (lambda: FederatedData.from_arrays({"x": np.zeros(3)}), "either sizes"),
        (lambda: FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], clients=["a"]), "either sizes"),
        (lambda: FederatedData.from_arrays({"x": np.zeros(3)}, clients=["a"]), "3 rows, and clients has 1"),
        (lambda: FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[4, -1]), ">= 0, got -1 for client number 1"),
        (lambda: FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[3], client_ids=["a", "b"]), "2 client_ids for 1"),
        (lambda: FederatedData.from_clients({}), "population is empty"),
        (lambda: FederatedData.from_partition({"x": np.zeros(3)}, []), "population is empty"),
        (lambda: FederatedData.from_clients({"a": {"x": np.zeros(2)}, "b": {}}), r"'b' has features \[\]"),
        (lambda: FederatedData.from_clients({"a": {"x": np.zeros(2), "y": np.zeros(3)}}), "different lengths"),
        (
            lambda: FederatedData.from_clients({"a": {"x": np.zeros([2, 3])}, "b": {"x": np.zeros([2, 4])}}),
            r"'x' of client 'b' is float64 \[4\].* 'a' is float64 \[3\]",
        ),
        (
            lambda: FederatedData.from_clients({"a": {"x": np.zeros(2)}, "b": {"x": np.zeros(2, int)}}),
            "'b' is int64.* 'a' is float64",
        ),
    ],
)
def test_inconsistent_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_reported_with_feature_and_client(dtype, value):
    x = np.zeros((5, 2), dtype)
    data = FederatedData.from_arrays({"ok": np.zeros(5), "x": x}, sizes=[2, 0, 3], client_ids=["a", "b", "c"])
    data.check_finite()
    x[4, 1] = value
    data = FederatedData(data.columns, data.offsets, data.client_ids)
    with pytest.raises(ValueError, match=r"'x' of client 'c' holds a NaN or an infinity \(example 2\)"):
        data.check_finite()


def test_labels_outside_the_classes_are_reported_with_their_client():
    data = FederatedData.from_arrays({"y": np.array([0, 9, 4])}, sizes=[1, 2], client_ids=["a", "b"])
    data.check_labels("y", 10)
    with pytest.raises(ValueError, match=r"'b' has label y=9, and the model has classes 0 to 8.*num_classes=10"):
        data.check_labels("y", 9)
    negative = FederatedData.from_arrays({"y": np.array([0, 1, -4])}, sizes=[2, 1], client_ids=["a", "b"])
    with pytest.raises(ValueError, match="'b' has label y=-4"):
        negative.check_labels("y", 9)
    FederatedData.from_arrays({"y": np.zeros(0, int)}, sizes=[0]).check_labels("y", 1)


def test_labels_may_have_any_shape_per_example():
    tokens = np.zeros((5, 4, 2), np.int16)
    tokens[3, 2, 1], tokens[1, 0, 0] = 90, 7
    data = FederatedData.from_arrays({"y": tokens}, sizes=[2, 1, 2], client_ids=["a", "b", "c"])
    data.check_labels("y", 91)
    with pytest.raises(ValueError, match="'c' has label y=90, and the model has classes 0 to 89"):
        data.check_labels("y", 90)
    FederatedData.from_arrays({"y": np.zeros((3, 0), int)}, sizes=[3]).check_labels("y", 1)


@pytest.mark.parametrize("labels", [np.zeros(2), np.array([b"a", b"b"]), np.array([b"a", b"b"], object)])
def test_labels_must_be_integers(labels):
    with pytest.raises(ValueError, match="Labels 'y' must be integers, got"):
        FederatedData.from_arrays({"y": labels}, sizes=[2]).check_labels("y", 2)


def test_client_batches_hold_every_example_once_an_epoch_with_a_key_per_step():
    client = FederatedData.from_clients({"a": {"x": np.arange(7), "z": np.arange(14).reshape(7, 2)}})["a"]
    key = rng.client_keys(rng.root(0), 0, np.arange(1))[0]
    batches = list(client.batches(Batches(size=3, epochs=2), key))
    assert len(batches) == 5
    assert [int(batch.mask.sum()) for batch in batches] == [3, 3, 3, 3, 2]
    seen = np.concatenate([batch.examples["x"][batch.mask] for batch in batches])
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    for step, batch in enumerate(batches):
        assert batch.step == step
        assert batch.mask.shape == (3,)
        assert batch.examples["z"].shape == (3, 2)
        np.testing.assert_array_equal(batch.examples["z"][:, 0], 2 * batch.examples["x"])
        assert batch.key == jax.random.fold_in(rng.stream(key, "step"), step)


def test_an_empty_client_has_no_batches():
    client = population()["1"]
    for batches in (Batches(size=3), Batches(size=3, steps=4)):
        assert list(client.batches(batches, rng.root(0))) == []


def test_shuffle_differs_between_rounds_and_seeds():
    client = FederatedData.from_clients({"a": {"x": np.arange(40)}})["a"]

    def order(seed, round):
        key = rng.client_keys(rng.root(seed), round, np.arange(1))[0]
        return np.concatenate([batch.examples["x"] for batch in client.batches(Batches(size=20), key)]).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, round)) for seed in range(3) for round in range(3)}) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: FederatedData.from_arrays({"x": x}, clients=["a", None, "b"]), "Row 1 has no client"),
        (lambda x: FederatedData.from_arrays({"x": x}, clients=[1.0, 2.0, np.nan]), "Row 2 has no client"),
        (lambda x: FederatedData.from_arrays({"x": x}, clients=np.array(["1", 1, 1], object)), "of one type.*int and str"),
        (lambda x: FederatedData.from_arrays({"x": x}, clients=[0, 0, 1], client_ids=["a", "b"]), "client_ids only with sizes"),
        (lambda x: FederatedData.from_arrays({"x": x}, sizes=[1.5, 2.0]), "sizes as integers"),
        (lambda x: FederatedData.from_arrays({"x": x}, sizes=[1, 2], client_ids=[7, 8]), "Client ids must be text, got int 7"),
        (lambda x: FederatedData.from_clients({"a": {"x": 3}}), "'x' of client 'a'.*got a single value"),
        (lambda x: FederatedData.from_clients({"a": {}}), "'a' has no features"),
        (lambda x: FederatedData.from_partition({"x": x}, [[0], [-1]]), "Client 1 has indices from -1"),
        (lambda x: FederatedData.from_partition({"x": x}, [[0], [3]]), "Client 1 has indices from 3 to 3"),
        (lambda x: FederatedData.from_partition({"x": x, "y": x[:2]}, [[0], [1]]), "of one length, got .*'y': .2"),
        (lambda x: FederatedData.from_arrays({"x": x.astype("M8[D]")}, sizes=[3]).check_dtypes(), "no device can store"),
    ],
)
def test_ambiguous_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(np.arange(3))


def test_clients_given_as_bytes_have_their_text_as_id():
    data = FederatedData.from_arrays({"x": np.arange(3)}, clients=[b"b", "é".encode(), b"b"])
    assert data.client_ids == ["b", "é"] and data["b"]["x"].tolist() == [0, 2]
    assert data.select(name for name in ["é"]).client_ids == ["é"]


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (np.array([1, 3_000_000_000]), "3000000000, which does not fit into int32"),
        (np.array([1, -(2**31) - 1]), "-2147483649, which does not fit into int32"),
        (np.array([1, 2**32], np.uint64), "4294967296, which does not fit into uint32"),
        (np.array([1, 2**32 - 1], np.uint64), None),
        (np.array([1, 2**31 - 1]), None),
        (np.array([3e9, 1]).astype(np.uint32), None),
        (np.array([0.5, 1e39]), "1e[+]39, which does not fit into float32"),
        (np.array([1.0, 2**24 + 1]), "16777217.0, which does not fit into float32"),  # ids as floats
        (np.array([0.1, 2**24 + 1]), None),  # measured: rounded as 0.1 is
        (np.array([2.0**24, 2.0**100]), None),
        (np.array([2**24 + 1.0, 1.0]).astype(np.float32), None),
    ],
)
def test_numbers_that_a_device_would_change_are_refused(values, refused):
    model = fedsim.Model(
        init=lambda key: {"w": jax.numpy.zeros(())}, apply_for_train=lambda params, e, key: params["w"] + 0.0 * e["x"],
        apply_for_eval=lambda params, e: e["x"].astype(np.float32), loss=lambda e, out: out,
        metrics={"value": lambda e, out: out},
        features={"x": jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(values.dtype))},
    )  # fmt: skip
    data = FederatedData.from_arrays({"x": values}, sizes=[1, 0, len(values) - 1], client_ids=["ann", "bob", "cy"])
    if refused is None:
        value = fedsim.evaluate(model, {"w": jax.numpy.zeros(())}, data).overall["value"]
        np.testing.assert_allclose(value, values.astype(np.float64).mean(), rtol=1e-6)
        return
    with pytest.raises(
        ValueError, match=f"Feature 'x' of {values.dtype} contains {refused} on a device, in example 0 of client 'cy'"
    ):
        fedsim.evaluate(model, {"w": jax.numpy.zeros(())}, data)


def test_numbers_are_checked_for_algorithms_without_a_model_and_not_in_columns_that_no_model_reads():
    data = FederatedData.from_arrays({"x": np.zeros(2, np.float32), "time": np.array([0, 2**40])}, sizes=[2])
    histogram = fedsim.algorithms.Histogram(feature="time")
    with pytest.raises(ValueError, match="'time' of int64 contains 1099511627776, which does not fit into int32 on a device"):
        histogram.check(data)
    with jax.enable_x64(True):
        histogram.check(data)
    with pytest.raises(ValueError, match="Expected whole numbers in column 'id' that float32 has, .* 16777217 for id '2'"):
        fedsim.vertical.Party(ids=[1, 2], columns={"id": [0, 2**24 + 1]})


def test_a_missing_client_of_pandas_is_named():
    pandas = pytest.importorskip("pandas")
    clients = pandas.Series(["a", pandas.NA], dtype="string")
    with pytest.raises(ValueError, match="Row 1 has no client"):
        FederatedData.from_arrays({"x": np.zeros(2)}, clients=clients)
