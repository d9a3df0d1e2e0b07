"""Whether a best value is at the edge of its grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def edge_of_grid(name: str, best: Any, values: Iterable[Any]) -> str | None:
    """Returns a sentence that says that the best value of a number is the smallest or the largest one; None if it is not.

    Below 0, and below 1 for counts, there is nothing to try.

    Args:
      name: of the number.
      best: the best value.
      values: all that were tried.

    >>> edge_of_grid("mu", 0.1, [0.01, 0.1])
    'the best mu=0.1 is the largest of the grid: try larger ones'
    """
    tried = [best, *values]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in tried):  # such as a list
        return None
    different = set(tried)
    if len(different) < 2:
        return None
    which = "smaller" if best == min(different) else "larger" if best == max(different) else ""
    if not which or (which == "smaller" and best <= (1 if isinstance(best, int) else 0)):
        return None
    end = {"smaller": "smallest", "larger": "largest"}[which]
    return f"the best {name}={best} is the {end} of the grid: try {which} ones"
