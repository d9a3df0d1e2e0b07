"""Tests of `ClientRows` in memory and in files against a dictionary, and of damaged or mismatched files."""

import copy as copylib
import errno
import math
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from fedsim.data import ClientRows, FormatError, _row_store
from fedsim.data._row_store import MemoryRows, RowFile

CLIENTS = 40
LIKE = {
    "w": jax.ShapeDtypeStruct((3, 2), np.float32),
    "half": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    "done": jax.ShapeDtypeStruct((), np.bool_),
    "none": jax.ShapeDtypeStruct((0, 2), np.float32),
    "visits": jax.ShapeDtypeStruct((), np.int32),
}
ABOUT = {"algorithm": "Scaffold", "clients": CLIENTS}


@pytest.fixture(params=["memory", "temporary file", "file"])
def store(request, tmp_path):
    stores = {
        "memory": lambda: MemoryRows(LIKE),
        "temporary file": lambda: RowFile(LIKE),
        "file": lambda: RowFile(LIKE, tmp_path / "rows", ABOUT),
    }
    return stores[request.param]()


def none_yet(store):
    return ClientRows(store, np.full(CLIENTS, -1, np.int64))


def draws(draw, count):
    return {
        "w": draw.normal(size=(count, 3, 2)).astype(np.float32),
        "half": draw.normal(size=(count, 5)).astype(jnp.bfloat16),
        "done": draw.integers(0, 2, count).astype(bool),
        "none": np.zeros((count, 0, 2), np.float32),
        "visits": draw.integers(0, 100, count).astype(np.int32),
    }


def assert_holds(rows, expected):
    """``expected``: client to row."""
    values, seen = rows.gather(np.arange(CLIENTS), slots=CLIENTS + 3)
    assert np.flatnonzero(seen).tolist() == sorted(expected) and len(rows) == len(expected)
    for name, leaf in values.items():
        whole = np.zeros((CLIENTS + 3, *LIKE[name].shape), LIKE[name].dtype)
        for client, row in expected.items():
            whole[client] = row[name]
        assert leaf.dtype == whole.dtype and leaf.shape == whole.shape and leaf.tobytes() == whole.tobytes()


@pytest.mark.first(1)
def test_many_versions_keep_their_rows_in_bounded_space(store):
    draw = np.random.default_rng(0)
    store.rows_per_chunk = 8
    versions, most = [(none_yet(store), {})], 0
    for _ in range(150):
        rows, expected = versions[draw.integers(len(versions))]
        clients = draw.permutation(CLIENTS)[: draw.integers(0, 12)]
        where = draw.random(len(clients)) < 0.8
        values = draws(draw, len(clients) + 2)
        new = rows.written(clients, jax.tree.map(jnp.asarray, values), where)
        kept = {client: {name: leaf[i] for name, leaf in values.items()} for i, client in enumerate(clients) if where[i]}
        versions = [*versions[-4:], (new, expected | kept)]
        del rows, new
        in_use = {number for version, _ in versions for number in version.index.tolist() if number >= 0}
        most = max(most, len(in_use) + 12 + CLIENTS)  # and the version that was just dropped
        for version in versions:
            assert_holds(*version)
    assert store.capacity <= math.ceil(1.25 * most) + 8


def test_the_new_value_has_the_new_row_and_the_old_value_the_old_row(store):
    first = none_yet(store).written(np.array([3]), draws(np.random.default_rng(1), 1))
    again = first.written(np.array([3]), draws(np.random.default_rng(2), 1))
    assert first.gather(np.array([3]))[0]["w"].tolist() == draws(np.random.default_rng(1), 1)["w"].tolist()
    assert again.gather(np.array([3]))[0]["w"].tolist() == draws(np.random.default_rng(2), 1)["w"].tolist()


