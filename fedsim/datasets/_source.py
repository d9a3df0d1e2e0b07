"""The forms in which a dataset is found: recognized in a folder, fetched if there is none, converted once."""

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
    """One form of a dataset.

    Attributes:
      form: what people call it, e.g. ``"TFF's HDF5"``.
      files: split to what its file may be called, the first that is there being taken; ``*`` stands for anything. Splits may
        share a file, and a name that ends with ``/`` is a folder's.
      read: ``(file, split) ->`` its clients, with the features that all forms of the dataset share; None: not for
        `load_converted`.
      without: what no name may have in it.
      downloads: where it is fetched from; empty: it is not.
    """

    form: str
    files: Mapping[str, Sequence[str]]
    read: Callable[[Path, str], ClientStream] | None = None
    without: str = ""
    downloads: Sequence[Download] = ()

    def find(self, folder: Path) -> dict[str, Path] | None:
        """Split to file, if all are in ``folder``.

        Raises:
          FileNotFoundError: several files could be one.
        """
        found = {}
        for split, patterns in self.files.items():
            for pattern in patterns:
                paths = [p for p in sorted(folder.glob(pattern)) if p.is_dir() == pattern.endswith("/") and self._may_be(p)]
                if len(paths) > 1:
                    raise FileNotFoundError(
                        f"Expected exactly one file {pattern} in {folder}, found {len(paths)}: "
                        f"{', '.join(path.name for path in paths)}. Leave one there."
                    )
                if paths:
                    found[split] = paths[0]
                    break
        return found if len(found) == len(self.files) else None

    def _may_be(self, path: Path) -> bool:
        return not self.without or self.without not in path.name

    def __str__(self) -> str:
        return f"{self.form} ({', '.join(dict.fromkeys(patterns[0] for patterns in self.files.values()))})"


def read_fedjax(path: Path, features: Sequence[str]) -> ClientStream:
    """`fedsim.formats.read_fedjax_sqlite`, without the hash that FedJAX's own files have before clients' names."""
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
    """Finds or fetches a dataset, and opens it, converted once by ``transform``.

    Args:
      name: the dataset's.
      data: the user's folder, or None: the cache, and what has to be fetched into it.
      cache: the dataset's folder in the cache.
      sources: the forms it comes in, the best first.
      transform: ``(client id, features of the source) ->`` features of the dataset; see `ClientStream.map`.
      files: further files that the result depends on.
      version: see `converted`.
      **options: what else ``transform`` depends on.

    Raises:
      FileNotFoundError: ``data`` holds none of the forms.
      DownloadError: nothing could be fetched; one line with the ways out.
      FormatError: a file is not what it should be.
    """
    source, found = locate(name, data, cache, sources)

    assert source.read is not None
    read = source.read

    def stream(split: str) -> ClientStream:
        return read(found[split], split).map(transform)

    streams = {split: functools.partial(stream, split) for split in source.files}
    return converted(name, cache, streams, files=[*found.values(), *files], version=version, form=source.form, **options)


def locate(name: str, data: Path | None, cache: Path, sources: Sequence[Source]) -> tuple[Source, dict[str, Path]]:
    """The first of ``sources`` that is in ``data``, or in the cache, or can be fetched into it; and split to file."""
    folder = cache if data is None else data
    for source in sources:
        if found := source.find(folder):
            return source, found
    if data is not None:
        present = ", ".join(sorted(path.name for path in data.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(f"No {name!r} in {data}, which holds {present}: expected {_forms(sources)}.")
    source = _fetched(name, cache, sources)
    found = source.find(cache)
    assert found is not None
    return source, found


def _fetched(name: str, cache: Path, sources: Sequence[Source]) -> Source:
    """Fetches the best of ``sources`` that can be had."""
    able = [source for source in sources if source.downloads]
    if not able:
        raise FileNotFoundError(
            f"{name!r} is not for download: give a folder that holds {_forms(sources)} (--data DIR, or data=DIR in Python)."
        )
    # What somebody put there by hand needs no network.
    able.sort(key=lambda source: not all(download.at_hand(cache) for download in source.downloads))
    reasons = []
    for source in able:
        try:
            for download in source.downloads:
                download.into(cache)
            return source
        except DownloadError as error:
            reasons.append(str(error))
            if isinstance(error, UnreachableError):
                break
    by_hand = " and ".join(download.url for download in able[0].downloads)
    raise DownloadError(
        f"Could not fetch {name!r}: {' '.join(reasons)} Two ways out: give a folder that holds {_forms(sources)} (--data DIR, "
        f"or data=DIR in Python); or fetch {by_hand} by hand into {cache}."
    ) from None


def _forms(sources: Sequence[Source]) -> str:
    return ", or ".join(map(str, sources))
