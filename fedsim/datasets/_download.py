"""Fetching a file once: resumed where it was cut, checked, and given its name only when it is whole."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.datasets._archive import bar, unpack
from fedsim.datasets._cache import only_one

_BLOCK = 1 << 16
_WORTH_RETRYING = {408, 425, 429, 500, 502, 503, 504}


class DownloadError(OSError):
    """A file could not be fetched; the message is one line that says which and why."""


class UnreachableError(DownloadError):
    """There is no network, or no such server."""


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    num_bytes: int | None = None,
    retries: int = 4,
    backoff: float = 1.0,
    timeout: float = 30.0,
) -> Path:
    """Fetches ``url`` into ``path``, unless it is there.

    A cut or stalled transfer is taken up where it ended, in this call or the next one, from ``<path>.part``; a server
    that cannot resume sends all of it again. The number of bytes is checked against what the server announces.

    Args:
      url: the address.
      path: the file to be; its folder is made.
      sha256: what the content must hash to, in hex; checked for a file that is there already too. Without it, only the
        number of bytes is checked.
      num_bytes: how long it must be; without it, as long as the server says.
      retries: how often, in a row, to try again without a single new byte.
      backoff: seconds to wait before the first of these, doubled for each that follows.
      timeout: seconds without a byte after which a transfer counts as stalled.

    Returns:
      ``path``.

    Raises:
      DownloadError: the server cannot be reached (which is not tried again), it refuses, it keeps failing, or what it
        sends has another hash or size (in which case nothing is kept).
      ValueError: ``path`` is there and has another hash or size.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if path.exists():
        if fault := _fault(path, sha256, num_bytes):
            raise ValueError(f"{path} has {fault}: delete it to fetch it anew.")
        return path
    # What an earlier call left may be another file's beginning: if the hash is wrong then, once more from the start.
    fault = ""
    for _ in range(2 if part.exists() else 1):
        _fetch_whole(url, part, retries, backoff, timeout)
        fault = _fault(part, sha256, num_bytes)
        if not fault:
            os.replace(part, path)
            return path
        part.unlink()
    raise DownloadError(f"{url} has {fault}; nothing of it is kept.")


@dataclasses.dataclass(frozen=True)
class Download:
    """An address, and what is known of what lies there.

    Attributes:
      url: the address. A tar archive, or a compressed file if ``files`` says so, is unpacked.
      files: names of the files that there are in the end.
      sha256: published hash of what is fetched, in hex; None: none is published.
      num_bytes: published size of what is fetched; None: none is published.
    """

    url: str
    files: tuple[str, ...]
    sha256: str | None = None
    num_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name of the file that is fetched."""
        return self.url.rpartition("/")[2]

    def at_hand(self, folder: Path) -> bool:
        """Whether `into` needs no network."""
        return (folder / self.name).is_file() or all((folder / file).is_file() for file in self.files)

    def into(self, folder: Path, **how: Any) -> None:
        """Fetches, checks and unpacks into ``folder``, unless all ``files`` are there.

        A file that lies in ``folder`` already, under the name it has in ``url``, is taken instead (and an archive is removed
        after, like a fetched one). Of several processes at once, one does the work and the others wait for it.

        Raises:
          DownloadError, ValueError: as `fetch` does; the archive is damaged, or lacks a file.
        """
        if all((folder / file).is_file() for file in self.files):
            return
        with only_one(folder / ".lock"):
            if not all((folder / file).is_file() for file in self.files):
                fetched = fetch(self.url, folder / self.name, sha256=self.sha256, num_bytes=self.num_bytes, **how)
                if self.name not in self.files:
                    unpack(fetched, self.files)
                    fetched.unlink()


def _fetch_whole(url: str, part: Path, retries: int, backoff: float, timeout: float) -> None:
    """Tries until ``part`` is whole."""
    reached, best, fruitless = False, _size(part), 0
    while True:
        try:
            return _transfer(url, part, timeout)
        except urllib.error.HTTPError as error:
            error.close()
            reached, reason = True, f"HTTP {error.code} {error.reason}"
            if error.code not in _WORTH_RETRYING:
                raise DownloadError(f"{url} answers {reason}.") from None
        except urllib.error.URLError as error:
            reason = str(getattr(error.reason, "strerror", None) or error.reason)
            if not reached:  # Without a network, waiting helps nobody.
                raise UnreachableError(f"{url} cannot be reached ({reason}).") from None
        except TimeoutError:
            reached, reason = True, f"no byte for {timeout:g} seconds"
        except (http.client.HTTPException, ConnectionError) as error:
            reached, reason = True, str(error) or type(error).__name__
        size = _size(part)
        fruitless = 0 if size > best else fruitless + 1
        best = max(best, size)
        if fruitless > retries:
            raise DownloadError(f"{url} broke off {fruitless} times at byte {best} ({reason}); what there is is kept.")
        time.sleep(backoff * 2 ** max(0, fruitless - 1) if fruitless else 0)


def _transfer(url: str, part: Path, timeout: float) -> None:
    """One request: appends to ``part`` what it lacks, or writes it anew; raises unless it is whole afterwards."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # Range not satisfiable: nothing is missing, or this is not the file it was.
            raise
        error.close()
        if _total(error.headers) == have:
            return
        part.unlink()
        raise http.client.HTTPException(f"the server has no byte {have}") from None
    with response:
        resumes = response.status == 206 and _start(response.headers) == have
        if response.status == 206 and not resumes:
            part.unlink()
            raise http.client.HTTPException("the server resumes elsewhere than asked")
        start = have if resumes else 0
        total = _total(response.headers) if resumes else _length(response.headers)
        with open(part, "ab" if resumes else "wb") as out, bar(f"fetching {part.stem}", total, start) as progress:
            for block in _blocks(response):
                out.write(block)
                progress.update(len(block))
            _to_disk(out)
    if total is not None and (size := _size(part)) != total:
        if size > total:
            part.unlink()
        raise http.client.HTTPException(f"got {size} of {total} bytes")


def _blocks(response: Any) -> Iterator[bytes]:
    """What arrives; a failure of the network cannot be mistaken for one of the disk."""
    while True:
        try:
            block = response.read1(_BLOCK)  # What is there, so that a stall loses nothing.
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not block:
            return
        yield block


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _length(headers: Any) -> int | None:
    length = headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _start(headers: Any) -> int | None:
    """The first byte of ``Content-Range: bytes start-end/total``."""
    start = headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _total(headers: Any) -> int | None:
    total = headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fault(path: Path, sha256: str | None, num_bytes: int | None) -> str:
    """What is wrong with a file; empty: nothing."""
    if num_bytes is not None and (size := _size(path)) != num_bytes:
        return f"{size} bytes, expected {num_bytes}"
    if sha256 is not None:
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            return f"SHA-256 {actual}, expected {sha256}"
    return ""
