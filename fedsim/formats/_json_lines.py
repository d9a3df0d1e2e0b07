"""JSON lines: one client a line, ``{"client_id": ..., "train": [{feature: value, ...}, ...], "test": [...]}``.

The shape in which smaller Stack Exchange sites are kept like TFF's Stack Overflow: texts ``tokens``, ``creation_date``,
``tags``, ``title``, ``type`` and the integer ``score``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fedsim.data import ClientStream, FormatError
from fedsim.formats._source import (
    DAMAGE,
    MAX_CLIENT_BYTES,
    Columns,
    Features,
    StrPath,
    column,
    existing,
    located,
    only_split,
    opened,
    selected,
    stream,
)


def read_json_lines(
    path: StrPath, split: str | None = None, features: Features = None, *, client: str = "client_id"
) -> ClientStream:
    """Reads one split of a file of JSON lines, also ``.gz``; memory is that of one line, which may have 256 MiB.

    Strings become text, numbers int64 or float32.

    Args:
      path: the file.
      split: the key of the list of examples; by default the only list of the first line.
      features: names of those to keep, or name to ``(shape, dtype)``; by default all of a client's first example.
      client: the key of the client's name.

    Raises:
      FileNotFoundError: no such file.
      FormatError: no such split, or several and none chosen; when opened or read, a line that is no such object, examples
        whose features differ.

    >>> import json, pathlib, tempfile
    >>> line = json.dumps({"client_id": "beer:10", "train": [{"tokens": "to be", "score": 3}], "test": []})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.jsonl").write_text(line)
    ...     [(c.client_id, c["tokens"].tolist(), c["score"].tolist()) for c in read_json_lines(f"{folder}/a.jsonl", "train")]
    [('beer:10', [b'to be'], [3])]
    """
    source = existing(path)
    with located(str(source)):
        first = next(_lines(source), None)
        if first is None:
            raise FormatError("no lines, hence no clients.")
    chosen = only_split(path, [key for key, value in first.items() if isinstance(value, list)], split)

    def read() -> Iterator[tuple[str, Columns | None]]:
        for number, line in enumerate(_lines(source), 1):
            client_id = line.get(client)
            if not isinstance(client_id, str):
                raise FormatError(f"Line {number} has no text {client!r}; it has {sorted(line)}: name the key by client=.")
            with located(f"client {client_id!r}", RecursionError):
                yield client_id, _columns(line.get(chosen), features)

    return stream(path, read)


def _lines(path: Any) -> Iterator[dict[str, Any]]:
    """Each line's object; blank lines are skipped."""
    number = 0
    with opened(path) as file:
        while True:
            number += 1
            with located(f"line {number}", ValueError, RecursionError, *DAMAGE):
                line = file.readline(MAX_CLIENT_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_CLIENT_BYTES:
                    raise FormatError("longer than 256 MiB, the most that is read")
                if not line.strip():
                    continue
                found = json.loads(line.decode("utf-8-sig", "surrogateescape"))
                if not isinstance(found, dict):
                    raise FormatError(f"expected a JSON object, found a {type(found).__name__}")
            yield found


def _columns(examples: Any, features: Features) -> Columns | None:
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise FormatError("its examples are not a list of objects.")
    if not examples:
        return None
    names = list(examples[0] if features is None else features)
    for number, example in enumerate(examples):
        absent = [name for name in names if name not in example]
        if absent:
            raise FormatError(f"Feature {absent[0]!r} is missing in example {number}, which has {sorted(example)}.")
    return selected({name: column(name, [example[name] for example in examples]) for name in names}, features)
