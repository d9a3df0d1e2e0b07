"""An incremental JSON reader, which parses the members of the outer objects one by one."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from fedsim.data import FormatError
from fedsim.formats._source import MAX_CLIENT_BYTES
from fedsim.text_files import with_different_keys

_PIECE = 1 << 20
# The tokens that determine the end of a value: complete strings, brackets, and the quote of an incomplete string.
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,\]}\s]*")


class JsonReader:
    """A cursor in UTF-8 JSON; only the value that is being parsed is in memory, at most 256 Mi characters."""

    def __init__(self, file: IO[bytes]) -> None:
        # Invalid UTF-8 is decoded to surrogates; it is reported later, where the client and the feature are known.
        self._file, self._decode = file, codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False

    def members(self) -> Iterator[str]:
        """Yields the keys of the object at the cursor. After each key, call `value`, or exhaust `members`."""
        self._expect("{")
        if self._peek() == "}":
            self._at += 1
            return
        seen: set[str] = set()
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise FormatError(f"Expected a name in quotes, found {key!r:.40}.")
            if key in seen:
                raise FormatError(f"An object has the key {key!r} twice: leave one of them out.")
            seen.add(key)
            self._expect(":")
            yield key
            if self._peek() == "}":
                self._at += 1
                return
            self._expect(",")

    def value(self) -> Any:
        """Parses the value at the cursor and moves behind it."""
        if not self._peek():
            raise EOFError("the file ends where a value should be")
        stop = self._end_of_value()
        text, self._at = self._text[self._at : stop], stop
        return json.loads(text, object_pairs_hook=with_different_keys)

    def end(self) -> None:
        """Raises `FormatError` unless only white space follows."""
        if self._peek():
            raise FormatError(f"Expected the end of the file, found {self._text[self._at : self._at + 20]!r}.")

    def _end_of_value(self) -> int:
        depth, offset = 0, 0  # Relative to the cursor, because `_read_more` moves the text.
        if self._text[self._at] not in '{["':
            while True:
                end = _SCALAR.match(self._text, self._at).end()  # type: ignore[union-attr]
                if end < len(self._text) or not self._read_more():
                    return end
        while True:
            for mark in _MARK.finditer(self._text, self._at + offset):
                token = mark.group()
                if token == '"':  # The end of the string has not been read yet.
                    offset = mark.start() - self._at
                    break
                depth += (token in "{[") - (token in "}]")
                offset = mark.end() - self._at
                if depth == 0:
                    return mark.end()
            else:
                offset = len(self._text) - self._at
            if not self._read_more():
                raise EOFError("the file ends within a value")

    def _read_more(self) -> bool:
        """Reads the next part of the file, and drops the text before the cursor."""
        if self._ended:
            return False
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_CLIENT_BYTES:
            raise FormatError(f"one value is longer than the limit of {MAX_CLIENT_BYTES >> 20} Mi characters")
        # The size doubles, so a long string is searched for its end only a few times.
        piece = self._file.read(max(_PIECE, len(self._text)))
        self._text += self._decode(piece, not piece)
        self._ended = not piece
        return bool(piece)

    def _peek(self) -> str:
        """Moves the cursor to the next character that is not white space, and returns it; empty at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read_more():
                return self._text[self._at : self._at + 1]

    def _expect(self, character: str) -> None:
        actual = self._peek()
        if actual != character:
            rest = repr(self._text[self._at : self._at + 20]) if actual else "the end of the file"
            raise FormatError(f"Expected {character!r}, found {rest}.")
        self._at += 1
