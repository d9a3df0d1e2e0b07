"""The normalizations of networks by name, so that one argument of a model chooses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from fedsim import checks
from fedsim.models._batch_norm import BatchNorm
from fedsim.models._group_norm import GroupNorm

Norm = Literal["group", "batch", "none"]


def normalization(norm: Norm, groups: int, channels: int) -> Callable[[jax.Array, bool], jax.Array]:
    """Returns the function that normalizes ``float [n, ..., c]`` and has parameters of its own wherever it is called.

    Its second argument is whether the network is trained, which batch normalization needs.

    Args:
      norm: "group" for group normalization, "batch" for batch normalization (`BatchNorm`), "none" for none.
      groups: the number of groups.
      channels: a divisor of the numbers of channels that are normalized.

    Raises:
      ValueError: ``norm`` is another name, or ``groups`` is not a divisor of ``channels``.

    >>> normalization("layer", 2, 16)
    Traceback (most recent call last):
    ...
    ValueError: Expected norm to be 'batch', 'group' or 'none', got norm='layer'.
    """
    checks.one_of("batch", "group", "none", norm=norm)
    checks.whole(1, groups=groups, remedy=f"give a divisor of {channels}")
    if channels % groups:
        raise ValueError(f"Expected groups to divide {channels}, got groups={groups}.")
    if norm == "batch":
        return lambda x, training: BatchNorm()(x, training)
    return (lambda x, training: GroupNorm(groups)(x)) if norm == "group" else lambda x, training: x
