"""Reads text, JSON and CSV files. Errors name the file, the line and a remedy."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedsim.data import FormatError

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:]', re.DOTALL)


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file, which may be gzipped, without its byte order mark if it has one.

    Raises:
      OSError: the file is missing or cannot be read.
      FormatError: the file is not UTF-8, or its compressed content is damaged.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> _ = path.write_bytes(b"one\\n\\xff")
    >>> read_text(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedsim.data._errors.FormatError: .../a.txt, line 2 is not UTF-8 text: restore the file, or save it as UTF-8.
    """
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise FormatError(f"{os.fspath(path)} is truncated or damaged ({error}): restore it, or write it again.") from None
    return decoded(content, path)


def decoded(content: bytes, path: str | os.PathLike[str]) -> str:
    """Returns the text of the content of a UTF-8 file; see `read_text`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise FormatError(
            f"{os.fspath(path)}, line {number} is not UTF-8 text: restore the file, or save it as UTF-8."
        ) from None


def read_json(path: str | os.PathLike[str], example: str = "") -> Any:
    """Returns the value in a JSON file. If there is an ``example``, which begins with "{", the value must be an object.

    Raises:
      OSError: the file is missing or cannot be read.
      FormatError: the file is not UTF-8 or not JSON, an object has a key twice, or the value is not an object.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.json"
    >>> _ = path.write_text('{"x": 1,\\n "x": 2}')
    >>> read_json(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedsim.data._errors.FormatError: .../a.json, line 2 has the key 'x' a second time in an object: leave one of them out.
    """
    value = parse_json(read_text(path), path, example)
    if example and not isinstance(value, dict):
        raise FormatError(f"{os.fspath(path)} is not a JSON object: expected {example}.")
    return value


def parse_json(text: str, path: str | os.PathLike[str], example: str = "", first_line: int = 1) -> Any:
    """Returns the value in a JSON text, which begins at a line of a file; see `read_json`.

    Raises:
      FormatError: the text is not JSON, or an object has a key twice.
    """

    def place(offset: int) -> str:
        return f"{os.fspath(path)}, line {first_line + text.count(chr(10), 0, offset)}"

    try:
        return json.loads(text, object_pairs_hook=with_different_keys)
    except RepeatedKeyError:
        offset, key = _repeated_key(text)
        raise FormatError(f"{place(offset)} has the key {key!r} a second time in an object: leave one of them out.") from None
    except (ValueError, RecursionError) as error:
        offset, reason = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (0, str(error))
        remedy = f"expected {example}" if example else "restore the file, or write it again"
        raise FormatError(f"{place(offset)} is not JSON ({type(error).__name__}: {reason}): {remedy}.") from None


def parse_json_lines(text: str, path: str | os.PathLike[str], example: str) -> Iterator[tuple[str, Any]]:
    """Yields the place, as text for error messages, and the value of each line that is not blank; see `parse_json`."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield f"{os.fspath(path)}, line {number}", parse_json(line, path, example, number) if line.strip() else None


def read_csv(text: str, path: str | os.PathLike[str], delimiter: str = ",") -> Iterator[tuple[str, list[str]]]:
    """Yields the place, as text for error messages, and the fields of each row, without the spaces around them.

    Raises:
      FormatError: the text is not CSV.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True, delimiter=delimiter)
    try:
        for row in reader:
            yield f"{os.fspath(path)}, line {reader.line_num}", [field.strip() for field in row]
    except csv.Error as error:
        raise FormatError(
            f"{os.fspath(path)}, line {reader.line_num} is not CSV ({error}): separate fields by commas, and end quotes."
        ) from None


def read_table(text: str, path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the names in the first line of a CSV text, and the place and the fields of each other row that is not empty.

    Raises:
      FormatError: the text is not CSV or has no row; a name occurs twice; or a row has more or fewer fields than names.
    """
    (_, names), *rows = [(place, row) for place, row in read_csv(text, path) if any(row[:1]) or len(row) > 1] or [("", [])]
    expected = f"Expected {os.path.basename(path)} to have a line of names and rows with as many values"
    if not rows:
        raise FormatError(f"{os.fspath(path)}: {expected}, got no row: add one.")
    if twice := first_repeated(names):
        raise FormatError(
            f"{os.fspath(path)}: Expected columns of {os.path.basename(path)} to have different names, got {twice!r} "
            f"{names.count(twice)} times: rename or leave out all but one."
        )
    for place, row in rows:
        if len(row) != len(names):
            raise FormatError(
                f"{place}: {expected}, got {len(row)} for {len(names)} names: separate values by commas, and leave a missing "
                f"one empty{separator_hint(names)}."
            )
    return names, rows


def is_number(text: str) -> bool:
    """Returns whether a text is a finite or infinite number.

    >>> is_number("1e3"), is_number("?")
    (True, False)
    """
    try:
        float(text)
    except ValueError:
        return False
    return True


def separator_hint(names: Iterable[str]) -> str:
    """Returns what to do if names seem to be separated otherwise than by commas; empty if they do not.

    >>> separator_hint(["id;age;income"])
    " (it seems to be separated by ';': convert it to commas)"
    """
    names = list(names)
    found = next((separator for separator in (";", "\t", "|") if len(names) == 1 and separator in names[0]), None)
    return f" (it seems to be separated by {found!r}: convert it to commas)" if found else ""


def first_repeated(names: Iterable[str]) -> str | None:
    """Returns the first of some names that occurs a second time; None if all differ.

    >>> first_repeated(["a", "b", "a"])
    'a'
    """
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


class RepeatedKeyError(FormatError):
    """A JSON object has a key twice."""


def with_different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The ``object_pairs_hook`` of ``json.loads`` that raises `RepeatedKeyError` instead of leaving all but the last out."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = first_repeated(key for key, _ in pairs)
        raise RepeatedKeyError(f"An object has the key {key!r} twice: leave one of them out.")
    return found


def _repeated_key(text: str) -> tuple[int, str]:
    """Returns the offset and the name of the first key of a JSON text that its object has already."""
    open_objects: list[set[str]] = []
    last = ""
    offset = 0
    for token in _TOKEN.finditer(text):
        match token.group():
            case "{" | "[":
                open_objects.append(set())
            case "}" | "]":
                open_objects.pop()
            case ":":
                if last in open_objects[-1]:
                    return offset, last
                open_objects[-1].add(last)
            case string:
                offset, last = token.start(), json.loads(string)
    return 0, last