def test_several_updates_do_not_overlap(store):
    """Not even when the store has no free row left: rows allocated for one update must not be reused for another."""
    store.rows_per_chunk = 4
    draw, rows = np.random.default_rng(0), none_yet(store)
    expected = {}
    for _ in range(5):
        updates = [(np.arange(at, at + 3), draws(draw, 4), np.array([True, False, True])) for at in (0, 9, 20)]
        rows = rows.all_written(updates)
        expected |= {
            c: {k: leaf[i] for k, leaf in new.items()} for clients, new, _ in updates for i, c in enumerate(clients) if i != 1
        }
        assert_holds(rows, expected)


def test_rows_of_an_index_on_a_device_are_kept(store):
    store.rows_per_chunk = 8
    draw, rows, values = np.random.default_rng(0), none_yet(store), draws(np.random.default_rng(3), 2)
    on_device = jax.tree.map(jnp.asarray, rows.written(np.array([1, 2]), values))
    for _ in range(20):
        rows = rows.written(np.array([5, 6, 7]), draws(draw, 3))
    np.testing.assert_array_equal(on_device.gather(np.array([1, 2]))[0]["w"], values["w"])
    assert on_device.index.dtype == np.int64


def test_copies_do_not_depend_on_the_original(store, monkeypatch):
    monkeypatch.setattr("fedsim.data._client_rows._BLOCK_BYTES", 200)
    draw = np.random.default_rng(0)
    values = draws(draw, CLIENTS)
    rows = none_yet(store).written(draw.permutation(CLIENTS), values, np.arange(CLIENTS) < 30)
    copy = rows.copied()
    expected, seen = rows.gather(np.arange(CLIENTS))
    del rows
    none_yet(store).written(np.arange(CLIENTS), draws(draw, CLIENTS))
    actual, also = copy.gather(np.arange(CLIENTS))
    np.testing.assert_array_equal(seen, also)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_rows_that_do_not_fit_in_memory_are_in_a_temporary_file(monkeypatch, tmp_path):
    row = jax.ShapeDtypeStruct((1000,), np.float32)
    assert isinstance(ClientRows.empty(row, 10).store, MemoryRows)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": 4 * 40_000 - 1}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = ClientRows.empty(row, 10)
    assert isinstance(rows.store, RowFile)
    rows = rows.written(np.array([4]), np.ones((1, 1000), np.float32))
    assert rows.gather(np.array([4]))[0].sum() == 1000
    assert list(tmp_path.iterdir()) == []  # the file has no name, so it is deleted when the process ends


def test_rows_in_a_file_take_an_index_and_the_written_rows():
    rows = ClientRows(RowFile(jax.ShapeDtypeStruct((262_144,), np.float32)), np.full(342_477, -1, np.int64))
    assert rows.store.capacity == 0 and rows.index.nbytes == 8 * 342_477
    rows = rows.written(np.array([342_476]), np.ones((1, 262_144), np.float32))
    assert rows.store.capacity == 16


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_partial_transfers_are_continued(most, monkeypatch):
    """A system may transfer fewer bytes than requested, and accepts a limited number of buffers at once."""
    like = [jax.ShapeDtypeStruct((2,), np.float32) for _ in range(1500)]
    store = RowFile(like)
    values = [np.full((2, 2), i, np.float32) + np.arange(2, dtype=np.float32)[:, None] for i in range(1500)]
    whole = {name: getattr(__import__("os"), name) for name in ("preadv", "pwritev")}

    def partial(name):
        def call(fd, views, at):
            assert len(views) <= 1024
            pieces, left = [], most
            for view in views:
                pieces.append(memoryview(view)[:left])
                left -= len(pieces[-1])
                if not left:
                    break
            return whole[name](fd, pieces, at)

        return call

    for name in whole:
        monkeypatch.setattr(f"os.{name}", partial(name))
    rows = ClientRows(store, np.full(3, -1, np.int64)).written(np.array([0, 2]), values)
    actual, _ = rows.gather(np.array([0, 2]))
    jax.tree.map(np.testing.assert_array_equal, actual, values)


