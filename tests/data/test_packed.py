"""Tests of packed files, which `FederatedData.save` writes and `FederatedData.open` maps."""

import errno
import itertools
import json
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from fuzz import assert_only_format_errors

from fedsim.data import ClientStream, FederatedData, FormatError, _packed


def some_clients(sizes=(4, 0, 1)):
    random = np.random.default_rng(0)
    words = [b"to be", b"", b"or\0not", "é".encode(), b"x" * 300]
    return {
        f"w{i}": {
            "label": random.integers(9, size=n).astype(np.int32),
            "pixels": random.random((n, 3, 2), np.float32),
            "text": np.array([words[k] for k in random.integers(len(words), size=n)], object),
        }
        for i, n in enumerate(sizes)
    }


def assert_same(actual, expected):
    assert list(actual.client_ids) == list(expected.client_ids)
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    assert list(actual.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        assert actual.columns[name].dtype == column.dtype
        assert actual.columns[name].shape == column.shape
        np.testing.assert_array_equal(actual.columns[name][:], column[:])


@pytest.fixture
def saved(tmp_path):
    FederatedData.from_clients(some_clients()).save(tmp_path / "a.h5")
    return tmp_path / "a.h5"


class TestRoundTrip:
    @pytest.mark.parametrize("sizes", [(4, 0, 1), (0, 3), (0, 0)])
    def test_of_sizes(self, tmp_path, sizes):
        data = FederatedData.from_clients(some_clients(sizes))
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    @pytest.mark.parametrize("dtype", ["u1", "i1", "i8", "f2", "f8", "?", ">f4", "S5", "c8"])
    def test_of_dtypes(self, tmp_path, dtype):
        data = FederatedData.from_arrays({"x": np.arange(6).reshape(3, 2).astype(dtype)}, sizes=[1, 2])
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_of_ids(self, tmp_path):
        names = ["", "a b/c", "Ærøskøbing", "雪", "x" * 100]
        data = FederatedData.from_arrays({"x": np.zeros(5)}, sizes=[1] * 5, client_ids=names)
        data.save(tmp_path / "a.h5")
        again = FederatedData.open(tmp_path / "a.h5")
        assert again.client_ids == names
        assert [again.index(name) for name in names] == list(range(5))
        again.save(tmp_path / "b.h5")
        assert FederatedData.open(tmp_path / "b.h5").client_ids == names

    def test_of_a_single_empty_id(self, tmp_path):
        FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], client_ids=[""]).save(tmp_path / "a.h5")
        assert FederatedData.open(tmp_path / "a.h5").client_ids == [""]

    def test_of_many_features_with_a_large_user_block(self, tmp_path):
        data = FederatedData.from_arrays({f"feature number {i}": np.full(2, i) for i in range(200)}, sizes=[1, 1])
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_of_rows_without_values(self, tmp_path):
        data = FederatedData.from_arrays({"x": np.zeros((3, 0), np.int16), "y": np.arange(3)}, sizes=[1, 2])
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_in_blocks_smaller_than_a_column(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fedsim.data._packed.BLOCK_BYTES", 50)
        data = FederatedData.from_clients(some_clients((40, 3)))
        data.save(tmp_path / "a.h5")
        assert_same(FederatedData.open(tmp_path / "a.h5"), data)

    def test_overwriting_the_file_of_the_population(self, saved):
        FederatedData.open(saved).save(saved)
        assert_same(FederatedData.open(saved), FederatedData.from_clients(some_clients()))


def test_columns_are_mapped_read_only_and_aligned(saved):
    columns = FederatedData.open(saved).columns
    for array in (columns["label"], columns["pixels"], columns["text"].buffer):
        assert isinstance(array, np.memmap)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_h5py_reads_equal_arrays(saved):
    data = FederatedData.from_clients(some_clients())
    with h5py.File(saved) as file:
        assert dict(file.attrs) == {"format": "fedsim.packed", "version": 2}
        np.testing.assert_array_equal(file["offsets"][()], data.offsets)
        assert file["client_ids"][()].tolist() == [b"w0", b"w1", b"w2"]
        for name in ("label", "pixels"):
            assert file["columns"][name].chunks is None
            np.testing.assert_array_equal(file["columns"][name][()], data.columns[name])
        starts = file["columns/text/starts"][()]
        content = file["columns/text/bytes"][()].tobytes()
        rows = [content[a:b] for a, b in itertools.pairwise(starts)]
        assert rows == data.columns["text"][:].tolist()


def test_equal_data_give_equal_bytes(saved, tmp_path):
    time.sleep(1.1)  # HDF5 would store the time in seconds.
    FederatedData.from_clients(some_clients()).save(tmp_path / "b.h5")
    assert (tmp_path / "b.h5").read_bytes() == saved.read_bytes()


class TestRefused:
    @pytest.mark.parametrize(
        ("columns", "ids", "message"),
        [
            ({"x": np.zeros(1, "V2")}, ["a"], r"'x' has dtype \|V2"),
            ({"x": np.zeros(1, "U2")}, ["a"], r"'x' has dtype <U2"),
            ({"a/b": np.zeros(1)}, ["a"], "'a/b' cannot be the name"),
            ({"x": np.zeros(1)}, ["a\0"], "ends with a NUL"),
            ({"x": np.zeros(1)}, ["\ud800"], "is not valid Unicode"),
        ],
    )
    def test_what_the_file_cannot_store(self, tmp_path, columns, ids, message):
        with pytest.raises(ValueError, match=message):
            FederatedData.from_arrays(columns, sizes=[1], client_ids=ids).save(tmp_path / "a.h5")
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"No folder .*nowhere.*create it"):
            FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1]).save(tmp_path / "nowhere" / "a.h5")

    def test_a_missing_file_and_a_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"No file .*none.h5"):
            FederatedData.open(tmp_path / "none.h5")
        with pytest.raises(FormatError, match=f"{tmp_path.name} is a folder"):
            FederatedData.open(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"x", b"neither HDF5 nor anything" * 1000])
    def test_another_format(self, tmp_path, content):
        (tmp_path / "a.h5").write_bytes(content)
        with pytest.raises(FormatError, match=rf"a.h5 \({len(content)} bytes\) is of another format, or damaged"):
            FederatedData.open(tmp_path / "a.h5")

    def test_hdf5_of_another_layout(self, tmp_path):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["examples/a/x"] = np.zeros(3)
        with pytest.raises(FormatError, match=r"a.h5 .*another layout .*read_tff_hdf5.*expected a packed file"):
            FederatedData.open(tmp_path / "a.h5")

    @pytest.mark.parametrize("cut", [1, 100, 4096, 20_000])
    def test_a_truncated_or_extended_file(self, saved, cut):
        content = saved.read_bytes()
        for changed in (content[:-cut], content[:cut], content + bytes(cut)):
            saved.write_bytes(changed)
            with pytest.raises(FormatError, match=r"a.h5 .*damaged"):
                FederatedData.open(saved)

    def test_a_file_changed_by_h5py(self, saved):
        with h5py.File(saved, "a") as file:
            file["columns/new"] = np.zeros(5)
        with pytest.raises(FormatError, match=r"a.h5 is truncated or damaged"):
            FederatedData.open(saved)


