"""Shared by the word datasets: vocabularies, published or counted from the data, and decoding of ids to text."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FormatError
from fedsim.datasets._cache import exclusive, fingerprint
from fedsim.datasets._download import Download, DownloadError
from fedsim.datasets._source import Source, locate
from fedsim.durable_files import atomic_write

# Features, default model and options of the datasets for next-word prediction.
NEXT_WORD = {
    "x": "[{length}] int16 words: 0 pad, 1 bos, 2 eos, from 3 on the {vocabulary} most frequent words, then any other",
    "y": "[{length}] int16 the next words: x shifted by one",
}
NEXT_WORD_MODEL = (
    "stackoverflow_lstm(vocabulary={vocabulary}, length={length}, oov_buckets={oov_buckets}, expected_length=13.3)"
)
OPTIONS = {
    "vocabulary": "number of most frequent words that have their own id",
    "length": "words in a sequence",
    "oov_buckets": "number of ids for all other words",
    "examples": "keep only this many examples of each client, the first ones; 0 keeps all",
}


def num_word_ids(*, vocabulary: int, oov_buckets: int, **_: Any) -> int:
    """Returns the number of ids of a dataset for next-word prediction with these options: pad, bos, eos, words, any other.

    >>> num_word_ids(vocabulary=10_000, oov_buckets=1)
    10004
    """
    return 3 + vocabulary + oov_buckets


def counts_file(
    name: str,
    data: Path | None,
    cache: Path,
    sources: Sequence[Source],
    *,
    feature: str,
    separator: str,
    patterns: Sequence[str],
    download: Download | None = None,
) -> Path:
    """Finds a file of word counts in the user's folder, or downloads the published one, or counts the words once.

    Args:
      name: name of the dataset.
      data: the user's folder, or None.
      cache: the dataset's folder in the cache.
      sources: the file formats of the dataset; words are counted in its ``train`` split.
      feature: the feature that holds the text.
      separator: separates the words. As in TensorFlow Federated's files, a word is counted once per client that has it.
      patterns: possible file names in the user's folder.
      download: where the file is downloaded from if there is no user's folder; None if it cannot be downloaded.
    """
    if data is not None:
        for pattern in patterns:
            for found in sorted(data.glob(pattern)):
                return found
    source, files = locate(name, data, cache, sources)  # First, because counts without data are useless.
    if data is None and download is not None:
        try:
            download.into(cache)
        except DownloadError as error:
            raise DownloadError(
                f"Could not download the counts for {name!r}: {error} Either give a folder with the data (--data DIR, or "
                f"data=DIR in Python), whose words are counted if it has no {patterns[0]}; or download {download.url} by hand "
                f"into {cache}."
            ) from None
        return cache / download.files[0]
    assert source.read is not None
    key = json.dumps([fingerprint([files["train"]]), feature])
    path = cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}" / f"{feature}_count.json"
    with exclusive(path.with_name(".lock")):
        if not path.is_file():
            counts: collections.Counter[str] = collections.Counter()
            for client in source.read(files["train"], "train"):
                try:
                    counts.update({word for text in client[feature] for word in text.decode().split(separator)})
                except UnicodeDecodeError as error:
                    raise FormatError(
                        f"{files['train']}: feature {feature!r} of client {client.client_id!r} is not UTF-8 ({error.reason}): "
                        "convert the text to UTF-8 first."
                    ) from None
            del counts[""]
            ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
            with atomic_write(path) as part:
                part.write_text(json.dumps(ordered), encoding="utf-8")
    return path


def word_decoder(vocabulary: Sequence[str]) -> Callable[[Any], str]:
    """Returns a function that decodes ids of `fedsim.text.WordTokenizer` to text without padding; unknown words are ``�``.

    >>> word_decoder(["to", "be"])(np.array([1, 3, 4, 5, 2, 0, 0]))
    '⊢ to be � ⊣'
    """
    shown = np.array(["", "⊢", "⊣", *vocabulary])

    def decode(ids: Any) -> str:
        ids = np.asarray(ids)
        return " ".join(shown[i] if i < len(shown) else "�" for i in ids[ids > 0])

    return decode
