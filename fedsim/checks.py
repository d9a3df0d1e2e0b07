"""Checks of arguments: their types and ranges, with an error that names the argument, its value and a remedy.

Every function takes the values to check by name, raises ``ValueError`` for the first invalid one, and returns nothing. With
``or_none``, None is valid as well. ``remedy`` replaces the end of the error message.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import jax
import numpy as np
import optax


def number(
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    or_none: bool = False,
    remedy: str = "",
    **values: Any,
) -> None:
    """Checks for finite numbers within bounds; ``above`` and ``below`` are exclusive, ``least`` and ``most`` inclusive.

    >>> number(least=0, below=1, momentum=0.9, b1=1.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= b1 < 1, got b1=1.0.
    >>> number(least=0, mu=float("inf"))
    Traceback (most recent call last):
    ...
    ValueError: Expected mu >= 0 and finite, got mu=inf.
    """
    for name, value in values.items():
        if isinstance(value, jax.core.Tracer):  # The value is unknown inside `jax.grad` and `jax.jit`.
            continue
        if (value is None and or_none) or _in_range(_as_number(value), above, least, below, most):
            continue
        left = f"{above} < " if above is not None else f"{least} <= " if least is not None else ""
        right = f" < {below}" if below is not None else f" <= {most}" if most is not None else ""
        if left and not right:
            wanted = f"{name} > {above} and finite" if above is not None else f"{name} >= {least} and finite"
        else:
            wanted = f"{left}{name}{right}" if right else f"{name} to be finite"
        _refuse(name, value, wanted, or_none, remedy or ("" if _as_number(value) is not None else "give a number"))


def positive(*, or_none: bool = False, remedy: str = "", **values: Any) -> None:
    """Checks for finite numbers above 0.

    >>> positive(tau=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected tau > 0 and finite, got tau=0.0.
    """
    number(above=0, or_none=or_none, remedy=remedy, **values)


def whole(least: int, most: int | None = None, /, *, or_none: bool = False, remedy: str = "", **values: Any) -> None:
    """Checks for whole numbers from ``least`` to ``most``, both inclusive.

    >>> whole(1, hidden=3, layers=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected layers >= 1, got layers=0: give a positive whole number.
    >>> whole(1, 16, bits=2.5)
    Traceback (most recent call last):
    ...
    ValueError: Expected 1 <= bits <= 16, got bits=2.5: give a whole number.
    """
    for name, value in values.items():
        if (value is None and or_none) or _in_range(_as_whole(value), None, least, None, most):
            continue
        wanted = f"{name} >= {least}" if most is None else f"{least} <= {name} <= {most}"
        kind = "a positive whole number" if least == 1 and most is None else "a whole number"
        _refuse(name, value, wanted, or_none, remedy or f"give {kind}")


def one_of(*choices: Any, remedy: str = "", **values: Any) -> None:
    """Checks for values that are among ``choices``.

    >>> one_of("I", "II", option="III")
    Traceback (most recent call last):
    ...
    ValueError: Expected option to be 'I' or 'II', got option='III'.
    """
    for name, value in values.items():
        if not (isinstance(value, type(choices[0])) and value in choices):
            *first, last = map(repr, choices)
            _refuse(name, value, f"{name} to be {', '.join(first)}{' or ' * bool(first)}{last}", False, remedy)


def truth(**values: Any) -> None:
    """Checks for True or False; values that are merely truthy or falsy are invalid.

    >>> truth(unbiased="no")
    Traceback (most recent call last):
    ...
    ValueError: Expected unbiased to be True or False, got unbiased='no'.
    """
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            _refuse(name, value, f"{name} to be True or False", False, "")


def instance(kind: type, example: str, *, or_none: bool = False, **values: Any) -> None:
    """Checks for instances of a class; the error message shows ``example``, a way to construct one.

    >>> instance(Exception, "ValueError()", cause="bad luck")
    Traceback (most recent call last):
    ...
    ValueError: Expected cause to be an instance of Exception, such as ValueError(), got cause='bad luck'.
    """
    for name, value in values.items():
        if not isinstance(value, kind) and not (value is None and or_none):
            _refuse(name, value, f"{name} to be an instance of {kind.__name__}, such as {example}", or_none, "")


def unmasked(**values: Any) -> None:
    """Checks for arrays without masked values, which `numpy.asarray` would replace by whatever is stored under the mask.

    >>> unmasked(labels=np.ma.masked_equal([1, -9, 2], -9))
    Traceback (most recent call last):
    ...
    ValueError: Expected labels without masked values, got 1 of 3 masked: fill them (numpy.ma.filled), or leave out their rows.
    """
    for name, value in values.items():
        if np.ma.is_masked(value):
            raise ValueError(
                f"Expected {name} without masked values, got {np.ma.count_masked(value)} of {np.size(value)} masked: fill them "
                "(numpy.ma.filled), or leave out their rows."
            )


def optimizer(*, or_schedule: bool = False, **values: Any) -> None:
    """Checks for optax transformations or, with ``or_schedule``, functions from the round to a transformation.

    An optax factory such as `optax.sgd` itself, without its arguments, is invalid.

    >>> import optax
    >>> optimizer(or_schedule=True, client_optimizer=lambda round: optax.sgd(0.1 * 0.99**round))
    >>> optimizer(or_schedule=True, client_optimizer=optax.sgd)
    Traceback (most recent call last):
    ...
    ValueError: Expected client_optimizer to be an optax transformation, got client_optimizer=optax.sgd: call it, ...
    """
    for name, value in values.items():
        if isinstance(value, optax.GradientTransformation):
            continue
        wanted, factory = f"{name} to be an optax transformation", getattr(value, "func", value)
        if hasattr(value, "gradient_transformation"):
            raise ValueError(f"Expected {wanted}, got {type(value).__name__}: give its gradient_transformation().")
        if callable(factory) and str(getattr(factory, "__module__", "")).partition(".")[0] == "optax":
            reference = f"optax.{factory.__name__}"
            raise ValueError(f"Expected {wanted}, got {name}={reference}: call it, as in {reference}(0.1).")
        if not (or_schedule and callable(value)):
            _refuse(
                name,
                value,
                f"{wanted}{', or a function from the round to one' * or_schedule}",
                False,
                "give optax.sgd(0.1), for example",
            )


def _refuse(name: str, value: Any, wanted: str, or_none: bool, remedy: str) -> None:
    shown = f"{value}" if isinstance(value, numbers.Number) else f"{value!r}"
    raise ValueError(f"Expected {wanted}{', or None' if or_none else ''}, got {name}={shown}{': ' if remedy else ''}{remedy}.")


def _in_range(value: float | None, above: float | None, least: float | None, below: float | None, most: float | None) -> bool:
    if value is None or value != value or abs(value) == math.inf:
        return False
    if (above is not None and value <= above) or (least is not None and value < least):
        return False
    return not ((below is not None and value >= below) or (most is not None and value > most))


def _as_number(value: Any) -> float | None:
    """Returns a Python, NumPy or JAX number as a float, and None for anything else, such as bools and strings."""
    scalar = getattr(getattr(value, "dtype", None), "kind", "") in "iuf" and getattr(value, "shape", None) == ()
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or scalar):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _as_whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None
