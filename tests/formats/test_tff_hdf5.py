"""TFF's HDF5 layout, on files written by h5py, and on real files if they are available."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from fuzz import assert_only_format_errors

from fedsim.data import FederatedData, FormatError
from fedsim.formats import _tff_hdf5, read_tff_hdf5, write_tff_hdf5

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def write(path, clients, *, libver=None, **how):
    with h5py.File(path, "w", libver=libver) as file:
        examples = file.create_group("examples")
        for client_id, features in clients.items():
            group = examples.create_group(client_id)
            for name, array in features.items():
                dtype = h5py.string_dtype("ascii") if array.dtype.kind == "O" else None
                group.create_dataset(name, data=array, dtype=dtype, **how)
    return path


def some_clients(sizes=(4, 0, 1)):
    random = np.random.default_rng(0)
    return {
        f"w{i}": {
            "label": random.integers(9, size=n).astype(np.int32),
            "pixels": random.random((n, 3, 2), np.float32),
            "text": np.array([b"x" * int(k) for k in random.integers(3, size=n)], object),
        }
        for i, n in enumerate(sizes)
    }


def assert_same(actual, expected):
    assert list(actual.client_ids) == list(expected.client_ids)
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    assert list(actual.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        assert actual.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(actual.columns[name][:], column[:])


class TestReading:
    @pytest.mark.parametrize("sizes", [(4, 0, 1), (0, 3), (0, 0)])
    @pytest.mark.parametrize("libver", [None, "latest"])
    def test_every_client_has_its_rows(self, tmp_path, sizes, libver):
        clients = some_clients(sizes)
        data = read_tff_hdf5(write(tmp_path / "a.h5", clients, libver=libver)).load()
        assert_same(data, FederatedData.from_clients(clients))

    def test_chunked_and_compressed_files_are_read_equally(self, tmp_path):
        clients = some_clients((400, 7))
        clients["w0"]["label"][:] = 0
        path = write(tmp_path / "a.h5", clients, compression="gzip", chunks=True)
        assert_same(read_tff_hdf5(path).load(), FederatedData.from_clients(clients))

    def test_features_can_be_chosen(self, tmp_path):
        clients = some_clients()
        clients["w1"]["only_here"] = np.zeros(0)
        path = write(tmp_path / "a.h5", clients)
        assert list(read_tff_hdf5(path, ["label"]).load().columns) == ["label"]
        with pytest.raises(FormatError, match=r"a\.h5: Client 'w1' has features .*only_here.* 'w0' has"):
            read_tff_hdf5(path).load()

    def test_big_endian_numbers_are_converted_to_native_byte_order(self, tmp_path):
        column = read_tff_hdf5(write(tmp_path / "a.h5", {"a": {"x": np.array([1, 2], ">i4")}})).load().columns["x"]
        assert column.dtype == np.dtype(np.int32)
        assert column.tolist() == [1, 2]

    def test_strings_of_any_kind_are_text(self, tmp_path):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["examples/a/t"] = np.array([b"a", b"bcd"])
            file["examples/b/t"] = ["é", ""]
        assert [c["t"].tolist() for c in read_tff_hdf5(tmp_path / "a.h5")] == [[b"a", b"bcd"], ["é".encode(), b""]]

    def test_clients_are_sorted_by_id_unless_the_file_tracks_another_order(self, tmp_path):
        for track in (False, True):
            with h5py.File(tmp_path / "a.h5", "w") as file:
                examples = file.create_group("examples", track_order=track)
                for client_id in ("b", "c", "a"):
                    examples[f"{client_id}/x"] = np.zeros(1)
            assert [c.client_id for c in read_tff_hdf5(tmp_path / "a.h5")] == (["b", "c", "a"] if track else ["a", "b", "c"])

    def test_a_reader_that_stops_early_does_not_affect_others(self, tmp_path):
        path = write(tmp_path / "a.h5", some_clients((1000, 1000, 1000)))
        stream = read_tff_hdf5(path)
        assert next(iter(stream)).client_id == "w0"
        pairs = list(zip(stream, stream, strict=True))
        assert [(a.client_id, b.client_id) for a, b in pairs] == [("w0", "w0"), ("w1", "w1"), ("w2", "w2")]
        assert all(np.array_equal(a["pixels"], b["pixels"]) for a, b in pairs)

    def test_a_relative_path_works_after_a_change_of_the_working_folder(self, tmp_path, monkeypatch):
        write(tmp_path / "a.h5", some_clients())
        monkeypatch.chdir(tmp_path)
        stream = read_tff_hdf5("a.h5")
        monkeypatch.chdir("/")
        assert stream.load().num_clients == 3


class TestRefused:
    @pytest.mark.parametrize(
        ("clients", "message"),
        [
            ({}, "population is empty"),
            ({"a": {}}, "'a' has no features"),
            ({"a": {"x": np.zeros(2), "y": np.zeros(2)}, "b": {"x": np.zeros(2)}}, r"'b' has features \['x'\].*'a'"),
            ({"a": {"x": np.zeros([2, 3])}, "b": {"x": np.zeros([2, 4])}}, r"'b' is float64 \[4\].*'a' is float64 \[3\]"),
            ({"a": {"x": np.zeros(2)}, "b": {"x": np.zeros(2, "f4")}}, "'b' is float32.*'a' is float64"),
            ({"a": {"x": np.zeros(2), "y": np.zeros(3)}}, "'a' has features of different lengths: .*2.*3"),
            ({"a": {"x": np.float32(1)}}, "'x' of client 'a' is not an array"),
            ({"a": {"x": np.zeros(2, "i4,f4")}}, "'x' of client 'a' has dtype .*features="),
            ({"a": {"x": np.array([["two", "words"]], "S5")}}, r"'x' of client 'a' is text of shape \[1, 2\]"),
        ],
    )
    def test_invalid_files(self, tmp_path, clients, message):
        with pytest.raises(FormatError, match=f"bad.h5: .*{message}"):
            read_tff_hdf5(write(tmp_path / "bad.h5", clients)).load()

    def test_ragged_rows(self, tmp_path):
        with h5py.File(tmp_path / "bad.h5", "w") as file:
            ragged = file.create_dataset("examples/a/x", 2, h5py.vlen_dtype(np.int32))
            ragged[0], ragged[1] = [1], [2, 3]
        with pytest.raises(FormatError, match="bad.h5: Feature 'x' of client 'a' has dtype object .rows of varying length"):
            read_tff_hdf5(tmp_path / "bad.h5").load()

    def test_a_client_without_a_chosen_feature(self, tmp_path):
        path = write(tmp_path / "bad.h5", {"a": {"x": np.zeros(2), "y": np.zeros(2)}, "b": {"x": np.zeros(2)}})
        with pytest.raises(FormatError, match=r"bad.h5: Client 'b' has no feature 'y'; it has \['x'\]"):
            read_tff_hdf5(path, ["x", "y"]).load()

    @pytest.mark.parametrize(
        ("name", "message"),
        [("data", r"No group /examples; the file has \['data'\]"), ("examples/x", "/examples/x is not a group"),
         ("examples", "No group /examples")],
    )  # fmt: skip
    def test_other_layouts(self, tmp_path, name, message):
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file[name] = np.zeros(3)
        with pytest.raises(FormatError, match=f"other.h5: .*{message}"):
            read_tff_hdf5(tmp_path / "other.h5").load()

    def test_files_of_other_formats(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"There is no file .*none.h5"):
            read_tff_hdf5(tmp_path / "none.h5")
        with pytest.raises(FormatError, match=f"{tmp_path.name} is a folder"):
            read_tff_hdf5(tmp_path)
        for content in (b"", b"x", b"not HDF5 at all" * 1000):
            (tmp_path / "a.h5").write_bytes(content)
            with pytest.raises(FormatError, match=rf"a.h5 \({len(content)} bytes\) is not an HDF5 file"):
                read_tff_hdf5(tmp_path / "a.h5")


class TestDamaged:
    @pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1])
    def test_a_file_truncated_anywhere(self, tmp_path, share):
        content = write(tmp_path / "whole.h5", some_clients((400, 300))).read_bytes()
        (tmp_path / "cut.h5").write_bytes(content[: min(int(len(content) * share), len(content) - 1)])
        with pytest.raises(FormatError, match=r"cut.h5.* (is truncated or damaged|is not an HDF5 file)"):
            read_tff_hdf5(tmp_path / "cut.h5").load()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("features", "how"), [(["label", "pixels", "text"], {}), (["pixels"], {"libver": "latest", "compression": "gzip"})]
    )
    def test_a_wrong_byte_raises_only_format_errors(self, tmp_path, features, how):
        clients = {i: {name: c[name] for name in features} for i, c in some_clients((30, 2, 4)).items()}
        content = write(tmp_path / "a.h5", clients, **how).read_bytes()
        assert_only_format_errors(functools.partial(read_tff_hdf5, timeout=0.4), content, ".h5", 500)

    def test_a_heap_of_zeros_on_which_hdf5_loops_forever(self, tmp_path):
        path = write(tmp_path / "a.h5", {"a": {"t": np.array([b"some text"], object)}})
        content = path.read_bytes()
        heap = content.index(b"GCOL")
        path.write_bytes(content[: heap + 16] + bytes(4080) + content[heap + 4096 :])
        with pytest.raises(FormatError, match=r"a.h5 is (damaged: HDF5 took more than timeout=1 s|truncated or damaged)"):
            read_tff_hdf5(path, timeout=1).load()

    @pytest.mark.parametrize("chunks", [None, (3,)])
    def test_a_header_that_declares_petabytes(self, tmp_path, chunks):
        path = write(tmp_path / "a.h5", {"a": {"x": np.arange(3)}}, chunks=chunks, maxshape=(2**60,) if chunks else None)
        content = path.read_bytes()
        (found,) = re.finditer(rb"\x01\x01[\x00\x01]\x00{5}\x03\x00{7}", content)  # version, rank, flags, 3 rows
        space = found.start() + 8
        path.write_bytes(content[:space] + (2**50).to_bytes(8, "little") + content[space + 8 :])
        with pytest.raises(FormatError, match=r"a.h5 is truncated or damaged"):
            read_tff_hdf5(path).load()

    def test_a_crash_of_the_child_is_a_format_error_and_the_next_read_works(self, tmp_path, monkeypatch):
        path = write(tmp_path / "a.h5", some_clients((1, 100_000)))
        clients = iter(read_tff_hdf5(path))
        child = _tff_hdf5._get_child()
        with monkeypatch.context() as patched:
            patched.setattr(_tff_hdf5, "_get_child", lambda: child)
            next(clients)
            child.kill()
            with pytest.raises(FormatError, match="a.h5 is damaged: HDF5 crashed. Download or write it again"):
                list(clients)
        assert read_tff_hdf5(path).load().num_clients == 2


class TestWriting:
    def test_round_trip_keeps_the_order_of_clients(self, tmp_path):
        data = FederatedData.from_clients(dict(reversed(some_clients((4, 0, 1)).items())))
        write_tff_hdf5(data, tmp_path / "a.h5")
        assert_same(read_tff_hdf5(tmp_path / "a.h5").load(), data)
        with h5py.File(tmp_path / "a.h5") as file:
            assert file["examples/w0/text"][()].tolist() == data["w0"]["text"].tolist()
            np.testing.assert_array_equal(file["examples/w0/pixels"][()], data["w0"]["pixels"])

    @pytest.mark.parametrize(
        ("client_id", "feature", "row", "message"),
        [
            ("a/b", "x", b"", "Client id 'a/b' is not a valid name"),
            (".", "x", b"", "Client id '.' is not a valid name"),
            ("a", "x/y", b"", "Feature name 'x/y' is not a valid name"),
            ("a", "x", b"to\0be", "Text 'x' of client 'a' contains a NUL character"),
        ],
    )
    def test_unsupported_names_and_texts_are_refused_and_no_file_remains(self, tmp_path, client_id, feature, row, message):
        data = FederatedData.from_clients({client_id: {feature: np.array([row], object)}})
        with pytest.raises(ValueError, match=message):
            write_tff_hdf5(data, tmp_path / "a.h5")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("limit", [50, 3000, 20_000, 300_000])
    def test_a_full_disk_is_an_os_error_and_no_file_remains(self, tmp_path, limit):
        """A limit on file sizes simulates a full disk, because the kernel refuses the same writes."""
        script = f"""
