"""`ClientIds`: the client ids of a large population, as bytes that may be memory-mapped."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np


class ClientIds(Sequence[str]):
    """A sequence of client ids that decodes an id when it is read.

    Opening a population therefore creates neither strings nor a dictionary.

    Args:
      names: ``S [clients]``, the ids as fixed-length UTF-8. They must be unique, see `first_repeated`.
    """

    def __init__(self, names: np.ndarray) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [name.decode() for name in self.names[index].tolist()]
        return self.names[index].decode()

    def __iter__(self) -> Iterator[str]:
        return (name.decode() for name in self.names.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self)) if len(self) <= 20 else f"[{self[0]!r}, {self[1]!r}, ..., {self[-1]!r}]"

    def position(self, client_id: str) -> int | None:
        """Returns the position of an id, or None if there is no such id."""
        name = client_id.encode(errors="surrogatepass")
        if len(name) > self.names.dtype.itemsize or name.endswith(b"\0"):
            return None
        order = self._order
        key = np.array(name, self.names.dtype)  # With another length, NumPy would copy all names to compare them.
        at = int(np.searchsorted(self.names, key, sorter=order))
        found = at if order is None else int(order[at]) if at < len(order) else at
        return found if found < len(self) and self.names[found] == name else None

    def first_repeated(self) -> str | None:
        """Returns an id that occurs more than once, or None."""
        names = self.names if self._order is None else self.names[self._order]
        repeats = np.flatnonzero(names[1:] == names[:-1])
        return names[repeats[0]].decode() if len(repeats) else None

    @functools.cached_property
    def _order(self) -> np.ndarray | None:
        """The permutation that sorts the names; None if they are sorted, as they are in most files."""
        return None if np.all(self.names[:-1] <= self.names[1:]) else np.argsort(self.names, kind="stable")
