"""Whose each row is, where the rows of a client lie anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fedsim.data import FormatError


class Owners:
    """Clients numbered by first appearance; one integer a row is kept in memory.

    Args:
      chunks: of consecutive rows: the distinct values of the client's feature, and ``[rows]`` which of them each row has.

    Attributes:
      names: of each number.
      rows: the number of each row's client, ``int32 [rows]``.

    Raises:
      FormatError: no rows, a row without a client, a name that is not UTF-8.
    """

    def __init__(self, chunks: Iterable[tuple[Iterable[Any], np.ndarray]]) -> None:
        numbers: dict[str, int] = {}
        rows = [np.zeros(0, np.int32)]
        for values, which in chunks:
            here = [numbers.setdefault(_name(value), len(numbers)) for value in values]
            rows.append(np.array(here, np.int32)[which])
        if not numbers:
            raise FormatError("no rows, hence no clients")
        self.names, self.rows = list(numbers), np.concatenate(rows)

    def groups(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each client's name and rows, ``int64``, rising."""
        order = np.argsort(self.rows, kind="stable")
        ends = np.cumsum(np.bincount(self.rows, minlength=len(self.names)))
        return ((name, order[start:end]) for name, start, end in zip(self.names, [0, *ends[:-1]], ends, strict=True))


def _name(value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise FormatError(f"client id {value[:40]!r} is not UTF-8: rename it") from None
    if value is None:
        raise FormatError("rows without a client: fill or drop them")
    return str(value)
