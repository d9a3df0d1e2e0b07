"""Tests of `ClientStream`."""

import subprocess
import sys

import numpy as np
import pytest

from fedsim.data import ClientStream, FederatedData, FormatError


def stream(*clients, **options):
    return ClientStream(lambda: iter(clients), **options)


def two():
    return stream(
        ("b", {"x": np.arange(6).reshape(3, 2), "t": np.array([b"to", b"", b"be"], object)}),
        ("a", {"x": np.zeros((0, 2), int), "t": np.array([], object)}),
    )


def contents(clients):
    return [(c.client_id, {name: array[:].tolist() for name, array in c.examples.items()}) for c in clients]


@pytest.fixture(params=["load", "save"])
def collected(request, tmp_path):
    """A function that collects a stream in memory, or in a file."""

    def collect(clients):
        if request.param == "load":
            return clients.load()
        clients.save(tmp_path / "a.h5")
        return FederatedData.open(tmp_path / "a.h5")

    return collect


def test_iterating_again_reads_again(collected):
    clients = two()
    assert contents(clients) == contents(clients) == contents(collected(clients))
    assert contents(ClientStream.of(collected(clients))) == contents(clients)


def test_dtypes_are_kept_except_for_the_byte_order(collected):
    arrays = {"a": np.ones(2, ">f4"), "b": np.ones((2, 3), np.uint8), "c": np.ones(2, bool), "d": np.array([b"x", b"yz"])}
    columns = collected(stream(("c", arrays))).columns
    assert {name: column.dtype.str for name, column in columns.items()} == {"a": "<f4", "b": "|u1", "c": "|b1", "d": "|S2"}


def test_map_may_change_rows_and_features_and_empty_clients_stay(collected):
    mapped = two().map(lambda client_id, examples: {"y": examples["x"][:2, 0] + len(client_id)})
    assert contents(collected(mapped)) == [("b", {"y": [1, 3]}), ("a", {"y": []})]
    assert stream(num_clients=7).map(lambda _, examples: examples).num_clients == 7


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "The population is empty"),
        ([("a", {"x": [1]}), ("b", {"x": [1]}), ("a", {"x": [2]})], "'a' occurs more than once"),
        ([("a", {})], "Client 'a' has no features"),
        ([("a", {"x": [1]}), ("b", {"y": [1]})], r"Client 'b' has features \['y'\], and client 'a' has \['x'\]"),
        ([("a", {"x": [1], "y": [1, 2]})], "Client 'a' has features of different lengths"),
        ([("a", {"x": np.zeros((1, 2))}), ("b", {"x": np.zeros((1, 3))})], r"'x' of client 'b' is float64 \[3\]"),
        ([("a", {"x": np.zeros(1)}), ("b", {"x": np.zeros(1, int)})], "'x' of client 'b' is int64"),
        ([("a", {"x": [[1, 2], [3]]})], "'x' of client 'a': .*inhomogeneous"),
        ([("a", {"x": np.array([[1, 2], [3]], object)})], "'x' of client 'a': Text must be bytes, got list"),
        ([("a", {"x": 5})], "'x' of client 'a': expected an array with one row per example"),
        ([("a", {"x": np.array(["text"], object)})], "'x' of client 'a': Text must be bytes, got str"),
        ([(b"a", {"x": [1]})], "Client ids must be text, got bytes b'a'"),
    ],
)
def test_invalid_clients_are_refused_with_the_name_of_the_source(collected, clients, message):
    with pytest.raises(FormatError, match=f"^some.file: .*{message}"):
        collected(stream(*clients, source="some.file"))


def test_errors_of_a_transform_name_the_source():
    def transform(client_id, examples):
        raise ValueError(f"Client {client_id!r} is wrong.")

    with pytest.raises(FormatError, match="^some.file: Client 'a' is wrong"):
        stream(("a", {"x": [1]}), source="some.file").map(transform).map(lambda _, examples: examples).load()


def test_what_a_packed_file_cannot_store_is_a_format_error_and_leaves_no_file(tmp_path):
    for clients in ([("a\0", {"x": [1]})], [("a", {"x/y": [1]})], [("a", {"x": np.array(["U"])})]):
        with pytest.raises(FormatError, match="some.file: "):
            stream(*clients, source="some.file").save(tmp_path / "a.h5")
    with pytest.raises(FileNotFoundError, match="No folder"):
        two().save(tmp_path / "nowhere" / "a.h5")
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_reading_leaves_the_old_file(tmp_path):
    two().save(tmp_path / "a.h5")

    def read():
        yield from two().read()
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        ClientStream(read).save(tmp_path / "a.h5")
    assert contents(FederatedData.open(tmp_path / "a.h5")) == contents(two())
    assert len(list(tmp_path.iterdir())) == 1


def test_the_progress_bar_is_labeled_and_only_shown_on_request(tmp_path, monkeypatch):
    seen = []

    def bar(clients, label, total, *, disable, **options):
        seen.append((label, total, disable))
        return clients

    monkeypatch.setattr("tqdm.tqdm", bar)
    two().save(tmp_path / "a.h5")
    stream(*two().read(), num_clients=2).save(tmp_path / "a.h5", progress="converting")
    assert seen == [(None, None, True), ("converting", 2, None)]


def test_memory_does_not_grow_with_the_size(tmp_path):
    """Saving 240 MB of numbers and text needs less than a quarter of that in memory."""
    script = f"""
import resource, numpy as np
from fedsim.data import ClientStream
def read():
    for i in range(60):
        yield str(i), {{"x": np.full((1000, 500), i, np.float32), "t": np.array([b"x" * 2000] * 1000, object)}}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ClientStream(read).save({str(tmp_path / "a.h5")!r})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (tmp_path / "a.h5").stat().st_size > 240e6
    assert int(done.stdout) < 60e6
    assert FederatedData.open(tmp_path / "a.h5")["59"]["x"].mean() == 59


@pytest.mark.parametrize("rows", [3, 500, 40_000])
def test_a_stream_and_its_population_write_equal_files(tmp_path, rows):
    """For any column that is written in place, and any number of rows after those of the first client."""
    words = np.array([b"to be"] * rows, object)
    clients = {"a": {"t": words[:3], "y": np.arange(3), "x": np.zeros([3, 5])}}
    clients["b"] = {"t": words, "y": np.arange(rows), "x": np.random.default_rng(0).random((rows, 5))}
    for features in (["t", "y", "x"], ["y", "x"]):
        chosen = {name: {feature: examples[feature] for feature in features} for name, examples in clients.items()}
        stream = ClientStream(lambda chosen=chosen: iter(chosen.items()))
        stream.save(tmp_path / "streamed.h5")
        stream.load().save(tmp_path / "saved.h5")
        assert (tmp_path / "streamed.h5").read_bytes() == (tmp_path / "saved.h5").read_bytes()


def test_masked_values_are_refused():
    x = np.ma.masked_equal([1.0, -9.0], -9.0)
    with pytest.raises(ValueError, match="feature 'x' of client 'a' without masked values, got 1 of 2"):
        ClientStream(lambda: iter([("a", {"x": x})])).load()
