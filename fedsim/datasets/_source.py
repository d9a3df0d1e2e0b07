"""The file formats of a dataset: found in a folder, or downloaded, and converted once."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.data import ClientStream, FederatedData
from fedsim.datasets._cache import converted
from fedsim.datasets._download import Download, DownloadError, UnreachableError
from fedsim.formats import read_fedjax_sqlite

Transform = Callable[[str, dict[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file format of a dataset.

    Attributes:
      form: name of the format, e.g. ``"TFF's HDF5"``.
      files: split to the possible names of its file, of which the first that exists is used; ``*`` matches anything. Splits may
        share a file, and a name that ends with ``/`` is a folder.
      read: ``(file, split) ->`` the clients, with the features that all formats of the dataset share; None if the format is not
        read by `load_converted`.
      excluded: text that no file name may contain; empty for none.
      downloads: what is downloaded to get the files; empty if they cannot be downloaded.
    """

    form: str
    files: Mapping[str, Sequence[str]]
    read: Callable[[Path, str], ClientStream] | None = None
    excluded: str = ""
    downloads: Sequence[Download] = ()

    def find(self, folder: Path) -> dict[str, Path] | None:
        """Returns the file of each split, or None unless all are in ``folder``.

        Raises:
          FileNotFoundError: several files match a pattern.
        """
        found = {}
        for split, patterns in self.files.items():
            for pattern in patterns:
                paths = [p for p in sorted(folder.glob(pattern)) if p.is_dir() == pattern.endswith("/") and self._is_allowed(p)]
                if len(paths) > 1:
                    raise FileNotFoundError(
                        f"Expected exactly one file {pattern} in {folder}, found {len(paths)}: "
                        f"{', '.join(path.name for path in paths)}: remove all but one."
                    )
                if paths:
                    found[split] = paths[0]
                    break
        return found if len(found) == len(self.files) else None

    def _is_allowed(self, path: Path) -> bool:
        return not self.excluded or self.excluded not in path.name

    def __str__(self) -> str:
        return f"{self.form} ({', '.join(dict.fromkeys(patterns[0] for patterns in self.files.values()))})"


def read_fedjax(path: Path, features: Sequence[str]) -> ClientStream:
    """Reads FedJAX's SQLite, and removes the hash at the start of the client names in FedJAX's own files."""
    stream = read_fedjax_sqlite(path, features)

    def read() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for client in stream:
            yield re.sub("^[0-9a-f]{16}:", "", client.client_id), client.examples

    return ClientStream(read, stream.num_clients, path)


def load_converted(
    name: str,
    data: Path | None,
    cache: Path,
    sources: Sequence[Source],
    transform: Callable[[str, dict[str, Any]], Mapping[str, Any]],
    *,
    files: Sequence[Path] = (),
    version: int = 1,
    **options: Any,
) -> dict[str, FederatedData]:
    """Finds or downloads a dataset, converts it once with ``transform``, and opens the result memory-mapped.

    Args:
      name: name of the dataset.
      data: the user's folder, or None to use the cache and download missing files into it.
      cache: the dataset's folder in the cache.
      sources: the file formats of the dataset, the preferred one first.
      transform: ``(client id, features of the source) ->`` features of the dataset; see `ClientStream.map`.
      files: further files that the result depends on.
      version: see `converted`.
      **options: everything else that ``transform`` depends on.

    Raises:
      FileNotFoundError: ``data`` holds the dataset in none of its formats.
      DownloadError: the files could not be downloaded; the message, one line, says what to do instead.
      FormatError: a file is damaged, or does not have the expected content.
    """
    source, found = locate(name, data, cache, sources)

    assert source.read is not None
    read = source.read

    def stream(split: str) -> ClientStream:
        return read(found[split], split).map(transform)

    streams = {split: functools.partial(stream, split) for split in source.files}
    return converted(name, cache, streams, files=[*found.values(), *files], version=version, form=source.form, **options)


def locate(name: str, data: Path | None, cache: Path, sources: Sequence[Source]) -> tuple[Source, dict[str, Path]]:
    """Returns the first of ``sources`` that is in ``data``, or in the cache or can be downloaded, and each split's file."""
    folder = cache if data is None else data
    for source in sources:
        if found := source.find(folder):
            return source, found
    if data is not None:
        present = ", ".join(sorted(path.name for path in data.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(f"No {name!r} in {data}, which holds {present}: expected {_forms(sources)}.")
    source = _download(name, cache, sources)
    found = source.find(cache)
    assert found is not None
    return source, found


def _download(name: str, cache: Path, sources: Sequence[Source]) -> Source:
    """Downloads the first of ``sources`` that can be downloaded, and returns it."""
    downloadable = [source for source in sources if source.downloads]
    if not downloadable:
        raise FileNotFoundError(
            f"{name!r} cannot be downloaded: give a folder that holds {_forms(sources)} (--data DIR, or data=DIR in Python)."
        )
    # Archives that the user has put into the cache need no network.
    downloadable.sort(key=lambda source: not all(download.is_local(cache) for download in source.downloads))
    reasons = []
    for source in downloadable:
        try:
            for download in source.downloads:
                download.into(cache)
            return source
        except DownloadError as error:
            reasons.append(str(error))
            if isinstance(error, UnreachableError):
                break
    by_hand = " and ".join(download.url for download in downloadable[0].downloads)
    raise DownloadError(
        f"Could not download {name!r}: {' '.join(reasons)} Either give a folder that holds {_forms(sources)} (--data DIR, or "
        f"data=DIR in Python), or download {by_hand} by hand into {cache}."
    ) from None


def _forms(sources: Sequence[Source]) -> str:
    return ", or ".join(map(str, sources))
