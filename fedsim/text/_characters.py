"""Snippets of text to sequences of character ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from fedsim import checks
from fedsim.data import FormatError
from fedsim.text._vocabulary import Texts, as_bytes, ids_dtype
from fedsim.text._words import BOS, EOS, FIRST, PAD

TFF_SHAKESPEARE = b"dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters of TensorFlow Federated's Shakespeare, in its tutorial's order, which is FedJAX's too."""


@dataclasses.dataclass(frozen=True, eq=False)
class CharacterTokenizer:
    """A client's snippets to pairs of id sequences ``x`` and ``y``, one character apart: what FedJAX makes of Shakespeare.

    The snippets, each between a bos and an eos, are laid end to end and cut into ``x``; ``y`` is the same, one further on.
    Only the last sequence is padded. Ids: 0 pads, 1 is bos, 2 eos, the characters start at 3, and one id, the last, stands
    for all others. Characters are bytes: one of several bytes is that many unknown ones. Text that is not UTF-8 is refused.

    Attributes:
      characters: one byte each.
      length: of the sequences.
      dtype: of the ids; by default int16.

    Raises:
      ValueError: no characters, one that comes twice or is not a byte, a length that is not positive.

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
            raise ValueError("Expected characters to be bytes, each one a character. Write them as b'...'.")
        if not self.characters or len(set(self.characters)) < len(self.characters):
            raise ValueError(f"Expected characters that differ, and some, got characters={self.characters!r}.")
        checks.whole(1, length=self.length)
        dtype = ids_dtype(self.size, self.dtype)
        table = np.full(256, self.size - 1, dtype)
        table[list(self.characters)] = np.arange(FIRST, self.size - 1)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "_table", table)

    @property
    def size(self) -> int:
        """How many ids there are: characters, pad, bos, eos and the unknown one."""
        return len(self.characters) + FIRST + 1

    def __call__(self, snippets: Texts) -> tuple[np.ndarray, np.ndarray]:
        """``x`` and ``y`` of one client's snippets, each ``[sequences, length]``; no sequences if there are no snippets.

        Raises:
          FormatError: a snippet is not UTF-8, or not text.
        """
        texts = [as_bytes(text, f"Text {index}") for index, text in enumerate(snippets)]
        # A byte for bos and one for eos around each text, looked up like the rest and then overwritten.
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
        """A client's ``feature`` as ``{"x", "y"}``: what `fedsim.data.ClientStream.map` takes.

        Raises:
          FormatError: as for a call, and names the client and the feature.

        >>> CharacterTokenizer(length=2).client("MACBETH", {"snippets": np.array([b"d"], object)})["y"].tolist()
        [[3, 2]]
        """
        try:
            x, y = self(features[feature])
        except FormatError as error:
            raise FormatError(f"Client {client_id!r}, feature {feature!r}: {error}") from None
        return {"x": x, "y": y}
