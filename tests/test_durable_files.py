"""Tests that a file appears under its name only when it is complete, whatever happens to the process that writes it."""

import os
import signal
import subprocess
import sys

import pytest

from fedsim.data import FederatedData
from fedsim.durable_files import atomic_write

WRITER = """
import os, sys, numpy as np
from fedsim.data import ClientStream
def clients():
    for i in range(1000):
        yield str(i), {"x": np.ones((1000, 10)), "t": np.array([b"text"] * 1000, object)}
        if i == KILLED_AT:
            print("ready", flush=True); sys.stdin.read()
import fedsim.durable_files as module
fsync = os.fsync
def stopping(file):
    print("ready", flush=True); sys.stdin.read()
    fsync(file)
module.os.fsync = stopping
ClientStream(clients).save(sys.argv[1])
"""


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("moment", [20, None])
def test_a_killed_conversion_leaves_no_file_and_the_next_save_cleans_up(tmp_path, moment):
    """The process is killed while it receives rows, or before the finished file is renamed."""
    path = tmp_path / "a.h5"
    script = f"KILLED_AT = {moment}\n{WRITER}".replace("range(1000)", "range(30)")
    writer = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    other = FederatedData.from_arrays({"x": [1]}, sizes=[1])
    other.save(tmp_path / "b.h5")
    assert len(leftovers(tmp_path)) == 2, "the file of a running process stays"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    assert not path.exists()
    other.save(tmp_path / "b.h5")
    assert leftovers(tmp_path) == ["b.h5"]


def test_other_files_stay(tmp_path):
    (tmp_path / "a.part").touch()
    (tmp_path / "a.h5.12345678.part").touch()
    with atomic_write(tmp_path / "a.h5") as part:
        part.write_bytes(b"all")
    assert leftovers(tmp_path) == ["a.h5", "a.h5.12345678.part", "a.part"]


def test_two_writers_of_one_file_do_not_interfere(tmp_path):
    with atomic_write(tmp_path / "a") as first, atomic_write(tmp_path / "a") as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert leftovers(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"first", "the last to be completed"


def test_an_error_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(TypeError), atomic_write(tmp_path / "a") as part:
        part.write_text("half") and part.write_bytes("text")
    assert leftovers(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_the_file_has_the_permissions_of_any_other(tmp_path):
    umask = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a"):
            pass
    finally:
        os.umask(umask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_neither_a_folder_nor_a_device_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileExistsError, match=f"{name} is a folder or a device"), atomic_write(tmp_path / name):
            raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
