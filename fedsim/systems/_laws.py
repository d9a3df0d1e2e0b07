"""Laws of positive numbers: speeds of devices, durations of recoveries, delays of messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from fedsim import checks


@dataclasses.dataclass(frozen=True)
class Law:
    """Base class of laws of numbers that are not negative. A plain float is accepted wherever a law is.

    Attributes:
      least: the largest number that no draw is below; 0 unless the law says otherwise.
    """

    least: ClassVar[float] = 0.0

    @property
    def mean(self) -> float:
        """The expectation of a draw."""
        raise NotImplementedError

    def draw(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Returns independent draws, ``float64 [size]``."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Constant(Law):
    """The same number in every draw.

    Attributes:
      value: the number, at least 0; infinity is allowed, for rates.

    Raises:
      ValueError: ``value`` is negative or not a number.

    >>> Constant(2.5).draw(np.random.default_rng(0), 2)
    array([2.5, 2.5])
    """

    value: float

    def __post_init__(self) -> None:
        if self.value != math.inf:
            checks.number(least=0, value=self.value)

    @property
    def least(self) -> float:  # type: ignore[override]
        """The number itself."""
        return self.value

    @property
    def mean(self) -> float:
        """The number itself."""
        return self.value

    def draw(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Returns the number ``size`` times; draws nothing."""
        return np.full(size, self.value, np.float64)


@dataclasses.dataclass(frozen=True)
class LogNormal(Law):
    """The exponential of a normal number: exp(log(median) + sigma z).

    Attributes:
      sigma: the standard deviation of the logarithm; 0 gives the median in every draw.
      median: the median, above 0.

    Raises:
      ValueError: ``sigma`` is negative, or ``median`` not positive.

    >>> round(LogNormal(sigma=1.0).mean, 5)  # exp(1 / 2)
    1.64872
    """

    sigma: float = 1.0
    median: float = 1.0

    def __post_init__(self) -> None:
        checks.number(least=0, sigma=self.sigma)
        checks.positive(median=self.median)

    @property
    def mean(self) -> float:
        """median exp(sigma^2 / 2)."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Returns independent draws, ``float64 [size]``."""
        return self.median * np.exp(self.sigma * generator.standard_normal(size))


@dataclasses.dataclass(frozen=True)
class HalfNormal(Law):
    """The absolute value of a normal number of mean 0, the durations of FLSim's and FedBuff's experiments.

    Attributes:
      scale: the standard deviation of the normal number, above 0.

    Raises:
      ValueError: ``scale`` is not positive.

    >>> round(HalfNormal().mean, 6)  # sqrt(2 / pi)
    0.797885
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    @property
    def mean(self) -> float:
        """scale sqrt(2 / pi)."""
        return self.scale * math.sqrt(2 / math.pi)

    def draw(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Returns independent draws, ``float64 [size]``."""
        return self.scale * np.abs(generator.standard_normal(size))


@dataclasses.dataclass(frozen=True)
class Exponential(Law):
    """The exponential law.

    Attributes:
      mean: the expectation, above 0.

    Raises:
      ValueError: ``mean`` is not positive.

    >>> Exponential(2.0).draw(np.random.default_rng(0), 3).shape
    (3,)
    """

    mean: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(mean=self.mean)

    def draw(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Returns independent draws, ``float64 [size]``."""
        return self.mean * generator.standard_exponential(size)


def as_law(name: str, value: Law | float) -> Law:
    """Returns a law as it is, and a number of at least 0 as a `Constant`.

    Raises:
      ValueError: ``value`` is neither; the message calls it ``name``.

    >>> as_law("latency", 0.5)
    Constant(value=0.5)
    """
    if isinstance(value, Law):
        return value
    if value != math.inf:
        named: dict[str, Any] = {name: value}
        checks.number(least=0, remedy="give a number, or a law such as fedsim.systems.LogNormal(sigma=1.0)", **named)
    return Constant(float(value))
