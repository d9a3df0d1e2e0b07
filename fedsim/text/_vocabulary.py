"""Vocabularies: from a file of counts, or counted from texts; and what every vocabulary must be."""

from __future__ import annotations

import collections
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from fedsim import checks
from fedsim.data import FormatError

Texts = Sequence[bytes | str] | np.ndarray
_REMEDY = "Give a file of lines 'word count', most frequent first, or TFF's archive of it."


def vocabulary_from_counts(path: str | os.PathLike[str], size: int) -> list[str]:
    """The first ``size`` words of a file of counts: the vocabulary that FedJAX and TFF take.

    The file has lines ``word count``, most frequent first (``stackoverflow.word_count``), or is one JSON object
    ``{word: count}``, sorted here by count (``stackoverflow.tag_count``); or it is a tar archive of one such file.

    Raises:
      FormatError: a line or the object is not that, is not UTF-8, repeats a word, or there are fewer than ``size`` words.
      ValueError: ``size`` is not positive.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "word_count")
    >>> _ = path.write_text("the 12\\nto 7\\na 5\\n")
    >>> vocabulary_from_counts(path, 2)
    ['the', 'to']
    """
    _check_size(size)
    try:
        with open(path, "rb") as file:
            is_json = file.read(1) == b"{"
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                members = [member for member in archive if member.isfile()]
                inside = archive.extractfile(members[0]) if len(members) == 1 else None
                if inside is None:
                    raise FormatError(f"{path}: an archive of {len(members)} files, and one was expected. {_REMEDY}")
                is_json = inside.read(1) == b"{"
                inside.seek(0)
                words = _words(path, inside, is_json, size)
        else:
            with open(path, "rb") as file:
                words = _words(path, file, is_json, size)
    except (tarfile.TarError, EOFError) as error:
        raise FormatError(f"{path}: a damaged archive ({error}). Download it again.") from error
    if len(words) < size:
        raise FormatError(f"{path} has {len(words)} words, and size={size} were asked for. Ask for at most {len(words)}.")
    if len(set(words)) < size:
        raise FormatError(f"{path}: the word {_repeated(words)!r} comes twice among the first {size}. {_REMEDY}")
    return words


def vocabulary_from_texts(texts: Iterable[bytes | str], size: int, *, separator: str = " ") -> list[str]:
    """The ``size`` most frequent words of ``texts``, most frequent first, and in alphabetical order where counts are equal.

    Fewer, if the texts have no more. Empty words do not count. For tags, ``separator="|"``.

    Raises:
      FormatError: a text is not UTF-8.
      ValueError: ``size`` is not positive.

    >>> vocabulary_from_texts(["to be or not to be", b"to do"], 2)
    ['to', 'be']
    """
    _check_size(size)
    counts: collections.Counter[bytes] = collections.Counter()
    by = separator.encode()
    for index, text in enumerate(texts):
        counts.update(as_bytes(text, f"Text {index}").split(by))
    del counts[b""]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word.decode() for word, _ in ordered[:size]]


def as_bytes(text: bytes | str, what: str) -> bytes:
    """``text`` in UTF-8; `FormatError`, naming ``what`` it is, if it is not."""
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        raise FormatError(f"{what} is a {type(text).__name__}, and bytes or a string was expected. Read it as text.")
    check_utf8([text], what)
    return text


def check_utf8(texts: Sequence[bytes], what: str = "", first: int = 0) -> None:
    """`FormatError` unless all ``texts`` are UTF-8, naming the one that is not: ``what``, or its number from ``first`` on."""
    try:
        # One newline between two texts: no character of UTF-8 reaches over it.
        b"\n".join(texts).decode()
    except UnicodeDecodeError:
        for index, text in enumerate(texts, first):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{what or f'Text {index}'} is not UTF-8: byte {error.start} is 0x{text[error.start]:02x} in "
                    f"{text[max(0, error.start - 20) : error.start + 20]!r}. Decode it from its own encoding first."
                ) from None


def check_vocabulary(name: str, words: Sequence[str]) -> None:
    """``ValueError`` unless ``words`` are some, and no two the same."""
    if isinstance(words, str | bytes) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"Expected {name} to be a sequence of strings, one a word.")
    if not len(words):
        raise ValueError(f"Expected {name} to hold a word at least, and it is empty.")
    if len(set(words)) < len(words):
        raise ValueError(f"Expected words that differ in {name}, and {_repeated(words)!r} comes twice. Drop one of them.")


def ids_dtype(size: int, dtype: type | np.dtype | str | None) -> np.dtype:
    """``dtype``, or by default the smaller of int16 and int32, if it can hold ids below ``size``; ``ValueError`` else."""
    chosen = np.dtype(dtype if dtype is not None else np.int16 if size <= 2**15 else np.int32)
    if chosen.kind not in "iu" or size - 1 > np.iinfo(chosen).max:
        raise ValueError(f"Expected a dtype that holds ids up to {size - 1}, got dtype={chosen}: leave it out, or take int32.")
    return chosen


def _words(path: str | os.PathLike[str], file: IO[bytes], is_json: bool, size: int) -> list[str]:
    if not is_json:
        return [word for _, word in zip(range(size), _lines(path, file), strict=False)]
    try:
        counts = json.load(file)
        if not all(isinstance(count, int | float) for count in counts.values()):
            raise ValueError("a count is not a number")
    except ValueError as error:
        raise FormatError(f"{path}: not a JSON object of words and counts ({error}). {_REMEDY}") from error
    return sorted(counts, key=lambda word: -counts[word])[:size]


def _lines(path: str | os.PathLike[str], file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            word, count = line.decode().split()
            int(count)
        except ValueError:  # UnicodeDecodeError is one
            raise FormatError(f"{path}, line {number}: {line[:60]!r} is not a word and its count. {_REMEDY}") from None
        yield word


def _check_size(size: int) -> None:
    checks.whole(1, size=size, remedy="give the number of words")


def _repeated(words: Sequence[str]) -> str:
    return collections.Counter(words).most_common(1)[0][0]