class TestDamaged:
    def test_damage_raises_only_format_errors(self, saved):
        assert_only_format_errors(FederatedData.open, saved.read_bytes(), ".h5", 1000)

    def test_every_97th_byte_is_covered_by_a_checksum(self, saved):
        content = saved.read_bytes()
        for at in range(64, len(content), 97):
            rewrite(saved, flipped(content, 8 * at))
            with pytest.raises(FormatError, match="a.h5"):
                FederatedData.open(saved)

    def test_200_random_single_bit_flips_are_refused_or_harmless(self, saved):
        content, original = saved.read_bytes(), FederatedData.from_clients(some_clients())
        refused = 0
        for bit in np.random.default_rng(0).integers(8 * len(content), size=200).tolist():
            rewrite(saved, flipped(content, bit))
            try:
                assert_same(FederatedData.open(saved), original)
            except FormatError:
                refused += 1
        assert refused > 190

    @pytest.mark.parametrize(
        ("array", "named"),
        [
            ("offsets", "the offsets"),
            ("client_ids", "the client ids"),
            ("columns/label", "column 'label'"),
            ("columns/text/bytes", "the bytes of text column 'text'"),
            ("columns/text/starts", "the row starts of text column 'text'"),
        ],
    )
    @pytest.mark.parametrize("write", ["save", "stream"])
    def test_the_error_names_the_array_and_the_remedy(self, tmp_path, monkeypatch, array, named, write):
        monkeypatch.setattr("fedsim.data._packed._READ_BYTES", 7)
        data = FederatedData.from_clients(some_clients())
        (data if write == "save" else ClientStream.of(data)).save(tmp_path / "a.h5")
        with h5py.File(tmp_path / "a.h5") as file:
            last = file[array].id.get_offset() + file[array].nbytes - 1
        rewrite(tmp_path / "a.h5", flipped((tmp_path / "a.h5").read_bytes(), 8 * last + 3))
        for read in (FederatedData.open, FederatedData.verify):
            with pytest.raises(FormatError, match=rf"a.h5 is .*damaged: checksums differ in {named}. Delete it and load"):
                read(tmp_path / "a.h5")

    def test_verify_finds_a_flip_in_a_file_that_is_too_large_to_be_checked_when_opened(self, saved, monkeypatch):
        monkeypatch.setattr("fedsim.data._packed.CHECKED_BYTES", saved.stat().st_size - 1)
        assert FederatedData.verify(saved)
        with h5py.File(saved) as file:
            pixels = file["columns/pixels"].id.get_offset()
        rewrite(saved, flipped(saved.read_bytes(), 8 * pixels))
        FederatedData.open(saved)
        with pytest.raises(FormatError, match="a.h5 is damaged: checksums differ in column 'pixels'"):
            FederatedData.verify(saved)

    def test_streaming_in_several_blocks_writes_the_same_checksums(self, saved, tmp_path, monkeypatch):
        monkeypatch.setattr("fedsim.data._spool.BLOCK_BYTES", 50)
        ClientStream.of(FederatedData.from_clients(some_clients())).save(tmp_path / "b.h5")
        assert layout_of(tmp_path / "b.h5")["crc32"] == layout_of(saved)["crc32"]

    def test_a_file_without_checksums_opens_and_verify_returns_false(self, saved):
        content = saved.read_bytes()
        layout = layout_of(saved)
        layout.pop("crc32")
        older = json.dumps(layout).encode()
        length = int(content[16:24], 16)
        body = older + bytes(length - len(older)) + content[64 + length :]
        crc = _packed._checksum(np.frombuffer(bytes(64) + body, np.uint8), layout["arrays"])
        rewrite(saved, content[:16] + f"{len(older):08x} {crc:08x}\n".encode() + content[34:64] + body)
        assert_same(FederatedData.open(saved), FederatedData.from_clients(some_clients()))
        assert FederatedData.verify(saved) is False

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": [2**50]},
            {"shape": [2**70]},
            {"shape": [-1]},
            {"shape": "x"},
            {"shape": None},
            {"start": 2**60},
            {"start": -5},
            {"start": "x"},
            {"dtype": "O"},
            {"dtype": "i4,O"},
            {"dtype": "nothing"},
            {"dtype": 3},
            {"unknown": 1},
        ],
    )
    @pytest.mark.parametrize("array", ["offsets", "client_ids", "columns/label", "columns/text/bytes", "columns/text/starts"])
    def test_an_invalid_layout_with_a_valid_checksum_is_refused(self, saved, monkeypatch, array, change):
        content = saved.read_bytes()
        checksum = int(content[25:33], 16)
        monkeypatch.setattr("fedsim.data._packed._checksum", lambda *_: checksum)
        length = int(content[16:24], 16)
        layout = json.loads(content[64 : 64 + length])
        layout["arrays"][array] |= change
        changed = json.dumps(layout).encode()
        head = content[:16] + f"{len(changed):08x}".encode() + content[24:64]
        saved.write_bytes(head + changed + content[64 + len(changed) :])
        for checked_bytes in (0, 2**26):
            monkeypatch.setattr("fedsim.data._packed.CHECKED_BYTES", checked_bytes)
            with pytest.raises(FormatError, match="a.h5 is .*damaged"):
                FederatedData.open(saved)


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def rewrite(path, content):
    """Writes a new file, because the one before may still be mapped."""
    path.unlink()
    path.write_bytes(content)


