"""The client of each row of a table whose rows are in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fedsim.data import FormatError


class ClientIndex:
    """Numbers the clients by first appearance, and stores one integer per row in memory.

    Args:
      chunks: for every chunk of consecutive rows, the distinct values of the client column, and ``[rows]``, the index of each
        row's value among them.

    Attributes:
      names: the id of each client.
      rows: the number of each row's client, ``int32 [rows]``.

    Raises:
      FormatError: there are no rows; a row has no client: a missing value, NaN or an empty text; a client id is not UTF-8.
    """

    def __init__(self, chunks: Iterable[tuple[Iterable[Any], np.ndarray]]) -> None:
        numbers: dict[str, int] = {}
        rows = [np.zeros(0, np.int32)]
        for values, inverse in chunks:
            chunk_numbers = [numbers.setdefault(_name(value), len(numbers)) for value in values]
            rows.append(np.array(chunk_numbers, np.int32)[inverse])
        if not numbers:
            raise FormatError("it has no rows, so it has no clients")
        self.names, self.rows = list(numbers), np.concatenate(rows)

    def groups(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each client's id and its row numbers, ``int64``, in ascending order."""
        order = np.argsort(self.rows, kind="stable")
        ends = np.cumsum(np.bincount(self.rows, minlength=len(self.names)))
        return ((name, order[start:end]) for name, start, end in zip(self.names, [0, *ends[:-1]], ends, strict=True))


def _name(value: Any) -> str:
    if value is None or value in ("", b"") or value != value:
        raise FormatError("some rows have no client id: fill in the ids or drop the rows")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise FormatError(f"client id {value[:40]!r} is not UTF-8: rename the client") from None
    return str(value)