import resource, sys, numpy as np
from fedsim.data import FederatedData
from fedsim.formats import write_tff_hdf5
data = FederatedData.from_arrays({{"x": np.ones((1000, 99))}}, sizes=[10] * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    write_tff_hdf5(data, {str(tmp_path / "a.h5")!r})
except OSError:
    sys.exit(0)
sys.exit("it was written")
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")
class TestRealFiles:
    def test_every_tenth_writer_is_read_as_by_h5py(self):
        data = read_tff_hdf5(REAL / "femnist" / "femnist_train.h5").load()
        assert (data.num_clients, data.num_examples) == (300, 41_495)
        assert (data.sizes.min(), data.sizes.max()) == (2, 320)
        with h5py.File(REAL / "femnist" / "femnist_train.h5") as file:
            assert list(file["examples"]) == data.client_ids
            for client_id in data.client_ids[::10]:
                for name in ("pixels", "label"):
                    expected = file["examples"][client_id][name][()]
                    assert data[client_id][name].dtype == expected.dtype
                    np.testing.assert_array_equal(data[client_id][name], expected)

    def test_shakespeare_has_empty_snippets_and_is_the_same_if_packed(self, tmp_path):
        stream = read_tff_hdf5(REAL / "shakespeare_tff" / "shakespeare_test.h5")
        stream.save(tmp_path / "packed.h5")
        data = FederatedData.open(tmp_path / "packed.h5")
        assert (data.num_clients, data.num_examples) == (715, 2_356)
        assert np.sum(data.columns["snippets"][:] == b"") == 45
        assert_same(data, stream.load())
        with h5py.File(REAL / "shakespeare_tff" / "shakespeare_test.h5") as file:
            for client_id in list(data.client_ids)[::50]:
                assert data[client_id]["snippets"].tolist() == file["examples"][client_id]["snippets"][()].tolist()