def test_systems_without_vectored_input_and_output(monkeypatch):
    monkeypatch.delattr("os.preadv")
    monkeypatch.delattr("os.pwritev")
    values = draws(np.random.default_rng(0), 4)
    rows = none_yet(RowFile(LIKE)).written(np.arange(4), values)
    jax.tree.map(np.testing.assert_array_equal, rows.gather(np.arange(4))[0], values)


@pytest.fixture
def written(tmp_path):
    """A file with some rows, and the index and checksums that another process would have."""
    store = RowFile(LIKE, tmp_path / "rows", ABOUT)
    rows = none_yet(store).written(np.arange(5), draws(np.random.default_rng(0), 5))
    store.sync()
    return tmp_path / "rows", rows.index, store.checksums(rows.index)


def test_another_process_reads_the_same_rows(written):
    path, index, checksums = written
    store = RowFile(LIKE, path, ABOUT)
    store.expect(index, checksums)
    rows = ClientRows(store, index)
    jax.tree.map(np.testing.assert_array_equal, rows.gather(np.arange(5))[0], draws(np.random.default_rng(0), 5))
    more = rows.written(np.arange(30), draws(np.random.default_rng(1), 30))
    jax.tree.map(np.testing.assert_array_equal, rows.gather(np.arange(5))[0], draws(np.random.default_rng(0), 5))
    jax.tree.map(np.testing.assert_array_equal, more.gather(np.arange(30))[0], draws(np.random.default_rng(1), 30))


@pytest.mark.parametrize("read", [True, False])
def test_every_changed_byte_of_a_row_is_an_error(written, read):
    path, index, checksums = written
    whole = path.read_bytes()
    start = 4096 + 2 * RowFile(LIKE).row_bytes
    for byte in range(start, start + RowFile(LIKE).row_bytes):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        store = RowFile(LIKE, path, ABOUT)
        with pytest.raises(FormatError, match=r"rows is truncated or damaged.*row 2 is not what was written"):  # noqa: PT012
            with store.expected(index, checksums):
                pass
            if read:
                store.expect(index, checksums)
            ClientRows(store, index).gather(np.arange(5))
        assert ClientRows(store, index).gather(np.array([0]))[1].all() if not read else True


def test_every_truncation_of_the_rows_is_an_error(written):
    path, index, checksums = written
    whole = path.read_bytes()
    for length in range(4096, len(whole), 5):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="rows is truncated"):
            RowFile(LIKE, path, ABOUT).expect(index, checksums)


def test_a_reused_row_is_refused(written):
    path, index, checksums = written
    store = RowFile(LIKE, path, ABOUT)
    store.expect(index, checksums)
    with pytest.raises(FormatError, match="were overwritten"):
        store.expect(index, checksums + np.uint32(1))
    store.expect(index, checksums)


def test_damage_of_the_header_is_an_error(written):
    path, _, _ = written
    whole = path.read_bytes()
    text = whole.index(b'"row"')
    for damaged in (
        b"",
        whole[:5],
        whole[:40],
        whole[: text + 3],
        b"\x89HDF" + whole[4:],
        whole[:text] + b"#" + whole[text + 1 :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            FormatError, match=r"rows (\(\d+ bytes\) is of another format|is truncated or damaged).*another folder"
        ):
            RowFile(LIKE, path, ABOUT)


@pytest.mark.parametrize(
    ("like", "about", "message"),
    [
        (LIKE, ABOUT | {"algorithm": "Ditto"}, r"  algorithm: Scaffold in the file, Ditto here\n"),
        (LIKE, ABOUT | {"clients": 7}, r"  clients: 40 in the file, 7 here\n"),
        (
            LIKE | {"visits": jax.ShapeDtypeStruct((), np.float32)},
            ABOUT,
            r"  row\['visits'\]: int32\[\] in the file, float32\[\] here\n",
        ),
        (
            LIKE | {"new": jax.ShapeDtypeStruct((2,), np.int8)},
            ABOUT,
            r"  row\['new'\]: nothing in the file, int8\[2\] here\n",
        ),
        ({"w": LIKE["w"]}, {}, r"  row\['done'\]: bool\[\] in the file, nothing here\n"),
    ],
)
def test_rows_of_another_algorithm_or_population_are_refused(written, like, about, message):
    path, _, _ = written
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"(?s)rows holds the client memory of another.*{message}.*Choose another folder"):
        RowFile(like, path, about)
    assert path.read_bytes() == before


