"""Tests of files that take their name only once they are whole, whatever happens to the process that writes them."""

import os
import signal
import subprocess
import sys

import pytest

from fedsim.data import FederatedData
from fedsim.data._whole_file import whole_file

WRITER = """
import os, sys, numpy as np
from fedsim.data import ClientStream
def clients():
    for i in range(1000):
        yield str(i), {"x": np.ones((1000, 10)), "t": np.array([b"text"] * 1000, object)}
        if i == KILLED_AT:
            print("ready", flush=True); sys.stdin.read()
import fedsim.data._whole_file as whole
fsync = os.fsync
def stopping(file):
    print("ready", flush=True); sys.stdin.read()
    fsync(file)
whole.os.fsync = stopping
ClientStream(clients).save(sys.argv[1])
"""


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("moment", [20, None])
def test_a_killed_conversion_leaves_nothing_that_counts_and_the_next_save_cleans_up(tmp_path, moment):
    """Killed while rows come in, and when all but the name is there."""
    path = tmp_path / "a.h5"
    script = f"KILLED_AT = {moment}\n{WRITER}".replace("range(1000)", "range(30)")
    writer = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    other = FederatedData.from_arrays({"x": [1]}, sizes=[1])
    other.save(tmp_path / "b.h5")
    assert len(leftovers(tmp_path)) == 2, "what a living process works on stays"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    assert not path.exists()
    other.save(tmp_path / "b.h5")
    assert leftovers(tmp_path) == ["b.h5"]


def test_files_of_others_stay(tmp_path):
    (tmp_path / "a.part").touch()
    (tmp_path / "a.h5.12345678.part").touch()
    with whole_file(tmp_path / "a.h5") as part:
        part.write_bytes(b"all")
    assert leftovers(tmp_path) == ["a.h5", "a.h5.12345678.part", "a.part"]


def test_two_at_once_do_not_disturb_each_other(tmp_path):
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert leftovers(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"first", "the last to be whole"


def test_an_error_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(TypeError), whole_file(tmp_path / "a") as part:
        part.write_text("half") and part.write_bytes("text")
    assert leftovers(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_the_file_has_the_permissions_of_any_other(tmp_path):
    umask = os.umask(0o027)
    try:
        with whole_file(tmp_path / "a"):
            pass
    finally:
        os.umask(umask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_neither_a_folder_nor_a_device_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileExistsError, match=f"{name} is a folder or a device"), whole_file(tmp_path / name):
            raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
