"""The settings and the seeds of populations and sweeps, and the names of their members in messages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim import checks, rng

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

    Raises:
      ValueError: a seed is no whole number or occurs twice, or there is none.

    >>> listed_seeds(3), listed_seeds([7, 1])
    ([0, 1, 2], [7, 1])
    """
    if not isinstance(seeds, Sequence | np.ndarray | range):
        checks.whole(1, seeds=seeds, remedy="give a number of seeds, or a sequence of seeds")
        return list(range(first, first + int(seeds)))
    try:
        listed = [operator.index(seed) for seed in seeds]
    except TypeError:
        raise ValueError(f"Expected whole numbers as seeds, got seeds={list(seeds)}: give ints, such as [0, 1].") from None
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


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from which the values of a random search are drawn.

    Attributes:
      low, high: the ends, with low < high; above 0 if ``logarithmic``, whole if ``whole``.
      logarithmic: whether the logarithm is uniform, instead of the number.
      whole: whether the numbers are whole.

    Raises:
      ValueError: ``low`` is not below ``high``; a bound of a logarithmic range is not positive, or one of whole numbers has a
        fraction.

    >>> Range.read("log_uniform(0.001, 1)", whole=False)
    Range(low=0.001, high=1.0, logarithmic=True, whole=False)
    """

    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        checks.number(low=self.low, high=self.high)
        if not self.low < self.high or (self.logarithmic and self.low <= 0):
            wanted = "0 < low < high" if self.logarithmic else "low < high"
            raise ValueError(f"Expected {wanted}, got low={self.low:g}, high={self.high:g}: write log_uniform(0.001, 1).")
        if self.whole and (self.low % 1 or self.high % 1):
            raise ValueError(f"Expected whole numbers, got low={self.low:g}, high={self.high:g}: write uniform(4, 9).")

    @classmethod
    def read(cls, text: str, *, whole: bool) -> Range | None:
        """Returns the range in a text such as ``uniform(0, 1)`` or ``log_uniform(0.001, 1)``; None if it is no range."""
        found = re.fullmatch(r"(log_)?uniform\(\s*([^,\s]+)\s*,\s*([^,\s]+)\s*\)", text.strip())
        if found is None:
            return None
        try:
            low, high = float(found[2]), float(found[3])
        except ValueError:
            raise ValueError(f"Expected two numbers, got {text!r}: write log_uniform(0.001, 1).") from None
        return cls(low, high, bool(found[1]), whole)

    def value(self, share: float) -> float | int:
        """Returns the number at a share in [0, 1) of the range, to four digits."""
        high = self.high + self.whole  # Whole numbers are rounded down, and `high` is one of them.
        number = self.low * (high / self.low) ** share if self.logarithmic else self.low + (high - self.low) * share
        return math.floor(number) if self.whole else min(max(float(f"{number:.4g}"), self.low), self.high)


def drawn_settings(varied: Mapping[str, Sequence[Any] | Range], samples: int, seed: int) -> list[dict[str, Any]]:
    """Returns different settings for a random search, each with a value of every name, from its range or its sequence.

    The first settings of a larger number are those of a smaller one.

    Args:
      varied: the values of each name.
      samples: the number of settings.
      seed: the same seed gives the same settings.

    Raises:
      ValueError: there are fewer different settings.

    >>> drawn_settings({"rate": Range(0.001, 1.0, logarithmic=True), "clients": [5, 10]}, samples=2, seed=0)
    [{'rate': 0.002392, 'clients': 5}, {'rate': 0.001574, 'clients': 10}]
    """
    checks.whole(1, samples=samples)
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "samples")))
    settings: list[dict[str, Any]] = []
    for position in range(100 * samples):
        shares = rng.generator(words, position).random(len(varied))
        setting = {
            name: values.value(share) if isinstance(values, Range) else values[int(share * len(values))]
            for (name, values), share in zip(varied.items(), shares, strict=True)
        }
        settings += [setting] if setting not in settings else []
        if len(settings) == samples:
            return settings
    raise ValueError(
        f"Expected at most as many samples as there are different settings, got samples={samples}, of which only "
        f"{len(settings)} differ: leave samples out, which runs all of them."
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
