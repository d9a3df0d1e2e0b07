"""Smaller Stack Exchange sites by user, shaped like Stack Overflow's file: the next word is to be told.

For who has such a file: one JSON line a user, ``client_id``, and ``train`` and ``test``, lists of ``{tokens, creation_date,
tags, title, type, score}``; beside it, if there is one, a file ``*.word_count`` of lines ``word count``, most frequent
first. Without it, words are counted over ``train``: how many users have each.

Source:
  tokens: [] text, one paragraph, lower case, words divided by spaces.

Loaded, with ``vocabulary=10000``, ``length=20``:
  x: [20] int16 words: 0 pad, 1 bos, 2 eos, 3-10002 the most frequent words, 10003 any other.
  y: [20] int16 the same, one word on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted
from fedsim.datasets._stackoverflow import first
from fedsim.datasets._words import NEXT_WORD, OPTIONS, counts_file, words_again
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
    task="tell the next word of 20 in a row; what people wrote on Stack Exchange sites, a client each; for who has the file",
    features=NEXT_WORD,
    source_features={"tokens": "[] text, a paragraph, words divided by spaces"},
    num_classes=10_004,
    default_model="stackoverflow_lstm(expected_length=13.3)",
    options=OPTIONS,
    source="data=DIR with one file *.jsonl.gz, a JSON line a user; https://archive.org/details/stackexchange is what "
    "it is made of",
    needs_data=True,
    licence="CC BY-SA 4.0 (Stack Exchange's users)",
    citation="Stack Exchange, Inc. Stack Exchange data dump. https://archive.org/details/stackexchange",
)
def load_stackexchange(
    data: Path | None, cache: Path, *, vocabulary: int = 10_000, length: int = 20, oov_buckets: int = 1, examples: int = 0
) -> dict[str, Any]:
    """The two splits of the file in ``data``, converted into the cache once.

    Raises:
      FileNotFoundError: no ``data``, or it has no such file.
      FormatError: a file that is damaged, or holds something else than text; a vocabulary with fewer words.
    """
    counts = counts_file("stackexchange", data, cache, _SOURCES, feature="tokens", separator=" ", patterns=("*.word_count",))
    words = vocabulary_from_counts(counts, vocabulary)
    options = {"vocabulary": vocabulary, "length": length, "oov_buckets": oov_buckets, "examples": examples}
    transform = first(examples, WordTokenizer(words, length, oov_buckets).client)
    splits = load_converted("stackexchange", data, cache, _SOURCES, transform, files=[counts], **options)
    return {**splits, "decode": words_again(words)}
