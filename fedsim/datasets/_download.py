"""Downloads a file once: resumed where it was interrupted, checked, and renamed to its final name when it is complete."""

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
from fedsim.datasets._cache import exclusive
from fedsim.durable_files import replace_durably

_BLOCK = 1 << 16
_WORTH_RETRYING = {408, 425, 429, 500, 502, 503, 504}


class DownloadError(OSError):
    """A file could not be downloaded; the message is one line with the address and the reason."""


class UnreachableError(DownloadError):
    """The server cannot be reached: there is no network, or no such server."""


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
    """Downloads ``url`` to ``path``, unless the file exists.

    An interrupted or stalled transfer is resumed from ``<path>.part``, in this call or the next one. A server that cannot
    resume sends the whole file again. The number of bytes is checked against the one that the server announces.

    Args:
      url: the address.
      path: the file to write; its folder is created.
      sha256: expected hash of the content, in hex, also checked if the file exists already. Without it, only the number of
        bytes is checked.
      num_bytes: expected size; without it, the size that the server announces.
      retries: number of attempts in a row that may bring no new byte before the download fails.
      backoff: seconds to wait before the first retry, doubled for each that follows.
      timeout: seconds without a byte after which a transfer counts as stalled.

    Returns:
      ``path``.

    Raises:
      DownloadError: the server cannot be reached (which is not retried), refuses, or keeps failing; or the content has another
        hash or size (in which case nothing is kept).
      ValueError: ``path`` exists with another hash or size.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if path.exists():
        if fault := _fault(path, sha256, num_bytes):
            raise ValueError(f"{path} has {fault}: delete it to download it again.")
        return path
    # A partial file of an earlier call may belong to another file, so after a wrong hash the download starts again once.
    fault = ""
    for _ in range(2 if part.exists() else 1):
        _fetch_whole(url, part, retries, backoff, timeout)
        fault = _fault(part, sha256, num_bytes)
        if not fault:
            replace_durably(part, path)
            return path
        part.unlink()
    raise DownloadError(f"{url} has {fault}; nothing of it is kept.")


@dataclasses.dataclass(frozen=True)
class Download:
    """A file to download, with its published hash and size.

    Attributes:
      url: the address. A tar archive is extracted, and a compressed file is decompressed if ``files`` has another name.
      files: names of the files that result.
      sha256: published hash of the download, in hex; None if none is published.
      num_bytes: published size of the download; None if none is published.
    """

    url: str
    files: tuple[str, ...]
    sha256: str | None = None
    num_bytes: int | None = None

    @property
    def name(self) -> str:
        """Name of the downloaded file."""
        return self.url.rpartition("/")[2]

    def is_local(self, folder: Path) -> bool:
        """Whether `into` needs no network."""
        return (folder / self.name).is_file() or all((folder / file).is_file() for file in self.files)

    def into(self, folder: Path, **how: Any) -> None:
        """Downloads, checks and extracts into ``folder``, unless all ``files`` exist there.

        If ``folder`` has a file with the name in ``url``, it is used instead of a download (an archive is removed afterwards,
        as a downloaded one is). If several processes do this at the same time, one does the work and the others wait for it.

        Raises:
          DownloadError, ValueError: raised by `fetch`; or the archive is damaged, or lacks a file.
        """
        if all((folder / file).is_file() for file in self.files):
            return
        with exclusive(folder / ".lock"):
            if not all((folder / file).is_file() for file in self.files):
                fetched = fetch(self.url, folder / self.name, sha256=self.sha256, num_bytes=self.num_bytes, **how)
                if self.name not in self.files:
                    unpack(fetched, self.files)
                    fetched.unlink()


def _fetch_whole(url: str, part: Path, retries: int, backoff: float, timeout: float) -> None:
    """Tries until ``part`` is complete."""
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
            if not reached:  # Without a network, a retry is useless.
                raise UnreachableError(f"{url} cannot be reached ({reason}).") from None
        except TimeoutError:
            reached, reason = True, f"no byte for {timeout:g} seconds"
        except (http.client.HTTPException, ConnectionError) as error:
            reached, reason = True, str(error) or type(error).__name__
        size = _size(part)
        fruitless = 0 if size > best else fruitless + 1
        best = max(best, size)
        if fruitless > retries:
            raise DownloadError(f"{url} was interrupted {fruitless} times at byte {best} ({reason}). What arrived is kept.")
        time.sleep(backoff * 2 ** max(0, fruitless - 1) if fruitless else 0)


def _transfer(url: str, part: Path, timeout: float) -> None:
    """Makes one request that completes ``part`` or writes it from the start; raises unless it is complete afterwards."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # Range not satisfiable: nothing is missing, or the file on the server has changed.
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
    """Yields received bytes; errors of the network are raised as ``ConnectionError``, unlike those of the disk."""
    while True:
        try:
            block = response.read1(_BLOCK)  # Returns what has arrived, so that a stall loses nothing.
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
    """Returns the first byte of ``Content-Range: bytes start-end/total``."""
    start = headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _total(headers: Any) -> int | None:
    total = headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fault(path: Path, sha256: str | None, num_bytes: int | None) -> str:
    """Returns what is wrong with a file, or an empty text."""
    if num_bytes is not None and (size := _size(path)) != num_bytes:
        return f"{size} bytes, expected {num_bytes}"
    if sha256 is not None:
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            return f"SHA-256 {actual}, expected {sha256}"
    return ""
