"""Fetching a file once: resumed where it was cut, checked, and given its name only when it is whole."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, two first runs at once may fetch twice.
    fcntl = None  # type: ignore[assignment]

_BLOCK = 1 << 16
_WORTH_RETRYING = {408, 425, 429, 500, 502, 503, 504}


class DownloadError(OSError):
    """A file could not be fetched; the message is one line that says which and why."""


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
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
      retries: how often, in a row, to try again without a single new byte.
      backoff: seconds to wait before the first of these, doubled for each that follows.
      timeout: seconds without a byte after which a transfer counts as stalled.

    Returns:
      ``path``.

    Raises:
      DownloadError: the server cannot be reached (which is not tried again), it refuses, it keeps failing, or what it
        sends has another hash (in which case nothing is kept).
      ValueError: ``path`` is there and has another hash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if path.exists():
        if sha256 is not None and (actual := _sha256(path)) != sha256:
            raise ValueError(f"{path} has SHA-256 {actual}, expected {sha256}: delete it to fetch it anew.")
        return path
    # What an earlier call left may be another file's beginning: if the hash is wrong then, once more from the start.
    actual = ""
    for _ in range(2 if part.exists() else 1):
        _fetch_whole(url, part, retries, backoff, timeout)
        actual = _sha256(part)
        if sha256 in (None, actual):
            os.replace(part, path)
            return path
        part.unlink()
    raise DownloadError(f"{url} has SHA-256 {actual}, expected {sha256}; nothing of it is kept.")


def fetch_members(url: str, folder: Path, members: Sequence[str], *, sha256: str | None = None, **how: Any) -> None:
    """Fetches a tar archive and extracts its files ``members`` into ``folder``, unless all are there.

    An archive that lies in ``folder`` already, under the name it has in ``url``, is taken instead (and removed after,
    like a fetched one). Of several processes at once, one does the work and the others wait for it.

    Raises:
      DownloadError, ValueError: as `fetch` and `extract` do.
    """
    if all((folder / member).is_file() for member in members):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / ".lock"):
        if not all((folder / member).is_file() for member in members):
            archive = fetch(url, folder / url.rpartition("/")[2], sha256=sha256, **how)
            extract(archive, members)
            archive.unlink()


def extract(archive: Path, members: Sequence[str]) -> list[Path]:
    """Takes the files named ``members`` out of a tar archive, into its folder, whatever folders they lie in inside.

    Nothing else is written, and each file takes its name only when it is whole.

    Raises:
      ValueError: the archive is damaged, or lacks a member.
    """
    missing = dict.fromkeys(members)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for entry in tar:
                name = entry.name.rpartition("/")[2]
                content = tar.extractfile(entry) if entry.isreg() and name in missing else None
                if content is None:
                    continue
                part = archive.with_name(name + ".part")
                with open(part, "wb") as out, _bar(f"extracting {name}", entry.size) as bar:
                    while block := content.read(_BLOCK):
                        out.write(block)
                        bar.update(len(block))
                    _to_disk(out)
                os.replace(part, archive.with_name(name))
                del missing[name]
                if not missing:
                    break
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # A full disk is no fault of the archive.
            raise
        reason = str(error).partition("\n")[0].rstrip(":")
        raise ValueError(f"{archive} is damaged ({reason}): delete it to fetch it anew.") from error
    if missing:
        raise ValueError(f"{archive} has no {' and no '.join(missing)}: delete it to fetch it anew.")
    return [archive.with_name(name) for name in members]


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
                raise DownloadError(f"{url} cannot be reached ({reason}).") from None
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
        with open(part, "ab" if resumes else "wb") as out, _bar(f"fetching {part.stem}", total, start) as bar:
            for block in _blocks(response):
                out.write(block)
                bar.update(len(block))
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


def _bar(label: str, total: int | None, start: int = 0) -> Any:
    return tqdm(desc=label, total=total, initial=start, unit="B", unit_scale=True, disable=None, leave=False)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds a lock between processes; it ends with the process, however that ends."""
    if fcntl is None:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
