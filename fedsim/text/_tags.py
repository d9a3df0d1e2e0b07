"""A tokenizer from questions to bags of words and sets of tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fedsim import checks
from fedsim.text._client import errors_naming
from fedsim.text._vocabulary import Texts, as_bytes, check_vocabulary, ids_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class TagTokenizer:
    """Converts posts to the features of tag prediction: ``x``, the frequency of each word, and ``y``, the tags of the post.

    The conversion is that of TFF's baseline. The words of a post are those of its tokens and of its title. ``x`` is the number
    of occurrences of each known word, divided by the number of all words of the post, known or unknown. ``y`` is 1 for each
    known tag of the post; unknown tags are ignored. Deviations from TFF: ``x`` of a post without words is 0 (TFF: NaN), and a
    tag that is given twice counts once (TFF: twice).

    If ``length`` is given, ``x`` has instead the ids of the first ``length`` words: 0 is padding, words start at 1, and the
    last id is for unknown words. This takes 500 times less memory, and `fedsim.models.stackoverflow_logistic` computes the
    frequencies from it.

    Attributes:
      words: the known words, most frequent first.
      tags: the known tags, most frequent first.
      length: the number of word ids per post; None: ``x`` has frequencies.

    Raises:
      ValueError: there are no words or no tags; a word or tag occurs twice; ``length`` is not positive.

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
        """Returns ``x float32 [posts, words]`` (or ids ``[posts, length]``) and ``y uint8 [posts, tags]``.

        Raises:
          FormatError: a value is not text, or not UTF-8.
        """
        known: dict[bytes, int] = self._words  # type: ignore[attr-defined]
        tag_index: dict[bytes, int] = self._tags  # type: ignore[attr-defined]
        y = np.zeros((len(tokens), len(self.tags)), np.uint8)
        ids = self.length is not None
        x = np.zeros((len(tokens), self.length or len(self.words)), ids_dtype(len(known) + 2, None) if ids else np.float32)
        for row, (post, title, post_tags) in enumerate(zip(tokens, titles, tags, strict=True)):
            words = as_bytes(post, f"Text {row}").split() + as_bytes(title, f"Title {row}").split()
            if ids:
                words = words[: self.length]
                x[row, : len(words)] = [known.get(word, len(known)) + 1 for word in words]
            elif words:
                indices = [index for word in words if (index := known.get(word)) is not None]
                np.add.at(x[row], indices, np.float32(1))
                x[row] /= len(words)
            y[row, [tag_index[tag] for tag in as_bytes(post_tags, f"Tags {row}").split(b"|") if tag in tag_index]] = 1
        return x, y

    def client(self, client_id: str, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns ``{"x", "y"}`` of a client's ``tokens``, ``title`` and ``tags``; pass it to `fedsim.data.ClientStream.map`.

        Raises:
          FormatError: a value is not text, or not UTF-8. The message names the client.

        >>> post = {"tokens": [b"a b"], "title": [b""], "tags": [b"c"]}
        >>> TagTokenizer(["a"], ["c"], length=3).client("ann", post)["x"].tolist()
        [[1, 2, 0]]
        """
        with errors_naming(client_id):
            x, y = self(features["tokens"], titles=features["title"], tags=features["tags"])
        return {"x": x, "y": y}
