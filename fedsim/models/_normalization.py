"""The normalizations of networks by name, so that one argument of a model chooses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from fedsim import checks
from fedsim.models._group_norm import GroupNorm

Norm = Literal["group", "none"]


def normalization(norm: Norm, groups: int, channels: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that normalizes ``float [n, ..., c]`` and has parameters of its own wherever it is called.

    Args:
      norm: "group" for group normalization, "none" for none.
      groups: the number of groups.
      channels: a divisor of the numbers of channels that are normalized.

    Raises:
      ValueError: ``norm`` is another name, or ``groups`` is not a divisor of ``channels``.

    >>> normalization("batch", 2, 16)
    Traceback (most recent call last):
    ...
    ValueError: Expected norm to be 'group' or 'none', got norm='batch'.
    """
    checks.one_of("group", "none", norm=norm)
    checks.whole(1, groups=groups, remedy=f"give a divisor of {channels}")
    if channels % groups:
        raise ValueError(f"Expected groups to divide {channels}, got groups={groups}.")
    return (lambda x: GroupNorm(groups)(x)) if norm == "group" else lambda x: x
