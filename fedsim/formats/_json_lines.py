"""A reader for JSON lines, one client per line: ``{"client_id": ..., "train": [{feature: value, ...}, ...], "test": [...]}``.

Smaller Stack Exchange sites are stored in this format, with the features of TFF's Stack Overflow: the texts ``tokens``,
``creation_date``, ``tags``, ``title`` and ``type``, and the integer ``score``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import ClientStream, FormatError
from fedsim.formats._source import (
    DAMAGE_ERRORS,
    MAX_CLIENT_BYTES,
    Columns,
    Features,
    StrPath,
    check_exists,
    choose_split,
    column,
    locating_errors,
    open_decompressed,
    selected,
    stream,
)
from fedsim.text_files import with_different_keys


def read_json_lines(
    path: StrPath,
    split: str | None = None,
    features: Features = None,
    *,
    client: str = "client_id",
    floats: Any = np.float32,
) -> ClientStream:
    """Reads one split of a file of JSON lines, also ``.gz``, with one line in memory, which may have up to 256 MiB.

    Strings become text; numbers become int64 or ``floats``.

    Args:
      path: the file.
      split: the key of the list of examples; None: the only list in the first line.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``; None: all features of a
        client's first example.
      client: the key of the client's id.
      floats: the dtype of numbers with fractions, ``np.float32``, which rounds to 7 digits, or ``np.float64``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: ``floats`` is neither of the two.
      FormatError: there is no such split, or there are several and ``split`` is None; or, when the file is opened or read, a
        line is not such an object, or the features of examples differ.

    >>> import json, pathlib, tempfile
    >>> line = json.dumps({"client_id": "beer:10", "train": [{"tokens": "to be", "score": 3}], "test": []})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.jsonl").write_text(line)
    ...     [(c.client_id, c["tokens"].tolist(), c["score"].tolist()) for c in read_json_lines(f"{folder}/a.jsonl", "train")]
    [('beer:10', [b'to be'], [3])]
    """
    checks.one_of(np.float32, np.float64, floats=floats)
    source = check_exists(path)
    with locating_errors(str(source)):
        first = next(_lines(source), None)
        if first is None:
            raise FormatError("the file has no lines, so it has no clients.")
    chosen = choose_split(path, [key for key, value in first.items() if isinstance(value, list)], split)

    def read() -> Iterator[tuple[str, Columns | None]]:
        for number, line in enumerate(_lines(source), 1):
            client_id = line.get(client)
            if not isinstance(client_id, str):
                raise FormatError(f"Line {number} has no text {client!r}; it has {sorted(line)}: name the key by client=.")
            with locating_errors(f"client {client_id!r}", RecursionError):
                yield client_id, _columns(line.get(chosen), features, floats)

    return stream(path, read)


def _lines(path: Any) -> Iterator[dict[str, Any]]:
    """Yields the object of each line; blank lines are skipped."""
    number = 0
    with open_decompressed(path) as file:
        while True:
            number += 1
            with locating_errors(f"line {number}", ValueError, RecursionError, *DAMAGE_ERRORS):
                line = file.readline(MAX_CLIENT_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_CLIENT_BYTES:
                    raise FormatError("the line is longer than the limit of 256 MiB")
                if not line.strip():
                    continue
                parsed = json.loads(line.decode("utf-8-sig", "surrogateescape"), object_pairs_hook=with_different_keys)
                if not isinstance(parsed, dict):
                    raise FormatError(f"expected a JSON object, found a {type(parsed).__name__}")
            yield parsed


def _columns(examples: Any, features: Features, floats: Any) -> Columns | None:
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise FormatError("its examples are not a list of objects.")
    if not examples:
        return None
    names = list(examples[0] if features is None else features)
    for number, example in enumerate(examples):
        absent = [name for name in names if name not in example]
        if absent:
            raise FormatError(f"Feature {absent[0]!r} is missing in example {number}, which has {sorted(example)}.")
    return selected({name: column(name, [example[name] for example in examples], floats) for name in names}, features)
