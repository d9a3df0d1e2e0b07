"""A tokenizer from sentences to sequences of word ids."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fedsim import checks
from fedsim.text._client import errors_naming
from fedsim.text._farmhash import fingerprint64
from fedsim.text._vocabulary import Texts, as_bytes, check_utf8, check_vocabulary, ids_dtype

PAD, BOS, EOS, FIRST = 0, 1, 2, 3
_ROWS = 50_000  # sentences at a time, because their ids take much more memory as Python lists than as arrays


@dataclasses.dataclass(frozen=True, eq=False)
class WordTokenizer:
    """Converts sentences, with words separated by single spaces, to id sequences ``x`` and the next words ``y``.

    A sentence ``w1 ... wn`` becomes ``x = bos w1 ... wn`` and ``y = w1 ... wn eos``, both cut or padded to ``length``, so
    sentences of ``length`` or more words have no eos. Ids are those of FedJAX's ``StackoverflowTokenizer``: 0 is pad, 1
    bos, 2 eos, the vocabulary starts at 3, and unknown words get one of the last ``oov_buckets`` ids by FarmHash's fingerprint.
    In the code of Reddi et al. (2021) and other code for TFF, the order is pad, vocabulary, unknown words, bos, eos, so
    parameters that were trained there need other rows of the embedding and of the outputs. As in FedJAX and TFF, there is an
    empty word between two successive spaces and in an empty sentence, and it is unknown.
    Deviation: text that is not UTF-8 is an error.

    Attributes:
      vocabulary: the known words, most frequent first, without pad, bos and eos.
      length: the length of the sequences.
      oov_buckets: the number of ids that unknown words share.
      dtype: the dtype of the ids; by default int16 if it is sufficient, else int32.

    Raises:
      ValueError: the vocabulary is empty; a word occurs twice; ``dtype`` cannot represent the ids; a number is not positive.

    >>> tokenize = WordTokenizer(["the", "to", "."], length=4)
    >>> x, y = tokenize([b"to the zebra .", "to"])
    >>> x.tolist(), y.tolist()
    ([[1, 4, 3, 6], [1, 4, 0, 0]], [[4, 3, 6, 5], [4, 2, 0, 0]])
    >>> tokenize.size, x.dtype
    (7, dtype('int16'))
    """

    vocabulary: Sequence[str]
    length: int = 20
    oov_buckets: int = 1
    dtype: type | np.dtype | str | None = None

    def __post_init__(self) -> None:
        check_vocabulary("vocabulary", self.vocabulary)
        checks.whole(1, length=self.length, oov_buckets=self.oov_buckets)
        object.__setattr__(self, "dtype", ids_dtype(self.size, self.dtype))
        object.__setattr__(self, "_ids", {word.encode(): id for id, word in enumerate(self.vocabulary, FIRST)})

    @property
    def size(self) -> int:
        """The number of ids: those of the vocabulary, pad, bos, eos, and the buckets of unknown words."""
        return len(self.vocabulary) + FIRST + self.oov_buckets

    def __call__(self, sentences: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``x`` and ``y``, each ``[sentences, length]``.

        Raises:
          FormatError: a sentence is not text, or not UTF-8.
        """
        x = np.full((len(sentences), self.length), PAD, self.dtype)
        y = np.full_like(x, PAD)
        for start in range(0, len(sentences), _ROWS):
            block = [text.encode() if isinstance(text, str) else text for text in sentences[start : start + _ROWS]]
            if not all(isinstance(text, bytes) for text in block):
                block = [as_bytes(text, f"Text {index}") for index, text in enumerate(block, start)]
            check_utf8(block, first=start)
            cut = [text.split(b" ", self.length)[: self.length] for text in block]
            self._write(cut, x[start : start + _ROWS], y[start : start + _ROWS])
        return x, y

    def client(self, client_id: str, features: Mapping[str, np.ndarray], *, feature: str = "tokens") -> dict[str, np.ndarray]:
        """Returns ``{"x", "y"}`` of a client's ``feature``; pass this method to `fedsim.data.ClientStream.map`.

        Raises:
          FormatError: a sentence is not text, or not UTF-8. The message names the client and the feature.

        >>> WordTokenizer(["a"], length=2).client("ann", {"tokens": np.array([b"a"], object)})["y"].tolist()
        [[3, 2]]
        """
        with errors_naming(client_id, feature):
            x, y = self(features[feature])
        return {"x": x, "y": y}

    def _write(self, cut: list[list[bytes]], x: np.ndarray, y: np.ndarray) -> None:
        counts = np.fromiter(map(len, cut), np.int64, len(cut))
        words, oov = itertools.chain.from_iterable(cut), self.size - self.oov_buckets
        known: dict[bytes, int] = self._ids  # type: ignore[attr-defined]
        if self.oov_buckets == 1:
            ids = np.fromiter(map(known.get, words, itertools.repeat(oov)), self.dtype, counts.sum())
        else:
            pairs = ((word, known.get(word)) for word in words)
            each_id = (oov + fingerprint64(word) % self.oov_buckets if id is None else id for word, id in pairs)
            ids = np.fromiter(each_id, self.dtype, counts.sum())
        y[np.arange(self.length) < counts[:, None]] = ids
        x[:, 0] = BOS
        x[:, 1:] = y[:, :-1]
        rows = np.flatnonzero(counts < self.length)
        y[rows, counts[rows]] = EOS
