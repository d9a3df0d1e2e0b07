"""What the datasets of words share: vocabularies, published or counted, and ids as text again."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FormatError
from fedsim.data._atomic_write import atomic_write
from fedsim.datasets._cache import fingerprint, only_one
from fedsim.datasets._download import Download, DownloadError
from fedsim.datasets._source import Source, locate

# Next-word prediction: what is loaded, and the loaders' options.
NEXT_WORD = {
    "x": "[20] int16 words: 0 pad, 1 bos, 2 eos, 3-10002 the most frequent words, 10003 any other",
    "y": "[20] int16 the same, one word on",
}
OPTIONS = {
    "vocabulary": "how many of the most frequent words",
    "length": "words in a sequence",
    "oov_buckets": "ids that other words share",
    "examples": "keep so many of each client, the first; 0: all",
}


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
    """A file of words and their counts: from the user's folder, or the published one, or else counted here, once.

    Args:
      name: the dataset's.
      data: the user's folder, or None.
      cache: the dataset's folder in the cache.
      sources: the forms of the dataset, of whose ``train`` split the texts ``feature`` are counted.
      feature: their feature.
      separator: what divides words. As in TensorFlow Federated's files, a word counts once for each client who has it.
      patterns: what the file may be called in the user's folder.
      download: where it is fetched from for those who have no folder; None: it is not.
    """
    if data is not None:
        for pattern in patterns:
            for found in sorted(data.glob(pattern)):
                return found
    source, files = locate(name, data, cache, sources)  # The data first: without them, counts are of no use.
    if data is None and download is not None:
        try:
            download.into(cache)
        except DownloadError as error:
            raise DownloadError(
                f"Could not fetch the counts for {name!r}: {error} Two ways out: give a folder with the data (--data DIR, or "
                f"data=DIR in Python), which are counted if it has no {patterns[0]}; or fetch {download.url} by hand and "
                f"put it into {cache}."
            ) from None
        return cache / download.files[0]
    assert source.read is not None
    key = json.dumps([fingerprint([files["train"]]), feature])
    path = cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}" / f"{feature}_count.json"
    with only_one(path.with_name(".lock")):
        if not path.is_file():
            counts: collections.Counter[str] = collections.Counter()
            for client in source.read(files["train"], "train"):
                try:
                    counts.update({word for text in client[feature] for word in text.decode().split(separator)})
                except UnicodeDecodeError as error:
                    raise FormatError(
                        f"{files['train']}: feature {feature!r} of client {client.client_id!r} is not UTF-8 ({error.reason}): "
                        "decode it from its own encoding first."
                    ) from None
            del counts[""]
            ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
            with atomic_write(path) as part:
                part.write_text(json.dumps(ordered), encoding="utf-8")
    return path


def words_again(vocabulary: Sequence[str]) -> Callable[[Any], str]:
    """What reads ids of `fedsim.text.WordTokenizer`: text up to the padding, unknown words as ``�``.

    >>> words_again(["to", "be"])(np.array([1, 3, 4, 5, 2, 0, 0]))
    '⊢ to be � ⊣'
    """
    shown = np.array(["", "⊢", "⊣", *vocabulary])

    def decode(ids: Any) -> str:
        ids = np.asarray(ids)
        return " ".join(shown[i] if i < len(shown) else "�" for i in ids[ids > 0])

    return decode
