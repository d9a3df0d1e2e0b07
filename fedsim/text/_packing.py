"""`pack`: documents of any lengths in sequences of one length, for `fedsim.models.decoder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedsim import checks


def pack(documents: Iterable[Sequence[int] | np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Packs a client's documents into sequences, one document after another, without gaps.

    A document of n tokens gives n - 1 positions, each with a token and the one that follows it in the document. A document that
    crosses the end of a sequence is continued in the next one, as another document.

    Args:
      documents: the ids of the tokens of each.
      length: the length of the sequences.

    Returns:
      The features ``int32 [sequences, length]``: ``x``, the tokens; ``y``, the next token of each; and ``document``, the number
      of its document in the sequence, from 1. The end of the last sequence is filled with zeros.

    Raises:
      ValueError: ``length`` is not a positive whole number.

    >>> {name: rows.tolist() for name, rows in pack([[5, 6, 7, 8], [9, 3]], length=3).items()}
    {'x': [[5, 6, 7], [9, 0, 0]], 'y': [[6, 7, 8], [3, 0, 0]], 'document': [[1, 1, 1], [1, 0, 0]]}
    """
    checks.whole(1, length=length)
    texts = [np.asarray(document, np.int32) for document in documents]
    empty = np.zeros(0, np.int32)
    x = np.concatenate([empty, *(text[:-1] for text in texts)])
    y = np.concatenate([empty, *(text[1:] for text in texts)])
    number = np.repeat(np.arange(1, len(texts) + 1, dtype=np.int32), [max(0, len(text) - 1) for text in texts])
    filled = [np.pad(column, (0, -len(x) % length)).reshape(-1, length) for column in (x, y, number)]
    first = filled[2][:, :1]
    # Documents without a position leave gaps in the numbers, which only need to differ.
    return {"x": filled[0], "y": filled[1], "document": np.where(filled[2] > 0, filled[2] - first + 1, 0).astype(np.int32)}
