"""Weights of stale updates. Staleness is the number of server steps between the dispatch and the aggregation of an update.

C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization", 2019, https://arxiv.org/abs/1903.03934, section 5.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from fedsim import checks
from fedsim.names import make

StalenessWeight = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ConstantWeight:
    """The weight 1, whatever the staleness.

    >>> ConstantWeight()(np.array([0, 3]))
    array([1., 1.])
    """

    def __call__(self, staleness: np.ndarray) -> np.ndarray:
        """Returns the weight for each staleness, ``float64 [n]``."""
        return np.ones(len(staleness))


@dataclasses.dataclass(frozen=True)
class PolynomialWeight:
    """The weight (1 + staleness)^-a.

    Attributes:
      a: the exponent, at least 0.

    Raises:
      ValueError: ``a`` is negative.

    >>> PolynomialWeight(0.5)(np.array([0, 3]))
    array([1. , 0.5])
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        checks.number(least=0, a=self.a, remedy="with a negative exponent, stale updates would count more than fresh ones")

    def __call__(self, staleness: np.ndarray) -> np.ndarray:
        """Returns the weight for each staleness, ``float64 [n]``."""
        return (1.0 + staleness) ** -self.a


@dataclasses.dataclass(frozen=True)
class HingeWeight:
    """The weight 1 up to a staleness of b, and 1 / (a (staleness - b) + 1) beyond.

    Attributes:
      a: how fast the weight decreases, at least 0.
      b: the largest staleness of weight 1, at least 0.

    Raises:
      ValueError: ``a`` or ``b`` is negative.

    >>> HingeWeight(a=10.0, b=4.0)(np.array([4, 5]))
    array([1.        , 0.09090909])
    """

    a: float = 10.0
    b: float = 4.0

    def __post_init__(self) -> None:
        checks.number(least=0, a=self.a, b=self.b)

    def __call__(self, staleness: np.ndarray) -> np.ndarray:
        """Returns the weight for each staleness, ``float64 [n]``."""
        return 1.0 / (self.a * np.maximum(staleness - self.b, 0.0) + 1.0)


STALENESS_WEIGHTS: dict[str, Callable[..., StalenessWeight]] = {
    "constant": ConstantWeight,
    "polynomial": PolynomialWeight,
    "hinge": HingeWeight,
}


def as_staleness_weight(value: StalenessWeight | str) -> StalenessWeight:
    """Returns a function as it is, and the function that a text names, such as ``"hinge(a=10, b=4)"``.

    Raises:
      ValueError: it is neither, or there is no such name.

    >>> as_staleness_weight("polynomial(a=1.0)")
    PolynomialWeight(a=1.0)
    """
    if isinstance(value, str):
        return make("staleness weight", value, STALENESS_WEIGHTS, Callable)
    if not callable(value):
        raise ValueError(
            "Expected staleness_weight to be a function of an array of stalenesses, such as PolynomialWeight(0.5), or its "
            f"name, such as 'hinge(a=10, b=4)', got staleness_weight={value!r}."
        )
    return value
