"""JSON read in pieces: the members of the outer objects one by one, each parsed whole by the standard library."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from fedsim.data import FormatError
from fedsim.formats._source import MAX_CLIENT_BYTES

_PIECE = 1 << 20
# What matters for where a value ends: whole strings, brackets outside of them, and a string that has no end yet.
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,\]}\s]*")


class JsonReader:
    """A cursor in UTF-8 JSON. Memory is that of the value being parsed, at most 256 Mi characters."""

    def __init__(self, file: IO[bytes]) -> None:
        # What is not UTF-8 is let through, to be found by whoever knows of which client and feature it is.
        self._file, self._decode = file, codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text, self._at, self._ended = "", 0, False

    def members(self) -> Iterator[str]:
        """The keys of the object here; after each, ask for its `value`, or its `members`, to the end."""
        self._expect("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise FormatError(f"Expected a name in quotes, found {key!r:.40}.")
            self._expect(":")
            yield key
            if self._peek() == "}":
                self._at += 1
                return
            self._expect(",")

    def value(self) -> Any:
        """The value here, parsed."""
        if not self._peek():
            raise EOFError("the file ends where a value should be")
        stop = self._end_of_value()
        text, self._at = self._text[self._at : stop], stop
        return json.loads(text)

    def end(self) -> None:
        """Raises `FormatError` if anything but space follows."""
        if self._peek():
            raise FormatError(f"Expected the end of the file, found {self._text[self._at : self._at + 20]!r}.")

    def _end_of_value(self) -> int:
        depth, offset = 0, 0  # Relative to the cursor, for `_more` moves the text.
        if self._text[self._at] not in '{["':
            while True:
                end = _SCALAR.match(self._text, self._at).end()  # type: ignore[union-attr]
                if end < len(self._text) or not self._more():
                    return end
        while True:
            for mark in _MARK.finditer(self._text, self._at + offset):
                found = mark.group()
                if found == '"':  # Its end is not here yet.
                    offset = mark.start() - self._at
                    break
                depth += (found in "{[") - (found in "}]")
                offset = mark.end() - self._at
                if depth == 0:
                    return mark.end()
            else:
                offset = len(self._text) - self._at
            if not self._more():
                raise EOFError("the file ends within a value")

    def _more(self) -> bool:
        """Reads on, dropping what lies before the cursor."""
        if self._ended:
            return False
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_CLIENT_BYTES:
            raise FormatError(f"one value is longer than {MAX_CLIENT_BYTES >> 20} Mi characters, the most that is read")
        # Twice as much each time, so that a long string is not searched for its end more than a few times.
        piece = self._file.read(max(_PIECE, len(self._text)))
        self._text += self._decode(piece, not piece)
        self._ended = not piece
        return bool(piece)

    def _peek(self) -> str:
        """The next character that is not space, the cursor moved to it; empty at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _expect(self, character: str) -> None:
        found = self._peek()
        if found != character:
            there = repr(self._text[self._at : self._at + 20]) if found else "the end of the file"
            raise FormatError(f"Expected {character!r}, found {there}.")
        self._at += 1