def layout_of(path):
    content = path.read_bytes()
    return json.loads(content[64 : 64 + int(content[16:24], 16)])


@pytest.mark.slow
class TestAFullDisk:
    def test_a_failed_save_leaves_only_the_old_file(self, saved, monkeypatch):
        before = saved.read_bytes()

        def fail(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("fedsim.durable_files.os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            FederatedData.from_clients(some_clients((9,))).save(saved)
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]

    @pytest.mark.parametrize("limit", [100, 5_000, 20_000, 50_000, 70_000])
    @pytest.mark.parametrize("expression", ["data", "ClientStream.of(data)"])
    def test_a_full_disk_is_an_os_error_and_leaves_no_file(self, tmp_path, limit, expression):
        """A limit on the size of files simulates the full disk, because the kernel refuses the same writes."""
        script = f"""
import resource, sys, numpy as np
from fedsim.data import ClientStream, FederatedData
data = FederatedData.from_arrays({{"x": np.ones((1000, 9)), "t": np.array([b"some text"] * 1000, object)}}, sizes=[10] * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    {expression}.save({str(tmp_path / "a.h5")!r})
except OSError as error:
    sys.exit(0)
sys.exit("no error")
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.iterdir()) == []


class TestSize:
    def test_opening_a_large_population_is_cheap(self, tmp_path):
        """A tenth of the figure in benchmarks (10,000,000 sequences of 342,477 clients): < 0.1 s, < 20 MB."""
        clients, rows = 34_247, 1_000_000
        sizes = np.full(clients, rows // clients)
        sizes[: rows - sizes.sum()] += 1
        tokens = np.zeros((rows, 20), np.int16)
        ids = [f"{i:08d}" for i in range(clients)]
        FederatedData.from_arrays({"x": tokens, "y": tokens}, sizes=sizes, client_ids=ids).save(tmp_path / "a.h5")
        script = f"""
import time, psutil
from fedsim.data import FederatedData
before, start = psutil.Process().memory_info().rss, time.perf_counter()
data = FederatedData.open({str(tmp_path / "a.h5")!r})
assert data.index("{clients - 1:08d}") == {clients - 1}
print(time.perf_counter() - start, psutil.Process().memory_info().rss - before)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        seconds, grown = map(float, done.stdout.split())
        assert seconds < 1
        assert grown < 20e6

    def test_the_cost_of_a_cohort_does_not_depend_on_the_population(self, tmp_path):
        def seconds(clients):
            data = FederatedData.from_arrays({"x": np.zeros((clients * 4, 20), np.int16)}, sizes=np.full(clients, 4))
            data.save(tmp_path / "a.h5")
            data = FederatedData.open(tmp_path / "a.h5")
            chosen = np.random.default_rng(0).integers(clients, size=1000)
            _ = data.sizes, data.gather("x", chosen)
            times = []
            for _ in range(20):
                start = time.perf_counter()
                data.gather("x", chosen)
                times.append(time.perf_counter() - start)
            return min(times)

        assert seconds(100_000) < 3 * seconds(1_000) + 0.002


@pytest.mark.parametrize("name", ["audio/starts", "image/bytes", "a/b"])
def test_a_feature_whose_name_is_that_of_a_part_is_refused(name, tmp_path):
    data = FederatedData.from_arrays({"x": np.arange(3), name: np.arange(3)}, sizes=[3])
    with pytest.raises(ValueError, match=f"Feature name '{name}' cannot be"):
        data.save(tmp_path / "a.h5")


@pytest.mark.parametrize("others", [{}, {"a": np.array([b"to", b"be", b""], object)}])
def test_features_whose_names_are_those_of_both_parts_of_a_text_are_refused(others, tmp_path):
    """The file would take the numbers for a column of texts."""
    data = FederatedData.from_arrays(others | {"a/bytes": np.arange(3), "a/starts": np.arange(3)}, sizes=[3])
    for save in (data.save, ClientStream.of(data).save):
        with pytest.raises(ValueError, match="Feature name 'a/bytes' cannot be"):
            save(tmp_path / "a.h5")
    assert list(tmp_path.iterdir()) == []
