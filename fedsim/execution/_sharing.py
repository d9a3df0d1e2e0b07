"""Programs that are shared by algorithms whose numbers are inside other objects, such as the learning rate of `optax.sgd`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from fedsim.execution._programs import _cache_of
from fedsim.execution._structure import Structure, kept_with


class Made:
    """An algorithm that is made from numbers inside every trace, so that the numbers can be arguments of its programs.

    Args:
      make: returns the algorithm, ``make(**numbers)``, for traced numbers, too.

    >>> class Constant:
    ...     def __init__(self, value): self.value = value
    >>> from fedsim.execution._structure import with_numbers
    >>> with_numbers(Made(Constant), {"numbers": {"value": 0.5}}).value
    0.5
    """

    numbers: Mapping[str, Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    @functools.cached_property
    def made(self) -> Any:
        return self.make(**self.numbers)

    def __getattr__(self, name: str) -> Any:
        if name in ("numbers", "make", "made"):  # missing in a copy that is not complete, or ``make`` raised AttributeError
            raise AttributeError(name)
        return getattr(self.made, name)


def share_programs(algorithm: Any, make: Callable[..., Any], numbers: Mapping[str, Any]) -> None:
    """Makes an algorithm use programs whose arguments are ``numbers``.

    Algorithms for which ``make`` is equal and the numbers have the same names share programs. If the code of ``make`` or of the
    algorithm needs the value of a number, the algorithm gets its own programs, see `programs_for`.

    Args:
      algorithm: the algorithm ``make(**numbers)``.
      make: a function, which is compared by identity and by the global variables that it reads, or a callable dataclass, which
        is compared by its contents.
      numbers: floats and JAX arrays by name.
    """
    kept_with(algorithm)["programs"] = _cache_of(Structure(Made(make))), {"numbers": dict(numbers)}
