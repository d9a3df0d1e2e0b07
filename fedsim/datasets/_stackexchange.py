"""Posts on smaller Stack Exchange sites in the format of the Stack Overflow data, for next-word prediction; users are clients.

The dataset is not downloaded; you provide a file of JSON lines. Each line is a user with ``client_id``, ``train`` and ``test``,
the latter two lists of ``{tokens, creation_date, tags, title, type, score}``. The same folder may hold a file ``*.word_count``
with lines ``word count``, most frequent word first. Without it, a word's count is the number of users that have it in
``train``.

Source:
  tokens: [] text, one paragraph, lower case, words separated by spaces.

Loaded, with ``vocabulary=10000``, ``length=20``:
  x: [20] int16 words: 0 pad, 1 bos, 2 eos, 3-10002 the most frequent words, 10003 any other.
  y: [20] int16 the next words: x shifted by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim import checks
from fedsim.datasets import _chosen_clients
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted
from fedsim.datasets._stackoverflow import limit_examples
from fedsim.datasets._words import NEXT_WORD, NEXT_WORD_MODEL, OPTIONS, counts_file, num_word_ids, word_decoder
from fedsim.formats import read_json_lines
from fedsim.text import WordTokenizer, vocabulary_from_counts

_SOURCES = [
    Source(
        "JSON lines",
        dict.fromkeys(("train", "test"), ("*.jsonl.gz", "*.jsonl")),
        lambda path, split: read_json_lines(path, split, ["tokens"]),
    )
]


@register(
    "stackexchange",
    task="next-word prediction, sequences of {length} words; each user of Stack Exchange is a client; you provide the file",
    features=NEXT_WORD,
    source_features={"tokens": "[] text, a paragraph, words separated by spaces"},
    num_classes=num_word_ids,
    default_model=NEXT_WORD_MODEL,
    options=OPTIONS | _chosen_clients.OPTIONS,
    source="data=DIR with one file *.jsonl.gz, one JSON line per user, made from https://archive.org/details/stackexchange",
    needs_data=True,
    licence="CC BY-SA 4.0 (Stack Exchange's users)",
    citation="Stack Exchange, Inc. Stack Exchange data dump. https://archive.org/details/stackexchange",
)
def load_stackexchange(
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
    """Loads train and test from the file in ``data``, which is converted into the cache once.

    Raises:
      FileNotFoundError: ``data`` is not given, or holds no such file.
      FormatError: a file is damaged, or does not hold text.
      ValueError: there are fewer words than ``vocabulary``, or fewer clients than ``clients``.
    """
    checks.whole(1, or_none=True, clients=clients)
    counts = counts_file("stackexchange", data, cache, _SOURCES, feature="tokens", separator=" ", patterns=("*.word_count",))
    words = vocabulary_from_counts(counts, vocabulary)
    options = {"vocabulary": vocabulary, "length": length, "oov_buckets": oov_buckets, "examples": examples}
    transform = limit_examples(examples, WordTokenizer(words, length, oov_buckets).client)
    splits = load_converted("stackexchange", data, cache, _SOURCES, transform, files=[counts], **options)
    splits = _chosen_clients.choose_clients("stackexchange", splits, clients, seed, cache)
    return {**splits, "decode": word_decoder(words)}
