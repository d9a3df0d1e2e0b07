"""Tests of the conversion into the cache: each source is converted once, and an interruption leaves no incomplete file."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedsim
from fedsim.data import ClientStream, FormatError
from fedsim.datasets import _cache

CLIENTS = [(f"c{i}", {"x": np.full((i + 1, 3), i, np.int32)}) for i in range(5)]


def convert(cache, source, reads=None, **options):
    def stream():
        if reads is not None:
            reads.append(1)
        return ClientStream(lambda: iter(CLIENTS), len(CLIENTS))

    return _cache.converted("mine", cache, {"train": stream, "test": stream}, files=[source], **options)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_text("content")
    return tmp_path / "source"


def atomic_writes(cache):
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_source_is_converted_once_and_then_memory_mapped(tmp_path, source):
    reads = []
    for _ in range(3):
        splits = convert(tmp_path / "cache", source, reads)
        assert sorted(splits) == ["test", "train"] and isinstance(splits["train"].columns["x"], np.memmap)
        assert {client.client_id: client["x"].tolist() for client in splits["train"]} == {
            name: features["x"].tolist() for name, features in CLIENTS
        }
    assert len(reads) == 2


def test_the_source_is_converted_again_after_a_change_of_options_version_or_file(tmp_path, source):
    reads = []

    def again(**options):
        before = len(reads)
        convert(tmp_path / "cache", source, reads, **options)
        return len(reads) > before

    assert [again(), again(length=3), again(length=4), again(length=3), again(version=2), again()] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    os.utime(source, ns=(1, 1))
    assert again() and not again()
    source.write_text("more content")
    os.utime(source, ns=(1, 1))
    assert again() and not again()


def test_a_folder_as_source_is_identified_by_its_files(tmp_path):
    folder, reads = tmp_path / "folder", []
    folder.mkdir()
    (folder / "a.json").write_text("a")
    convert(tmp_path / "cache", folder, reads)
    convert(tmp_path / "cache", folder, reads)
    assert len(reads) == 2
    (folder / "b.json").write_text("b")
    convert(tmp_path / "cache", folder, reads)
    assert len(reads) == 4


def test_a_failed_conversion_leaves_no_file_and_the_next_call_converts(tmp_path, source):
    def broken():
        yield CLIENTS[0]
        raise FormatError("the file is cut")

    streams = {"train": lambda: ClientStream(lambda: iter(CLIENTS)), "test": lambda: ClientStream(broken)}
    with pytest.raises(FormatError, match="cut"):
        _cache.converted("mine", tmp_path / "cache", streams, files=[source])
    assert atomic_writes(tmp_path / "cache") == ["train.h5"]
    assert convert(tmp_path / "cache", source)["test"].num_clients == 5


SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from fedsim.data import ClientStream
from fedsim.datasets import _cache
cache, source, pause, rows = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
def clients():
    for i in range(5):
        yield f"c{i}", {"x": np.full((rows, 3), i, np.int32)}
        if i == 3:
            print("half", flush=True)
            time.sleep(pause)
try:
    _cache.converted("mine", cache, {"train": lambda: ClientStream(clients)}, files=[source])
    print("whole", flush=True)
except OSError as error:
    print(error.errno, error, flush=True)
"""


def child(cache, source, pause=0.0, rows=1, before=""):
    environment = {**os.environ, "PYTHONPATH": str(Path(fedsim.__file__).parents[1])}
    arguments = [sys.executable, "-c", before + SCRIPT, str(cache), str(source), str(pause), str(rows)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


WRITTEN_BUT_NOT_NAMED = "import os, time\nos.fsync = lambda file: (print('written', flush=True), time.sleep(60))\n"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "pause", "last_line"), [("", 60, "half"), (WRITTEN_BUT_NOT_NAMED, 0, "written")])
def test_a_killed_process_leaves_no_file_that_looks_complete(before, pause, last_line, tmp_path, source):
    cache = tmp_path / "cache"
    process = child(cache, source, pause=pause, rows=300_000, before=before)
    while (line := process.stdout.readline().strip()) != last_line:
        assert line == "half"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert not any(name.endswith(".h5") for name in atomic_writes(cache))
    reads = []
    splits = convert(cache, source, reads)
    assert len(reads) == 2 and splits["train"].num_examples == 15
    assert atomic_writes(cache) == ["test.h5", "train.h5"]


@pytest.mark.slow
def test_one_of_two_processes_converts_and_the_other_waits(tmp_path, source):
    first = child(tmp_path / "cache", source, pause=1.0)
    assert first.stdout.readline() == "half\n"
    second = child(tmp_path / "cache", source)
    outputs = [process.communicate(timeout=600)[0].split() for process in (first, second)]
    assert outputs == [["whole"], ["whole"]]


@pytest.mark.skipif(os.name == "nt", reason="no such limits there")
def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path, source):
    """A limit on file sizes simulates a full disk."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
    output, _ = child(tmp_path / "cache", source, rows=300_000, before=limit).communicate(timeout=600)
    number, _, message = output.splitlines()[-1].partition(" ")
    assert int(number) == errno.EFBIG
    assert (
        "'mine' could not be converted: " in message and "is full (File too large). Free some space, or set FEDSIM" in message
    )
    assert atomic_writes(tmp_path / "cache") == []


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_reported(tmp_path, source):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(OSError, match="cannot be written .*set FEDSIM_CACHE or cache= to another folder"):
        convert(tmp_path / "closed" / "cache", source)


def test_only_complete_downloads_count_as_cached(tmp_path, source):
    assert not _cache.is_cached("mine", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".lock").touch()
    (tmp_path / "mine" / "a.tar.bz2.part").touch()
    assert not _cache.is_cached("mine", tmp_path)
    convert(tmp_path / "mine", source)
    assert not _cache.is_cached("mine", tmp_path), "of a user's own file"
    (tmp_path / "mine" / "a.h5").touch()
    assert _cache.is_cached("mine", tmp_path)


def test_the_error_for_a_damaged_cached_file_says_what_to_delete(tmp_path, source):
    convert(tmp_path / "cache", source)
    (train,) = (tmp_path / "cache").rglob("train.h5")
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(FormatError, match=f"train.h5 is truncated .*delete the folder {train.parent}"):
        convert(tmp_path / "cache", source)


def test_the_error_for_a_cache_that_is_a_file_says_what_to_set(tmp_path, source):
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="cannot be written .*FEDSIM_CACHE"):
        convert(tmp_path / "cache", source)
