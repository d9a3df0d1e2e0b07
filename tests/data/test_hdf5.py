"""Tests of the HDF5 readers and the packed format."""

import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from fedsim.data import FederatedData, read_tff_hdf5

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "femnist"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")


def write_tff(path, clients, **how):
    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for client_id, features in clients.items():
            group = examples.create_group(client_id)
            for name, array in features.items():
                group.create_dataset(name, data=array, **how)
    return path


def some_clients(sizes=(4, 0, 1)):
    random = np.random.default_rng(0)
    return {
        f"w{i}": {"label": random.integers(9, size=n).astype(np.int32), "pixels": random.random((n, 3, 2), np.float32)}
        for i, n in enumerate(sizes)
    }


def assert_same(actual, expected):
    assert list(actual.client_ids) == list(expected.client_ids)
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    assert list(actual.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        assert actual.columns[name].dtype == column.dtype
        assert actual.columns[name].shape == column.shape
        np.testing.assert_array_equal(actual.columns[name], column)


class TestTffLayout:
    @pytest.mark.parametrize("sizes", [(4, 0, 1), (0, 3), (0, 0)])
    def test_columns_hold_every_clients_rows(self, tmp_path, sizes):
        clients = some_clients(sizes)
        assert_same(read_tff_hdf5(write_tff(tmp_path / "a.h5", clients)), FederatedData.from_clients(clients))

    def test_chunked_and_compressed_files_read_alike(self, tmp_path):
        clients = some_clients((4, 7))
        path = write_tff(tmp_path / "a.h5", clients, compression="gzip", chunks=True)
        assert_same(read_tff_hdf5(path), FederatedData.from_clients(clients))

    def test_features_can_be_chosen(self, tmp_path):
        clients = some_clients()
        clients["w1"]["only_here"] = np.zeros(0)
        path = write_tff(tmp_path / "a.h5", clients)
        assert list(read_tff_hdf5(path, ["label"]).columns) == ["label"]
        with pytest.raises(ValueError, match=r"a\.h5: Client 'w1' has features .*only_here.* 'w0' has"):
            read_tff_hdf5(path)

    def test_big_endian_files_come_in_the_machines_order(self, tmp_path):
        path = write_tff(tmp_path / "a.h5", {"a": {"x": np.array([1, 2], ">i4")}})
        column = read_tff_hdf5(path).columns["x"]
        assert column.dtype == np.dtype(np.int32)
        assert column.tolist() == [1, 2]

    def test_transform_sees_each_client_once_and_names_the_columns(self, tmp_path):
        clients, seen = some_clients(), []

        def transform(client_id, examples):
            seen.append(client_id)
            return {"y": examples["label"].astype(np.int16)[:, None]}

        data = read_tff_hdf5(write_tff(tmp_path / "a.h5", clients), ["label"], transform=transform)
        assert seen == ["w0", "w1", "w2"]
        assert data.columns["y"].shape == (5, 1)
        assert data.columns["y"].dtype == np.int16

    @pytest.mark.parametrize(
        ("clients", "message"),
        [
            ({}, "population is empty"),
            ({"a": {}}, "'a' has no features"),
            ({"a": {"x": np.zeros(2), "y": np.zeros(2)}, "b": {"x": np.zeros(2)}}, r"'b' has features \['x'\].*'a'"),
            (
                {"a": {"x": np.zeros([2, 3])}, "b": {"x": np.zeros([2, 4])}},
                r"'b' is float64 \[4\].*'a' is float64 \[3\]",
            ),
            ({"a": {"x": np.zeros(2)}, "b": {"x": np.zeros(2, "f4")}}, "'b' is float32.*'a' is float64"),
            ({"a": {"x": np.zeros(2), "y": np.zeros(3)}}, "'a' has features of different lengths: .*2.*3"),
            ({"a": {"x": np.float32(1)}}, "'x' of client 'a' is not an array"),
            ({"a": {"x": ["some", "text"]}}, "'x' of client 'a' holds strings"),
        ],
    )
    def test_files_that_make_no_population_are_refused(self, tmp_path, clients, message):
        path = write_tff(tmp_path / "bad.h5", clients)
        with pytest.raises(ValueError, match=f"bad.h5: .*{message}"):
            read_tff_hdf5(path)

    def test_a_client_without_a_chosen_feature_is_named(self, tmp_path):
        path = write_tff(tmp_path / "bad.h5", {"a": {"x": np.zeros(2), "y": np.zeros(2)}, "b": {"x": np.zeros(2)}})
        with pytest.raises(ValueError, match=r"bad.h5: Client 'b' has no feature 'y'; it has \['x'\]"):
            read_tff_hdf5(path, ["x", "y"])

    def test_other_layouts_are_refused(self, tmp_path):
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["data"] = np.zeros(3)
        with pytest.raises(ValueError, match=r"No group /examples; the file holds \['data'\]"):
            read_tff_hdf5(tmp_path / "other.h5")
        with h5py.File(tmp_path / "flat.h5", "w") as file:
            file["examples/x"] = np.zeros(3)
        with pytest.raises(ValueError, match="/examples/x is not a group"):
            read_tff_hdf5(tmp_path / "flat.h5")
        with h5py.File(tmp_path / "array.h5", "w") as file:
            file["examples"] = np.zeros(3)
        with pytest.raises(ValueError, match="No group /examples"):
            read_tff_hdf5(tmp_path / "array.h5")


@pytest.mark.parametrize("read", [read_tff_hdf5, FederatedData.open])
class TestFilesThatAreNone:
    def test_a_missing_file_is_named(self, tmp_path, read):
        with pytest.raises(FileNotFoundError, match=r"No file .*none.h5"):
            read(tmp_path / "none.h5")

    def test_a_folder_is_named(self, tmp_path, read):
        with pytest.raises(ValueError, match=f"{tmp_path.name} is a folder"):
            read(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"x", b"not HDF5 at all" * 1000])
    def test_another_format_is_named(self, tmp_path, read, content):
        (tmp_path / "a.h5").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a.h5 \({len(content)} bytes\) is not an HDF5 file"):
            read(tmp_path / "a.h5")

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1])
    def test_a_file_cut_anywhere_is_refused(self, tmp_path, read, share):
        whole = tmp_path / "whole.h5"
        if read is read_tff_hdf5:
            write_tff(whole, some_clients((400, 300)))
        else:
            FederatedData.from_clients(some_clients((400, 300))).save(whole)
        content = whole.read_bytes()
        (tmp_path / "cut.h5").write_bytes(content[: min(int(len(content) * share), len(content) - 1)])
        with pytest.raises(ValueError, match=r"cut.h5.* (is truncated or damaged|is not an HDF5 file)"):
            read(tmp_path / "cut.h5")

    def test_a_file_with_overwritten_structure_is_refused_or_read(self, tmp_path, read):
        """Whatever byte is wrong, only errors that name the file come out (in a process of its own: HDF5 is C)."""
        whole = tmp_path / "whole.h5"
        if read is read_tff_hdf5:
            write_tff(whole, some_clients((2, 1)))
        else:
            FederatedData.from_clients(some_clients((2, 1))).save(whole)
        how = "read_tff_hdf5" if read is read_tff_hdf5 else "FederatedData.open"
        script = f"""
import sys, numpy as np
from fedsim.data import FederatedData, read_tff_hdf5
content = open({str(whole)!r}, "rb").read()
random = np.random.default_rng(0)
for _ in range(60):
    damaged = bytearray(content)
    start = int(random.integers(8, min(len(content), 6000)))
    damaged[start : start + 16] = random.bytes(16)
    open({str(tmp_path / "damaged.h5")!r}, "wb").write(damaged)
    try:
        {how}({str(tmp_path / "damaged.h5")!r})
    except ValueError as error:
        assert "damaged.h5" in str(error), error
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


class TestPacked:
    @pytest.mark.parametrize("sizes", [(4, 0, 1), (0, 3), (0, 0)])
    def test_round_trip(self, tmp_path, sizes):
        data = FederatedData.from_clients(some_clients(sizes))
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    @pytest.mark.parametrize("dtype", ["u1", "i1", "i8", "f2", "f8", "?", ">f4", "S5"])
    def test_round_trip_of_dtypes(self, tmp_path, dtype):
        data = FederatedData.from_arrays({"x": np.arange(6).reshape(3, 2).astype(dtype)}, sizes=[1, 2])
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_round_trip_of_names(self, tmp_path):
        names = ["", "a b/c", "Ærøskøbing", "雪", "x" * 100]
        data = FederatedData.from_arrays({"x": np.zeros(5)}, sizes=[1] * 5, client_ids=names)
        data.save(tmp_path / "a.h5")
        assert FederatedData.open(tmp_path / "a.h5").client_ids == names

    def test_columns_are_mapped_read_only_and_aligned(self, tmp_path):
        FederatedData.from_clients(some_clients()).save(tmp_path / "a.h5")
        for column in FederatedData.open(tmp_path / "a.h5").columns.values():
            assert isinstance(column, np.memmap)
            assert column.flags.aligned
            assert not column.flags.writeable

    def test_the_file_says_what_it_is(self, tmp_path):
        FederatedData.from_clients(some_clients()).save(tmp_path / "a.h5")
        with h5py.File(tmp_path / "a.h5") as file:
            assert dict(file.attrs) == {"format": "fedsim.packed", "version": 1}
            assert file["offsets"].dtype == np.int64
            assert file["client_ids"].dtype == "S2"
            assert all(file["columns"][name].chunks is None for name in ("label", "pixels"))

    def test_a_population_can_be_saved_over_the_file_that_it_is_mapped_from(self, tmp_path):
        path, clients = tmp_path / "a.h5", some_clients()
        FederatedData.from_clients(clients).save(path)
        FederatedData.open(path).save(path)
        assert_same(FederatedData.open(path), FederatedData.from_clients(clients))

    def test_blocks_smaller_than_a_column_change_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fedsim.data._hdf5._BLOCK_BYTES", 50)
        data = FederatedData.from_clients(some_clients((40, 3)))
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(self, tmp_path, monkeypatch):
        path, data = tmp_path / "a.h5", FederatedData.from_clients(some_clients())
        data.save(path)
        before = path.read_bytes()

        def fail(*args):
            raise OSError("disk full")

        monkeypatch.setattr("fedsim.data._hdf5.os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            FederatedData.from_clients(some_clients((9,))).save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_what_hdf5_cannot_hold_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="'x' has dtype object"):
            FederatedData.from_arrays({"x": np.array([{}], object)}, sizes=[1]).save(tmp_path / "a.h5")
        with pytest.raises(ValueError, match="ends with a NUL"):
            FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], client_ids=["a\0"]).save(tmp_path / "a.h5")
        with pytest.raises(FileNotFoundError, match=r"No folder .*nowhere.*create it"):
            FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1]).save(tmp_path / "nowhere" / "a.h5")
        assert list(tmp_path.iterdir()) == []

    def test_other_hdf5_files_are_refused(self, tmp_path):
        path = write_tff(tmp_path / "a.h5", some_clients())
        with pytest.raises(ValueError, match=r"a.h5: Not a packed population.*found None.*read_tff_hdf5"):
            FederatedData.open(path)

    def test_a_later_version_is_refused(self, tmp_path):
        FederatedData.from_clients(some_clients()).save(tmp_path / "a.h5")
        with h5py.File(tmp_path / "a.h5", "a") as file:
            file.attrs["version"] = 2
        with pytest.raises(ValueError, match=r"expected format 'fedsim.packed' version 1, found .* version 2"):
            FederatedData.open(tmp_path / "a.h5")

    def test_compressed_columns_are_refused(self, tmp_path):
        FederatedData.from_clients(some_clients()).save(tmp_path / "a.h5")
        with h5py.File(tmp_path / "a.h5", "a") as file:
            labels = file["columns/label"][()]
            del file["columns/label"]
            file.create_dataset("columns/label", data=labels, compression="gzip")
        with pytest.raises(ValueError, match="'label' is not stored contiguously"):
            FederatedData.open(tmp_path / "a.h5")

    def test_opening_as_many_clients_as_stack_overflow_has_takes_less_than_a_second(self, tmp_path):
        clients = 342_477
        ids = [f"user_{i:08d}" for i in range(clients)]
        FederatedData({"x": np.zeros(clients, np.int8)}, np.arange(clients + 1), ids).save(tmp_path / "a.h5")
        start = time.perf_counter()
        data = FederatedData.open(tmp_path / "a.h5")
        assert data.index(ids[-1]) == clients - 1
        assert time.perf_counter() - start < 1


@pytest.fixture(scope="module")
def real():
    return read_tff_hdf5(REAL / "femnist_train.h5")


@needs_real
class TestRealFile:
    def test_counts(self, real):
        assert (real.num_clients, real.num_examples) == (300, 41_495)
        assert (real.sizes.min(), real.sizes.max()) == (2, 320)

    def test_every_tenth_writer_is_what_h5py_reads(self, real):
        with h5py.File(REAL / "femnist_train.h5") as file:
            assert list(file["examples"]) == real.client_ids
            for client_id in real.client_ids[::10]:
                for name in ("pixels", "label"):
                    expected = file["examples"][client_id][name][()]
                    assert real[client_id][name].dtype == expected.dtype
                    np.testing.assert_array_equal(real[client_id][name], expected)

    def test_packed_copy_is_the_same(self, real, tmp_path):
        real.save(tmp_path / "packed.h5")
        assert_same(FederatedData.open(tmp_path / "packed.h5"), real)
