"""The settings and the seeds of populations and sweeps, and the names of their members in messages."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim import checks

Setting = Mapping[str, Any]


def listed_settings(settings: Mapping[str, Sequence[Any]] | Sequence[Setting]) -> list[dict[str, Any]]:
    """Returns one dict per setting: the given ones, or all combinations of the values of a mapping.

    Raises:
      ValueError: there is no setting, or two settings have different names or are equal.

    >>> listed_settings({"rate": [0.1, 1.0], "mu": [0.0]})
    [{'rate': 0.1, 'mu': 0.0}, {'rate': 1.0, 'mu': 0.0}]
    """
    if isinstance(settings, Mapping):
        for name, values in settings.items():
            if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray | jax.Array) or not np.ndim(values):
                raise ValueError(
                    f"Expected settings to map each name to a sequence of values, got {name}={values!r}: give {name}=[...]."
                )
        listed = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    else:
        listed = [dict(setting) for setting in settings]
    if not listed:
        raise ValueError("Expected at least one setting, got none: give a mapping of arguments of make_algorithm.")
    for i, setting in enumerate(listed):
        if setting.keys() != listed[0].keys():
            raise ValueError(
                f"Expected all settings to have the names {sorted(listed[0])}, got {sorted(setting)} in setting {i}: give "
                "every name a value in every setting."
            )
        if setting in listed[:i]:
            raise ValueError(f"Expected different settings, got {shown(setting)} twice: leave one out.")
    return listed


def listed_seeds(seeds: int | Sequence[int], first: int = 0) -> list[int]:
    """Returns the seeds; a number n means n seeds from ``first`` on.

    >>> listed_seeds(3), listed_seeds([7, 1])
    ([0, 1, 2], [7, 1])
    """
    if not isinstance(seeds, Sequence | np.ndarray | range):
        checks.whole(1, seeds=seeds, remedy="give a number of seeds, or a sequence of seeds")
        return list(range(first, first + int(seeds)))
    listed = [int(seed) for seed in seeds]
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"Expected different seeds, at least one, got seeds={list(seeds)}: give every seed once.")
    return listed


def shown(setting: Setting) -> str:
    """Returns a setting as it appears in messages.

    >>> shown({"rate": 0.1, "clients": 3})
    'rate=0.1, clients=3'
    """
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in setting.items()
    )


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Adds the name of a member to warnings, and to the messages of ``ValueError`` and ``FloatingPointError``.

    >>> with named("seed=1"):
    ...     raise ValueError("no data")
    Traceback (most recent call last):
    ...
    ValueError: seed=1: no data
    """
    # With this context, Python forgets which warnings it has shown, so that an equal one of another member is shown, too.
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_with_name(message: Any, *arguments: Any, **keywords: Any) -> None:
            show(f"{name}: {message}", *arguments, **keywords)

        warnings.showwarning = show_with_name
        try:
            yield
        except (ValueError, FloatingPointError) as error:
            kind = ValueError if isinstance(error, ValueError) else FloatingPointError
            raise kind(f"{name}: {error}") from error
        finally:
            warnings.showwarning = show
