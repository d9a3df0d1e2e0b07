"""A tokenizer from snippets of text to sequences of character ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from fedsim import checks
from fedsim.text._client import errors_naming
from fedsim.text._vocabulary import Texts, as_bytes, ids_dtype
from fedsim.text._words import BOS, EOS, FIRST, PAD

TFF_SHAKESPEARE = b"dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters of TensorFlow Federated's Shakespeare dataset, in the order of its tutorial and of FedJAX."""


@dataclasses.dataclass(frozen=True, eq=False)
class CharacterTokenizer:
    """Converts a client's snippets to id sequences ``x`` and the next characters ``y``, as FedJAX does for Shakespeare.

    The snippets, each between a bos and an eos, are concatenated and cut into sequences ``x``; ``y`` is the same text shifted
    by one character. Only the last sequence is padded. Ids: 0 is pad, 1 bos, 2 eos, the characters start at 3, and the last id
    is shared by all unknown characters. A character is a byte, so a character of several bytes becomes several unknown ones.
    Text that is not UTF-8 is an error.

    Attributes:
      characters: the known characters, one byte each.
      length: the length of the sequences.
      dtype: the dtype of the ids; by default int16.

    Raises:
      ValueError: there are no characters; a character occurs twice; ``characters`` is not bytes; ``length`` is not positive;
        ``dtype`` cannot represent the ids.

    >>> tokenize = CharacterTokenizer(b"abc", length=3)
    >>> x, y = tokenize([b"abca", b"z"])
    >>> x.tolist(), y.tolist()
    ([[1, 3, 4], [5, 3, 2], [1, 6, 0]], [[3, 4, 5], [3, 2, 1], [6, 2, 0]])
    >>> CharacterTokenizer().size
    90
    """

    characters: bytes = TFF_SHAKESPEARE
    length: int = 80
    dtype: type | np.dtype | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.characters, bytes):
            raise ValueError(
                f"Expected characters to be bytes, one per character, got characters={self.characters!r}: write b'...'."
            )
        if not self.characters or len(set(self.characters)) < len(self.characters):
            raise ValueError(f"Expected distinct characters, at least one, got characters={self.characters!r}.")
        checks.whole(1, length=self.length)
        dtype = ids_dtype(self.size, self.dtype)
        table = np.full(256, self.size - 1, dtype)
        table[list(self.characters)] = np.arange(FIRST, self.size - 1)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "_table", table)

    @property
    def size(self) -> int:
        """The number of ids: those of the characters, pad, bos, eos and the id of unknown characters."""
        return len(self.characters) + FIRST + 1

    def __call__(self, snippets: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``x`` and ``y`` of one client's snippets, each ``[sequences, length]``; ``sequences`` is 0 without snippets.

        Raises:
          FormatError: a snippet is not text, or not UTF-8.
        """
        texts = [as_bytes(text, f"Text {index}") for index, text in enumerate(snippets)]
        # A zero byte on each side of a text reserves the positions of bos and eos, which are written afterwards.
        joined = self._table[np.frombuffer(b"".join(b"\0%b\0" % text for text in texts), np.uint8)]  # type: ignore[attr-defined]
        ends = np.cumsum([len(text) + 2 for text in texts], dtype=np.int64)
        joined[np.concatenate([ends[:0], ends[:-1]])] = BOS
        joined[:1] = BOS
        joined[ends - 1] = EOS
        rows = -(-max(len(joined) - 1, 0) // self.length)
        x = np.full(rows * self.length, PAD, self.dtype)
        y = np.full_like(x, PAD)
        x[: len(joined) - 1], y[: len(joined) - 1] = joined[:-1], joined[1:]
        return x.reshape(rows, self.length), y.reshape(rows, self.length)

    def client(self, client_id: str, features: Mapping[str, np.ndarray], *, feature: str = "snippets") -> dict[str, np.ndarray]:
        """Returns ``{"x", "y"}`` of a client's ``feature``; pass this method to `fedsim.data.ClientStream.map`.

        Raises:
          FormatError: a snippet is not text, or not UTF-8. The message names the client and the feature.

        >>> CharacterTokenizer(length=2).client("MACBETH", {"snippets": np.array([b"d"], object)})["y"].tolist()
        [[3, 2]]
        """
        with errors_naming(client_id, feature):
            x, y = self(features[feature])
        return {"x": x, "y": y}
