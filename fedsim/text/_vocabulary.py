"""Vocabularies from files of counts or from texts, and checks of vocabularies."""

from __future__ import annotations

import collections
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from fedsim import checks
from fedsim.data import FormatError
from fedsim.text_files import decoded, parse_json

Texts = Sequence[bytes | str] | np.ndarray
_REMEDY = "Give a file with lines 'word count', most frequent first, or TFF's archive of such a file."


def vocabulary_from_counts(path: str | os.PathLike[str], size: int) -> list[str]:
    """Returns the ``size`` most frequent words of a file of counts, which is the vocabulary of FedJAX and TFF.

    The file has lines ``word count``, most frequent first (``stackoverflow.word_count``), or it is one JSON object
    ``{word: count}`` in any order (``stackoverflow.tag_count``), or a tar archive of one such file.

    Args:
      path: the file.
      size: the number of words.

    Raises:
      FormatError: the file has another form, is not UTF-8, contains a word twice, or has fewer than ``size`` words.
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
                    raise FormatError(
                        f"Expected {path} to be an archive of one file, got an archive of {len(members)} files. {_REMEDY}"
                    )
                is_json = inside.read(1) == b"{"
                inside.seek(0)
                words = _words(path, inside, is_json, size)
        else:
            with open(path, "rb") as file:
                words = _words(path, file, is_json, size)
    except (tarfile.TarError, EOFError) as error:
        raise FormatError(f"The archive {path} is damaged ({error}). Download it again.") from error
    if len(words) < size:
        raise FormatError(f"{path} has only {len(words)} words, got size={size}: give at most size={len(words)}.")
    if len(set(words)) < size:
        raise FormatError(f"{path} contains the word {_repeated(words)!r} twice among the first {size} words. {_REMEDY}")
    return words


def vocabulary_from_texts(texts: Iterable[bytes | str], size: int, *, separator: str = " ") -> list[str]:
    """Returns the ``size`` most frequent words of ``texts``, most frequent first; words of equal counts are in byte order.

    If the texts have fewer words, all of them are returned. Empty words are ignored.

    Args:
      texts: the texts, in UTF-8 if they are bytes.
      size: the number of words.
      separator: the text between two words; ``"|"`` for tags.

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
    """Returns ``text`` in UTF-8; raises `FormatError` if it is not text, with ``what`` at the beginning of the message."""
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        raise FormatError(f"{what} is a {type(text).__name__}: expected bytes or a string.")
    check_utf8([text], what)
    return text


def check_utf8(texts: Sequence[bytes], what: str = "", first: int = 0) -> None:
    """Raises `FormatError` unless all ``texts`` are UTF-8; the message has ``what`` or the text's number."""
    try:
        # No UTF-8 character contains the newline between two texts.
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
    """Raises ``ValueError`` unless ``words`` are distinct strings, at least one."""
    if isinstance(words, str | bytes) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"Expected {name} to be a sequence of strings, one per word: give a list of strings.")
    if not len(words):
        raise ValueError(f"Expected {name} to have at least one word, but it is empty.")
    if len(set(words)) < len(words):
        raise ValueError(f"Expected distinct words in {name}, but {_repeated(words)!r} occurs twice: remove one of them.")


def ids_dtype(size: int, dtype: type | np.dtype | str | None) -> np.dtype:
    """Returns ``dtype`` (default: int16 or int32, by size), or raises ``ValueError`` if it cannot represent all ids."""
    chosen = np.dtype(dtype if dtype is not None else np.int16 if size <= 2**15 else np.int32)
    if chosen.kind not in "iu" or size - 1 > np.iinfo(chosen).max:
        raise ValueError(f"Expected a dtype for ids up to {size - 1}, got dtype={chosen}: leave it out, or give int32.")
    return chosen


def _words(path: str | os.PathLike[str], file: IO[bytes], is_json: bool, size: int) -> list[str]:
    if not is_json:
        return [word for _, word in zip(range(size), _lines(path, file), strict=False)]
    try:
        counts = parse_json(decoded(file.read(), path), path)
        if not isinstance(counts, dict) or not all(isinstance(count, int | float) for count in counts.values()):
            raise ValueError("a count is not a number")
    except ValueError as error:
        raise FormatError(f"{path}: not a JSON object of words and counts ({error}). {_REMEDY}") from error
    return sorted(counts, key=lambda word: -counts[word])[:size]


def _lines(path: str | os.PathLike[str], file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            word, count = line.decode().split()
            int(count)
        except ValueError:  # Includes UnicodeDecodeError.
            raise FormatError(f"{path}, line {number}: {line[:60]!r} is not a word and its count. {_REMEDY}") from None
        yield word


def _check_size(size: int) -> None:
    checks.whole(1, size=size, remedy="give the number of words")


def _repeated(words: Sequence[str]) -> str:
    return collections.Counter(words).most_common(1)[0][0]
