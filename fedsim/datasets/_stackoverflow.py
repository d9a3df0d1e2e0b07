"""Stack Overflow: posts of 342,477 users, for next-word prediction or tag prediction; each user is a client.

The TensorFlow Federated Authors, "TensorFlow Federated Stack Overflow dataset", 2019; from Stack Overflow's data on Kaggle.
The tasks are those of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295.
There are three splits. ``train`` has posts from before 2018 and ``test`` later posts of the same users, of whom 60 % have any.
``held_out`` has all posts of other users, those whose number is divisible by 10.

The hashes of the HDF5 archive and of the counts are TensorFlow Federated's own (simulation/datasets/stackoverflow.py); none is
published for the SQLite files.

Source:
  tokens: [] text, one sentence, lower case, words separated by spaces.
  title: [] text, the title of the question.
  tags: [] text, the tags of the question, separated by "|".

Loaded as ``stackoverflow_word``, with ``vocabulary=10000``, ``length=20``:
  x: [20] int16 words: 0 pad, 1 bos, 2 eos, 3-10002 the most frequent words, 10003 any other.
  y: [20] int16 the next words: x shifted by one.

Loaded as ``stackoverflow_tag``, with ``vocabulary=10000``, ``tags=500``, ``length=64``:
  x: [64] int16 words of sentence and title: 0 pad, 1-10000 the most frequent words, 10001 any other.
  y: [500] uint8 1 for each of the most frequent tags that the question has.

The vocabularies are the most frequent words and tags in TensorFlow Federated's archives, which count the clients that use a
word or a tag. If the user's folder has no ``stackoverflow.word_count`` (or ``.tag_count``), the counts are made from ``train``.

``examples=1000`` keeps the first thousand sentences of a client, as Reddi et al. do; 0 keeps all.

``clients=1000`` keeps a thousand users of ``train``, the posts of the same users in ``test``, and the same proportion of the
other users in ``held_out``. All data is downloaded and converted before, client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.datasets import _chosen_clients
from fedsim.datasets._download import Download
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted, read_fedjax
from fedsim.datasets._words import NEXT_WORD, NEXT_WORD_MODEL, OPTIONS, counts_file, num_word_ids, word_decoder
from fedsim.formats import read_tff_hdf5, read_tff_sqlite
from fedsim.text import TagTokenizer, WordTokenizer, vocabulary_from_counts

_FEDJAX = "https://storage.googleapis.com/gresearch/fedjax/stackoverflow"
_TFF = "https://storage.googleapis.com/tff-datasets-public"
_SPLITS = {"train": "train", "test": "test", "held_out": "heldout"}  # split to its name in TFF's SQLite
_FEDJAX_FILES = {split: f"stackoverflow_{split}.sqlite" for split in _SPLITS}
_HDF5_FILES = {split: f"stackoverflow_{split}.h5" for split in _SPLITS}


def _sources(features: list[str]) -> list[Source]:
    return [
        Source(
            "FedJAX's SQLite",
            {split: (f"*_{split}.sqlite",) for split in _SPLITS},
            lambda path, split: read_fedjax(path, features),
            downloads=[Download(f"{_FEDJAX}/{file}", (file,)) for file in _FEDJAX_FILES.values()],
        ),
        Source(
            "TFF's SQLite",
            dict.fromkeys(_SPLITS, ("stackoverflow.sqlite", "stackoverflow.sqlite.lzma")),
            lambda path, split: read_tff_sqlite(path, _SPLITS[split], dict.fromkeys(features, ((), object))),
            downloads=[Download(f"{_TFF}/stackoverflow.sqlite.lzma", ("stackoverflow.sqlite",))],
        ),
        Source(
            "TFF's HDF5",
            {split: (f"*_{split}.h5",) for split in _SPLITS},
            lambda path, split: read_tff_hdf5(path, features),
            downloads=[
                Download(
                    f"{_TFF}/stackoverflow.tar.bz2",
                    tuple(_HDF5_FILES.values()),
                    "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
                )
            ],
        ),
    ]


def _vocabulary(name: str, size: int, data: Path | None, cache: Path, feature: str) -> tuple[list[str], Path]:
    """Returns the most frequent words or tags, and the file of their counts."""
    kind, separator, sha256 = {
        "tokens": ("word_count", " ", "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c"),
        "tags": ("tag_count", "|", "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d"),
    }[feature]
    path = counts_file(
        name,
        data,
        cache,
        _sources([feature]),
        feature=feature,
        separator=separator,
        patterns=(f"*.{kind}", f"*.{kind}.tar.bz2"),
        download=Download(f"{_TFF}/stackoverflow.{kind}.tar.bz2", (f"stackoverflow.{kind}",), sha256),
    )
    return vocabulary_from_counts(path, size), path


def limit_examples(
    examples: int, tokenize: Callable[..., Mapping[str, Any]]
) -> Callable[[str, dict[str, Any]], Mapping[str, Any]]:
    """Returns ``tokenize`` applied to the first ``examples`` examples of a client; 0 means all."""
    if examples < 0:
        raise ValueError(f"Expected examples >= 0, got examples={examples}: 0 keeps all examples of a client.")
    return lambda client_id, features: tokenize(client_id, {name: rows[: examples or None] for name, rows in features.items()})


_CLIENTS = _chosen_clients.OPTIONS | {
    "clients": "number of clients of train to keep, drawn at random, with their test examples; held_out keeps the same "
    "proportion of its own clients; None keeps all"
}
_ABOUT: dict[str, Any] = {
    "splits": {"train": (342_477, 135_818_730), "test": (204_088, 16_586_035), "held_out": (38_758, 16_491_230)},
    "source": f"{_FEDJAX}/stackoverflow_train.sqlite, _test.sqlite and _held_out.sqlite, several GB (no hash or "
    "size is published); "
    f"or TFF's SQLite or HDF5; counts: {_TFF}/stackoverflow.word_count.tar.bz2, or .tag_count.tar.bz2",
    "licence": "CC BY-SA 3.0 (Stack Overflow's users)",
    "citation": "The TensorFlow Federated Authors. TensorFlow Federated Stack Overflow dataset. 2019; S. Reddi et al. Adaptive "
    "federated optimization. ICLR, 2021. https://arxiv.org/abs/2003.00295 (the tasks)",
}


@register(
    "stackoverflow_word",
    task="next-word prediction, sequences of {length} words; each of 342,477 users of Stack Overflow is a client",
    features=NEXT_WORD,
    source_features={"tokens": "[] text, a sentence, words separated by spaces"},
    num_classes=num_word_ids,
    default_model=NEXT_WORD_MODEL,
    options=OPTIONS | _CLIENTS,
    **_ABOUT,
)
def load_stackoverflow_word(
    data: Path | None,
    cache: Path,
    *,
    vocabulary: int = 10_000,
    length: int = 20,
    oov_buckets: int = 1,
    examples: int = 0,
    clients: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Loads the three splits from ``data``, or from the cache, into which they are downloaded and converted once.

    Raises:
      FileNotFoundError: ``data`` holds the dataset in none of its formats.
      FormatError: a file is damaged, or does not hold text.
      ValueError: there are fewer words than ``vocabulary``, or fewer clients than ``clients``.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    checks.whole(1, or_none=True, clients=clients)
    words, counts = _vocabulary("stackoverflow_word", vocabulary, data, cache, "tokens")
    tokenizer = WordTokenizer(words, length, oov_buckets)
    options = {"vocabulary": vocabulary, "length": length, "oov_buckets": oov_buckets, "examples": examples}
    transform = limit_examples(examples, tokenizer.client)
    splits = load_converted("stackoverflow_word", data, cache, _sources(["tokens"]), transform, files=[counts], **options)
    splits = _chosen_clients.choose_clients("stackoverflow_word", splits, clients, seed, cache)
    return {**splits, "decode": word_decoder(words)}


@register(
    "stackoverflow_tag",
    task="tag prediction from the words of a post, {tags} tags; each of 342,477 users of Stack Overflow is a client",
    features={
        "x": "[{length}] int16 words of sentence and title: 0 pad, from 1 on the {vocabulary} most frequent, then any other",
        "y": "[{tags}] uint8 1 for each of the most frequent tags that the question has",
    },
    source_features={
        "tokens": "[] text, a sentence, words separated by spaces",
        "title": "[] text, the title of the question",
        "tags": '[] text, the tags of the question, separated by "|"',
    },
    default_model="stackoverflow_logistic(vocabulary={vocabulary}, tags={tags}, length={length}, divisor=5)",
    options={
        "vocabulary": OPTIONS["vocabulary"],
        "tags": "number of most frequent tags",
        "length": "words of a post that are kept",
        "examples": OPTIONS["examples"],
        **_CLIENTS,
    },
    **_ABOUT,
)
def load_stackoverflow_tag(
    data: Path | None,
    cache: Path,
    *,
    vocabulary: int = 10_000,
    tags: int = 500,
    length: int = 64,
    examples: int = 1000,
    clients: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Loads the three splits; see `load_stackoverflow_word`."""
    checks.whole(1, or_none=True, clients=clients)
    words, word_counts = _vocabulary("stackoverflow_tag", vocabulary, data, cache, "tokens")
    tag_names, tag_counts = _vocabulary("stackoverflow_tag", tags, data, cache, "tags")
    tokenizer = TagTokenizer(words, tag_names, length)
    options = {"vocabulary": vocabulary, "tags": tags, "length": length, "examples": examples}
    sources, transform = _sources(["tokens", "title", "tags"]), limit_examples(examples, tokenizer.client)
    splits = load_converted("stackoverflow_tag", data, cache, sources, transform, files=[word_counts, tag_counts], **options)
    splits = _chosen_clients.choose_clients("stackoverflow_tag", splits, clients, seed, cache)
    shown = np.array(["", *words, "�"])
    return {**splits, "decode": lambda ids: " ".join(shown[ids][np.asarray(ids) > 0])}
