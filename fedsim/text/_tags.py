"""Questions to bags of words and sets of tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fedsim import checks
from fedsim.data import FormatError
from fedsim.text._vocabulary import Texts, as_bytes, check_vocabulary, ids_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class TagTokenizer:
    """Posts to what tag prediction reads: ``x``, the share of each word, and ``y``, which tags it has.

    As TFF's baseline does: a post's words are those of its tokens and of its title, ``x`` has each known word's number of
    occurrences over the number of all words, known or not; ``y`` is 1 for each tag, and other tags count for nothing.
    Unlike there, a post without words is all 0 (there NaN), and a tag given twice counts once (there twice).

    With ``length`` given, ``x`` is instead the ids of the first ``length`` words (0 pads, words from 1, the last id unknown
    ones): 500 times smaller, and all that `fedsim.models.stackoverflow_logistic` needs to make the same of it.

    Attributes:
      words: the vocabulary, most frequent first.
      tags: likewise.
      length: None for the shares.

    Raises:
      ValueError: an empty vocabulary, a word or tag that comes twice, a length that is not positive.

    >>> tokenize = TagTokenizer(["the", "to"], ["python", "sql"])
    >>> x, y = tokenize([b"to the zebra"], titles=[b"the"], tags=[b"sql|java"])
    >>> x.tolist(), y.tolist()
    ([[0.5, 0.25]], [[0, 1]])
    """

    words: Sequence[str]
    tags: Sequence[str]
    length: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("words", self.words), ("tags", self.tags)):
            check_vocabulary(name, values)
            object.__setattr__(self, f"_{name}", {value.encode(): index for index, value in enumerate(values)})
        checks.whole(1, or_none=True, length=self.length)

    def __call__(self, tokens: Texts, *, titles: Texts, tags: Texts) -> tuple[np.ndarray, np.ndarray]:
        """``x float32 [posts, words]`` (or ids ``[posts, length]``) and ``y uint8 [posts, tags]``.

        Raises:
          FormatError: a text is not UTF-8, or not text.
        """
        known: dict[bytes, int] = self._words  # type: ignore[attr-defined]
        of_tag: dict[bytes, int] = self._tags  # type: ignore[attr-defined]
        y = np.zeros((len(tokens), len(self.tags)), np.uint8)
        ids = self.length is not None
        x = np.zeros((len(tokens), self.length or len(self.words)), ids_dtype(len(known) + 2, None) if ids else np.float32)
        for row, (post, title, marks) in enumerate(zip(tokens, titles, tags, strict=True)):
            words = as_bytes(post, f"Text {row}").split() + as_bytes(title, f"Title {row}").split()
            if ids:
                words = words[: self.length]
                x[row, : len(words)] = [known.get(word, len(known)) + 1 for word in words]
            elif words:
                found = [index for word in words if (index := known.get(word)) is not None]
                np.add.at(x[row], found, np.float32(1))
                x[row] /= len(words)
            y[row, [of_tag[tag] for tag in as_bytes(marks, f"Tags {row}").split(b"|") if tag in of_tag]] = 1
        return x, y

    def client(self, client_id: str, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A client's ``tokens``, ``title`` and ``tags`` as ``{"x", "y"}``: what `fedsim.data.ClientStream.map` takes.

        Raises:
          FormatError: as for a call, and names the client.

        >>> post = {"tokens": [b"a b"], "title": [b""], "tags": [b"c"]}
        >>> TagTokenizer(["a"], ["c"], length=3).client("ann", post)["x"].tolist()
        [[1, 2, 0]]
        """
        try:
            x, y = self(features["tokens"], titles=features["title"], tags=features["tags"])
        except FormatError as error:
            raise FormatError(f"Client {client_id!r}: {error}") from None
        return {"x": x, "y": y}
