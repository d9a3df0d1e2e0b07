"""Which numbers of an algorithm are arguments of its programs, and what else is stored with an algorithm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
# The numbers of an algorithm by the names of their fields: floats and JAX arrays, traced or not.
Numbers = dict[str, Any]

# Fields of an algorithm that are not read in its rounds.
_NOT_COMPILED = {"execution", "nonfinite"}


def kept_with(owner: Any) -> dict[str, Any]:
    """Returns a dict, stored with the algorithm, for values that are derived from it. Copies by `with_numbers` do not have it.

    Args:
      owner: the algorithm.

    Raises:
      TypeError: the object has no ``__dict__`` to store the dict in.

    >>> class Proximal: ...
    >>> algorithm = Proximal()
    >>> kept_with(algorithm)["checked"] = True
    >>> kept_with(algorithm), kept_with(with_numbers(algorithm, {}))
    ({'checked': True}, {})
    """
    return vars(owner).setdefault("_execution", {})


def numbers_of(algorithm: Any) -> Numbers:
    """Returns the floats and JAX arrays in an algorithm's fields, by field. Integers, which often are sizes, are constants.

    >>> from fedsim.data import Batches
    >>> @dataclasses.dataclass
    ... class Proximal:
    ...     mu: float
    ...     batches: Batches
    >>> numbers_of(Proximal(0.1, Batches(size=20)))
    {'mu': 0.1}
    """
    numbers: Numbers = {}
    for field in dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ():
        value = getattr(algorithm, field.name, None)
        if field.init and field.name not in _NOT_COMPILED and not isinstance(value, bool):
            if isinstance(value, float) or (isinstance(value, int) and field.type in ("float", float)):
                numbers[field.name] = float(value)
            elif isinstance(value, jax.Array):
                numbers[field.name] = value
    return numbers


def with_numbers(algorithm: T, numbers: Numbers) -> T:
    """Returns a copy of an algorithm with these numbers, traced or not. ``__post_init__`` does not run again.

    >>> @dataclasses.dataclass
    ... class Proximal:
    ...     mu: float
    >>> with_numbers(Proximal(0.1), {"mu": 0.5})
    Proximal(mu=0.5)
    """
    copy = object.__new__(type(algorithm))
    for name, value in {**_attributes(algorithm), **numbers}.items():
        object.__setattr__(copy, name, value)
    return copy


class Made:
    """An algorithm that is made from numbers inside every trace, so that the numbers can be arguments of its programs.

    Args:
      make: returns the algorithm, ``make(**numbers)``, for traced numbers, too.

    >>> class Constant:
    ...     def __init__(self, value): self.value = value
    >>> with_numbers(Made(Constant), {"numbers": {"value": 0.5}}).value
    0.5
    """

    numbers: Mapping[str, Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    @functools.cached_property
    def made(self) -> Any:
        """The algorithm that is made from ``numbers``. Its attributes are those of this object, too."""
        return self.make(**self.numbers)

    def __getattr__(self, name: str) -> Any:
        if name in ("numbers", "make", "made"):  # missing in a copy that is not complete, or ``make`` raised AttributeError
            raise AttributeError(name)
        return getattr(self.made, name)


def form_of(a: Any) -> Hashable:
    """Returns the structure of a pytree, and the shapes and dtypes of its leaves.

    >>> form_of({"w": np.zeros(2)}) == form_of({"w": np.ones(2)})
    True
    """
    leaves, structure = jax.tree.flatten(a)
    # The dtype of a Python number is weak, so its type counts, too.
    return structure, tuple((np.shape(leaf), jnp.result_type(leaf), isinstance(leaf, float)) for leaf in leaves)


def _attributes(algorithm: Any) -> dict[str, Any]:
    """Returns all attributes of an object except derived ones: cached properties and those of `kept_with`."""
    cached = {
        name
        for cls in type(algorithm).__mro__
        for name, value in vars(cls).items()
        if isinstance(value, functools.cached_property)
    }
    fields = [field.name for field in dataclasses.fields(algorithm)] if dataclasses.is_dataclass(algorithm) else []
    held = {name: getattr(algorithm, name) for name in fields if hasattr(algorithm, name)}  # also those of ``slots=True``
    values = held | getattr(algorithm, "__dict__", {})
    return {name: value for name, value in values.items() if name != "_execution" and name not in cached}


def are_alike(a: Any, b: Any) -> bool:
    """Returns whether two objects were made of equal parts: dataclasses and containers have equal contents.

    Arrays are equal if all of their entries are, and other objects, such as functions, if they are the same object.

    >>> from fedsim.data import Batches
    >>> are_alike([Batches(size=2), np.zeros(3)], [Batches(size=2), np.zeros(3)]), are_alike({"f": len}, {"f": max})
    (True, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return are_alike(_attributes(a), _attributes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_alike(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(are_alike, a, b))
    if isinstance(a, np.ndarray | jax.Array):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    return isinstance(a, str | bytes | int | float | complex | frozenset | set) and a == b
