"""What compiled programs depend on in an algorithm, and which of the algorithm's numbers are arguments of them."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import types
from collections.abc import Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
Numbers = dict[str, Any]

# Fields of an algorithm that programs do not depend on.
_NOT_COMPILED = {"execution", "nonfinite"}

# Libraries whose functions use no global variables that change.
_CONSTANT_LIBRARIES = {"fedsim", "jax", "numpy", "optax", "haiku", "functools", "dataclasses", "typing", "builtins"}


def kept_with(owner: Any) -> dict[str, Any]:
    """Returns a dict, stored with the algorithm, for values that execution derives from it."""
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


class Structure:
    """Everything in an algorithm except its numbers. Algorithms with equal structures share programs.

    Args:
      algorithm: the algorithm to run.
      numbers: numbers that are also compared, because the algorithm's code needs their values.
    """

    def __init__(self, algorithm: Any, numbers: Numbers | None = None) -> None:
        left_out = _NOT_COMPILED | numbers_of(algorithm).keys()
        others = {name: value for name, value in _attributes(algorithm).items() if name not in left_out}
        self.algorithm = algorithm
        self._key = type(algorithm), _globals_of_methods(type(algorithm)), _described(others), _described(numbers or {})
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key


def form_of(a: Any) -> Hashable:
    """Returns the structure of a pytree, and the shapes and dtypes of its leaves.

    >>> form_of({"w": np.zeros(2)}) == form_of({"w": np.ones(2)})
    True
    """
    leaves, structure = jax.tree.flatten(a)
    # The dtype of a Python number is weak, so its type counts, too.
    return structure, tuple((np.shape(leaf), jnp.result_type(leaf), isinstance(leaf, float)) for leaf in leaves)


class _ByIdentity:
    """Compares a value by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value


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


def _described(value: Any) -> Hashable:
    """Returns a value that is equal for objects that compile to equal programs.

    Dataclasses, namespaces and containers are compared by their current contents, other objects by identity.
    """
    if isinstance(value, types.SimpleNamespace | argparse.Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return type(value), _described(_attributes(value))
    if isinstance(value, dict):
        return type(value), tuple((name, _described(held)) for name, held in value.items()), _attributes_of_container(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_described, value)), _attributes_of_container(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return np.ndarray, value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, types.FunctionType):
        if value.__globals__.get("__name__", "").startswith("optax."):
            # So that ``optax.sgd(0.1)`` equals ``optax.sgd(0.1)``.
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, _described([held, value.__defaults__, value.__kwdefaults__])
        return _ByIdentity(value), _globals_of([value])
    try:
        hash(value)
    except TypeError:
        return _ByIdentity(value)
    return type(value), value


def _attributes_of_container(value: Any) -> Hashable:
    return _described(vars(value)) if getattr(value, "__dict__", None) else ()


def _globals_of_methods(cls: type) -> Hashable:
    """Describes the global variables that the methods and properties of a class use."""
    held = [value for base in cls.__mro__ for value in vars(base).values()]
    inner = [getattr(value, name, None) for value in held for name in ("__func__", "fget", "func")]
    return _globals_of([value for value in [*held, *inner] if isinstance(value, types.FunctionType)])


def _globals_of(functions: list[types.FunctionType]) -> Hashable:
    """Describes the global variables that functions use, directly or in global functions that they call.

    These may change between two algorithms, for example in a notebook. Those of fedsim and of other libraries do not change.
    """
    found: dict[tuple[str, str], Hashable] = {}
    pending, seen = list(functions), set()
    while pending:
        function = pending.pop()
        module = function.__globals__.get("__name__", "")
        if function in seen or module.partition(".")[0] in _CONSTANT_LIBRARIES:
            continue
        seen.add(function)
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                found[module, name] = _ByIdentity(value)
                pending.append(value)
            elif value is not None and not isinstance(value, types.ModuleType | type):
                found[module, name] = _described(value)
    return tuple(sorted(found.items(), key=lambda item: item[0]))


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names of the global variables that code and the functions inside it read."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return names.union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))
