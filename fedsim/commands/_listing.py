"""Lists of what is registered, with the first line of each docstring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_listing(things: Mapping[str, Any]) -> None:
    """Prints a line for each name, with the first line of the docstring of what it names.

    >>> class Mean: "Returns the mean."
    >>> class Median: "Returns the median."
    >>> print_listing({"mean": Mean, "median": Median})
    mean    Returns the mean.
    median  Returns the median.
    """
    width = max(map(len, things)) + 2
    for name, thing in things.items():
        print(f"{name:<{width}}{(thing.__doc__ or '').strip().partition(chr(10))[0]}")
