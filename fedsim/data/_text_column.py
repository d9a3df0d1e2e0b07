"""`TextColumn`: a column of byte strings of different lengths in one buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np


class TextColumn:
    """A column of byte strings, stored as one buffer and the position of each row in it. Both may be memory-mapped.

    Indexing with an integer returns ``bytes``. Indexing with a slice, an integer array or a mask returns a NumPy object array
    of ``bytes``.

    Args:
      buffer: ``uint8 [bytes]``, all rows concatenated.
      starts: ``int64 [rows + 1]``, the start of each row; nondecreasing from 0 to ``bytes``.

    Raises:
      ValueError: wrong shapes or dtypes, or ``starts`` does not begin with 0 and end with ``bytes``.

    >>> column = TextColumn.of([b"to be", b"", b"or not"])
    >>> len(column), column.shape, column.dtype, column.nbytes
    (3, (3,), dtype('O'), 43)
    >>> column[1:].tolist(), column[0], column[np.array([2, 0])].tolist()
    ([b'', b'or not'], b'to be', [b'or not', b'to be'])
    """

    dtype = np.dtype(object)
    ndim = 1

    def __init__(self, buffer: np.ndarray, starts: np.ndarray) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or starts.dtype != np.int64 or starts.ndim != 1 or not len(starts):
            raise ValueError(
                f"Expected buffer uint8 [bytes] and starts int64 [rows + 1], got {buffer.dtype} {list(buffer.shape)} and "
                f"{starts.dtype} {list(starts.shape)}."
            )
        if starts[0] != 0 or starts[-1] != len(buffer):  # Comparing all starts would read a whole mapped file.
            raise ValueError(
                f"Expected starts from 0 to the {len(buffer)} bytes of the buffer, got {starts[0]} to {starts[-1]}."
            )
        self.buffer, self.starts = buffer, starts

    @classmethod
    def of(cls, rows: Iterable[bytes]) -> TextColumn:
        """Returns a column of these byte strings.

        Raises:
          ValueError: a row is not ``bytes``.
        """
        rows = list(rows)
        check_text(rows)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
        return cls(np.frombuffer(b"".join(rows), np.uint8), starts)

    @property
    def shape(self) -> tuple[int]:
        """``(rows,)``."""
        return (len(self),)

    @property
    def nbytes(self) -> int:
        """Size of the buffer and the starts in bytes."""
        return self.buffer.nbytes + self.starts.nbytes

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice) and rows.step in (None, 1):
            first, stop, _ = rows.indices(len(self))
            starts = self.starts[first : max(first, stop) + 1]
            content, ends = self.buffer[starts[0] : starts[-1]].tobytes(), (starts - starts[0]).tolist()
            return _objects([content[a:b] for a, b in itertools.pairwise(ends)])
        chosen = np.arange(len(self))[rows]
        if not chosen.ndim:
            return self.buffer[self.starts[chosen] : self.starts[chosen + 1]].tobytes()
        return _objects([self.buffer[self.starts[row] : self.starts[row + 1]].tobytes() for row in chosen.tolist()])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:]

    def __repr__(self) -> str:
        return f"TextColumn({len(self)} rows, {len(self.buffer)} bytes)"


def check_text(rows: Iterable[Any]) -> None:
    """Raises a ``ValueError`` unless every row is ``bytes``."""
    for number, row in enumerate(rows):
        if not isinstance(row, bytes):
            remedy = "encode it first, for example with [row.encode() for row in rows]"
            raise ValueError(f"Text must be bytes, got {type(row).__name__} {row!s:.40} in row {number}: {remedy}")


def _objects(rows: list[bytes]) -> np.ndarray:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array
