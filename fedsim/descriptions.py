"""Texts of values that are equal in every process if the values are equal, by which runs and states are compared."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

SIMPLE = float | int | str | bool | None
# Arrays with more elements are represented by a hash.
_MAX_ELEMENTS = 8


def text_of(value: Any, opaque: tuple[type, ...] = ()) -> str | None:
    """Returns the text of a value; None for functions, and for objects that consist of functions.

    Args:
      value: a number, a text, an array, a dataclass, or a list, tuple or dict of them.
      opaque: classes whose instances have no text.

    >>> text_of({"rate": 0.5, "sizes": np.arange(3)}), text_of(print)
    ("(('rate', 0.5), ('sizes', int64 [0, 1, 2]))", None)
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, SIMPLE):
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray):
        return _array_text(value)
    if type(value) in (dict, types.MappingProxyType):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        texts = [text_of(element, opaque) for element in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, *opaque)):
        return None
    return call_text(type(value), {name: text_of(field, opaque) for name, field in fields_of(value).items()})


def fields_of(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are set.

    >>> from fedsim.systems import LogNormal
    >>> fields_of(LogNormal(sigma=2.0))
    {'sigma': 2.0, 'median': 1.0}
    """
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if hasattr(record, field.name)}


def call_text(cls: type, texts: Mapping[str, str | None]) -> str:
    """Returns the text of a call of a class with these texts of its arguments, without those that have none.

    >>> call_text(dict, {"a": "1", "b": None})
    'dict(a=1)'
    """
    return f"{cls.__name__}({', '.join(f'{name}={text}' for name, text in texts.items() if text is not None)})"


def hash_of(*values: bytes) -> str:
    """Returns the first 16 hexadecimal digits of a SHA-256 hash.

    >>> hash_of(b"a"), hash_of(b"a", b"b") == hash_of(b"ab")
    ('ca978112ca1bbdca', False)
    """
    return hashlib.sha256(b"\0\0".join(values)).hexdigest()[:16]


def _array_text(value: Any) -> str | None:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        return None
    values = array.tolist() if array.size <= _MAX_ELEMENTS else f"{list(array.shape)} (hash {hash_of(array.tobytes())})"
    return f"{array.dtype} {values}"