def test_a_full_disk_is_an_error_and_nothing_saved_is_lost(written, monkeypatch):
    path, index, checksums = written
    store = RowFile(LIKE, path, ABOUT)
    store.expect(index, checksums)
    rows, calls = ClientRows(store, index), []
    whole = __import__("os").pwritev

    def full(fd, views, at):
        calls.append(at)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, views, at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(OSError, match=r"cannot be written to .*rows: No space left .* MB are free there\. .*run again"):
            rows.written(np.arange(10), draws(np.random.default_rng(1), 10))
    jax.tree.map(np.testing.assert_array_equal, rows.gather(np.arange(5))[0], draws(np.random.default_rng(0), 5))
    again = rows.written(np.arange(10), draws(np.random.default_rng(1), 10))
    jax.tree.map(np.testing.assert_array_equal, again.gather(np.arange(10))[0], draws(np.random.default_rng(1), 10))
    jax.tree.map(np.testing.assert_array_equal, rows.gather(np.arange(5))[0], draws(np.random.default_rng(0), 5))


def test_a_store_without_memory_raises_and_works_again_when_there_is_memory(monkeypatch):
    monkeypatch.setattr("fedsim.data._row_store._CHUNK_BYTES", 1)
    draw, store = np.random.default_rng(0), MemoryRows(LIKE)
    values, pages = draws(draw, CLIENTS), _row_store._pages
    first = none_yet(store).written(np.arange(1), values)

    def none_left(size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(_row_store, "_pages", none_left)
    with pytest.raises(MemoryError, match=r"No memory for .* rows of client memory.*Hold fewer states"):
        first.written(np.arange(CLIENTS), values)
    monkeypatch.setattr(_row_store, "_pages", pages)
    second = first.written(np.arange(CLIENTS), values)
    assert_holds(first, {0: {name: leaf[0] for name, leaf in values.items()}})
    assert_holds(second, {client: {name: leaf[client] for name, leaf in values.items()} for client in range(CLIENTS)})


def test_a_copy_of_a_value_shares_its_rows():
    rows = none_yet(MemoryRows(LIKE, CLIENTS)).written(np.arange(3), draws(np.random.default_rng(0), 3))
    copy = copylib.deepcopy({"rows": rows})["rows"]
    assert copy is not rows and copy.store is rows.store and copy.index.tolist() == rows.index.tolist()
    assert len(rows.store.references) == 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages")
def test_small_leaves_take_no_large_pages():
    """300 leaves of 64 bytes, ten rows: not 2 MiB each."""
    like = [jax.ShapeDtypeStruct((16,), np.float32)] * 300
    rows, before = ClientRows.empty(like, 10_000), psutil.Process().memory_info().rss
    held = rows.written(np.arange(10), [np.ones((10, 16), np.float32)] * 300)
    assert len(held) == 10 and psutil.Process().memory_info().rss - before < 100e6


def test_a_file_of_rows_that_is_truncated_anywhere_is_refused(tmp_path):
    rows = none_yet(RowFile(LIKE, tmp_path / "rows", ABOUT)).written(
        np.arange(CLIENTS), draws(np.random.default_rng(0), CLIENTS)
    )
    index, checksums = rows.index, rows.store.checksums(rows.index)
    whole = (tmp_path / "rows").read_bytes()
    for length in [0, 10, 63, 64, 100, 1000, 4095, 4096, 4097, len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(FormatError, match="cut.*(truncated|damaged)"):
            RowFile(LIKE, tmp_path / "cut", ABOUT).expect(index, checksums)
