"""Tests of downloads from a local server that simulates failures."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import http.server
import io
import lzma
import os
import socket
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

from fedsim.datasets import DownloadError, _archive, _download

CONTENT = np.random.default_rng(0).bytes(300_000)
HASH = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``server.content``; each request first removes the next fault from ``server.faults``."""

    def do_GET(self):
        fault = self.server.faults.pop(0) if self.server.faults else {}
        self.server.ranges.append(self.headers.get("Range"))
        content, start = self.server.content, 0
        if "status" in fault:
            self.send_error(fault["status"])
            return
        if "hang_up" in fault:
            self.close_connection = True
            return
        asked = self.headers.get("Range")
        if asked and self.server.resumes:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = fault.get("resume_at", start)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: fault.get("cut", len(body))])
        self.wfile.flush()
        if "stall" in fault:
            self.server.released.wait(fault["stall"])
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.faults, server.ranges, server.resumes = CONTENT, [], [], True
        server.released = threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}/file.bin"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join(10)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def fetch(server, path, **how):
    return _download.fetch(server.url, path, **{"backoff": 0.01, "timeout": 5.0} | how)


def test_a_file_is_downloaded_once(server, tmp_path):
    path = tmp_path / "new" / "file.bin"
    for _ in range(2):
        assert fetch(server, path, sha256=HASH) == path
        assert path.read_bytes() == CONTENT
    assert server.ranges == [None]
    assert os.listdir(path.parent) == ["file.bin"]


def test_an_interrupted_transfer_is_resumed(server, tmp_path):
    server.faults = [{"cut": 100_000}, {"cut": 50_000}]
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_transfer_is_resumed_by_the_next_call(server, tmp_path):
    server.faults = [{"cut": 100_000}, {"hang_up": True}, {"hang_up": True}]
    with pytest.raises(DownloadError, match="was interrupted 2 times at byte 100000"):
        fetch(server, tmp_path / "file.bin", retries=1)
    assert os.listdir(tmp_path) == ["file.bin.part"]
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=100000-"


def test_a_server_that_cannot_resume_sends_the_whole_file_again(server, tmp_path):
    server.resumes = False
    server.faults = [{"cut": 100_000}, {"cut": 20_000}]
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT
    assert len(server.ranges) == 3


def test_a_server_that_resumes_at_another_byte_is_not_trusted(server, tmp_path):
    server.faults = [{"cut": 100_000}, {"resume_at": 90_000}]
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", None]


def test_a_stalled_transfer_is_resumed(server, tmp_path):
    server.faults = [{"cut": 100_000, "stall": 8}]
    assert fetch(server, tmp_path / "file.bin", sha256=HASH, timeout=2).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


def test_a_download_fails_if_the_server_always_stalls(server, tmp_path):
    server.faults = [{"cut": 0, "stall": 5}] * 9
    with pytest.raises(DownloadError, match=r"was interrupted 3 times at byte 0 \(no byte for 0.2 seconds\)"):
        fetch(server, tmp_path / "file.bin", timeout=0.2, retries=2)
    assert len(server.ranges) == 3


def test_tries_are_counted_from_the_last_new_byte(server, tmp_path):
    server.faults = [{"cut": 30_000}, {"hang_up": True}] * 8
    assert fetch(server, tmp_path / "file.bin", sha256=HASH, retries=1).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_to_a_busy_server_is_repeated(server, tmp_path, status):
    server.faults = [{"status": status}] * 2
    assert fetch(server, tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404])
def test_a_request_that_is_refused_is_not_repeated(server, tmp_path, status):
    server.faults = [{"status": status}]
    with pytest.raises(DownloadError, match=f"answers HTTP {status}"):
        fetch(server, tmp_path / "file.bin")
    assert len(server.ranges) == 1
    assert os.listdir(tmp_path) == []


def test_a_file_with_another_hash_is_refused_and_deleted(server, tmp_path):
    with pytest.raises(DownloadError, match=f"has SHA-256 {HASH}, expected 00; nothing of it is kept"):
        fetch(server, tmp_path / "file.bin", sha256="00")
    assert os.listdir(tmp_path) == []


