"""Looking things up by name, with a hint when there is no such thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    """``known[name]``.

    Raises:
      ValueError: there is no such name; the message has the nearest ones.

    >>> look_up("model", "emnist_cn", {"emnist_cnn": 1, "logistic": 2})
    Traceback (most recent call last):
    ...
    ValueError: There is no model 'emnist_cn'. Did you mean 'emnist_cnn'?
    """
    if name not in known:
        hint = did_you_mean(name, known) or f" There are {', '.join(sorted(known))}."
        raise ValueError(f"There is no {kind} {name!r}.{hint}")
    return known[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence, with a space before it, that names the nearest; empty if nothing is near.

    >>> did_you_mean("fedporx", ["fedprox", "fedavg"])
    " Did you mean 'fedprox'?"
    """
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
