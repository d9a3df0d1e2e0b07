"""Sizes checked at the door."""

from __future__ import annotations

import numpy as np


def check_positive(**sizes: int) -> None:
    """``ValueError`` for the first of ``sizes`` that is not a positive whole number.

    >>> check_positive(hidden=3, layers=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected layers >= 1, got layers=0: give a positive whole number.
    """
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Expected {name} >= 1, got {name}={value!r}: give a positive whole number.")