def test_the_partial_file_of_another_file_is_discarded(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-", None]


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"], ids=["whole", "too_long"])
def test_a_partial_file_may_be_as_long_as_the_file_or_longer(server, tmp_path, left):
    (tmp_path / "file.bin.part").write_bytes(left)
    assert fetch(server, tmp_path / "file.bin", sha256=HASH).read_bytes() == CONTENT


def test_an_existing_file_is_checked(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"file.bin has SHA-256 .* expected .*: delete it to download it again"):
        fetch(server, tmp_path / "file.bin", sha256=HASH)
    assert server.ranges == []


def test_without_a_server_it_fails_at_once(tmp_path):
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.bin"
    with pytest.raises(DownloadError, match=r"cannot be reached \(Connection refused\)"):
        _download.fetch(url, tmp_path / "file.bin", backoff=60)


def pack(entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:bz2") as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def test_members_are_extracted_and_the_archive_is_deleted(server, tmp_path):
    server.content = pack([("a.h5", b"A" * 1000), ("folder/b.h5", b"B"), ("c", b"C")])
    for _ in range(2):
        _download.Download(f"{server.url}.tar", ("a.h5", "b.h5")).into(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["a.h5", "b.h5"]
    assert (tmp_path / "a.h5").read_bytes() == b"A" * 1000
    assert len(server.ranges) == 1


def test_nothing_is_extracted_outside_the_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "evil.tar").write_bytes(pack([("../a.h5", b"A"), ("/b.h5", b"B"), ("../../c", b"C")]))
    _archive.extract(inside / "evil.tar", ["a.h5", "b.h5"])
    assert sorted(p.name for p in inside.iterdir()) == ["a.h5", "b.h5", "evil.tar"]
    assert list(tmp_path.iterdir()) == [inside]


def test_a_link_does_not_count_as_a_member(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("a.h5")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    with pytest.raises(ValueError, match=r"a.tar does not contain a.h5: delete it"):
        _archive.extract(tmp_path / "a.tar", ["a.h5"])


@pytest.mark.first(2)
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9])
def test_the_error_for_a_truncated_archive_names_it_and_no_member_gets_its_final_name(tmp_path, share):
    content = pack([("a.h5", CONTENT * 10), ("b.h5", b"B")])  # The content fills several blocks of bzip2.
    (tmp_path / "a.tar.bz2").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"a.tar.bz2 is damaged .*: delete it to download it again"):
        _archive.extract(tmp_path / "a.tar.bz2", ["a.h5", "b.h5"])
    assert os.listdir(tmp_path) == ["a.tar.bz2"]


COMPRESSED = {
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".gz": gzip.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_compressed_file_is_downloaded_decompressed_and_deleted(server, tmp_path, suffix):
    server.content = COMPRESSED[suffix](CONTENT)
    size, digest = len(server.content), hashlib.sha256(server.content).hexdigest()
    download = _download.Download(f"{server.url}/a.sqlite{suffix}", ("a.sqlite",), digest, size)
    for _ in range(2):
        download.into(tmp_path)
        assert (tmp_path / "a.sqlite").read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path)) == [".lock", "a.sqlite"]
    assert len(server.ranges) == 1


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_the_error_for_a_truncated_compressed_file_names_it_and_no_incomplete_file_is_left(tmp_path, suffix, share):
    content = COMPRESSED[suffix](CONTENT)
    path = tmp_path / f"a.sqlite{suffix}"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=rf"a.sqlite{suffix} is damaged .*: delete it to download it again"):
        _download.Download(f"http://nowhere/a.sqlite{suffix}", ("a.sqlite",)).into(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", path.name]


def test_a_file_with_another_size_is_refused_and_deleted(server, tmp_path):
    with pytest.raises(DownloadError, match="has 300000 bytes, expected 300001; nothing of it is kept"):
        fetch(server, tmp_path / "file.bin", num_bytes=300_001)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="file.bin has 3 bytes, expected 300000: delete it"):
        fetch(server, tmp_path / "file.bin", num_bytes=300_000)


def test_a_file_that_needs_no_extraction_is_not_changed(server, tmp_path):
    _download.Download(server.url, ("file.bin",), HASH, len(CONTENT)).into(tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such limits there")
@pytest.mark.parametrize("form", ["plain", "tar", "bz2"])
def test_a_full_disk_is_reported_and_no_incomplete_file_gets_its_final_name(server, tmp_path, form):
    """A limit on file sizes simulates a full disk."""
    server.content = {"plain": CONTENT, "tar": pack([("a.h5", b"A" * 300_000)]), "bz2": bz2.compress(b"A" * 300_000)}[form]
    name = {"plain": "a.h5", "tar": "a.tar", "bz2": "a.h5.bz2"}[form]
    script = f"""
import resource
from pathlib import Path
from fedsim.datasets import _download
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    _download.Download({server.url!r} + "/{name}", ("a.h5",)).into(Path({str(tmp_path)!r}))
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["OSError", str(errno.EFBIG)], done
    left = {"plain": ["a.h5.part"], "tar": ["a.tar"], "bz2": ["a.h5.bz2"]}[form]  # the partial file can be resumed
    assert sorted(os.listdir(tmp_path)) == [".lock", *left]


def test_one_of_several_processes_downloads(server, tmp_path):
    server.content = pack([("a.h5", CONTENT)])
    script = f"""
from pathlib import Path
from fedsim.datasets import _download
_download.Download({server.url!r} + ".tar", ("a.h5",)).into(Path({str(tmp_path)!r}))
"""
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(server.ranges) == 1
    assert (tmp_path / "a.h5").read_bytes() == CONTENT
