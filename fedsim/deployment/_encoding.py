"""Arrays as bytes: what the server and the nodes send each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MAGIC = b"fedsim message 1\n"
_LENGTH = 8


def encode(arrays: Sequence[Any], facts: Mapping[str, Any]) -> bytes:
    """Encodes arrays, and facts about them.

    Args:
      arrays: arrays of any dtype that JAX has, ``bfloat16`` for example, and arrays of PRNG keys.
      facts: what JSON can express.

    Returns:
      A line that names the format, a JSON object, and the bytes of the arrays, one after another.

    >>> message = encode([jnp.array([0.5, 2.0], jnp.bfloat16), jax.random.key(3)], {"round": 7})
    >>> (numbers, key), facts = decode(message)
    >>> numbers.dtype.name, numbers.tolist(), bool(key == jax.random.key(3)), facts
    ('bfloat16', [0.5, 2.0], True, {'round': 7})
    """
    described, parts = [], []
    for array in arrays:
        kind = None
        if jnp.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key):
            kind, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
        value = np.asarray(array)
        described.append({"dtype": value.dtype.name, "shape": value.shape, "key": kind})
        parts.append(np.ascontiguousarray(value).tobytes())
    header = json.dumps({"arrays": described, "facts": dict(facts)}).encode()
    return b"".join([_MAGIC, len(header).to_bytes(_LENGTH, "little"), header, *parts])


def decode(message: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arrays, of NumPy or of PRNG keys, and the facts of a message.

    Raises:
      ValueError: it has another format, or is incomplete.

    >>> arrays, facts = decode(encode([np.array([1, 2])], {"round": 7}))
    >>> arrays[0].tolist(), facts
    ([1, 2], {'round': 7})
    """
    try:
        if not message.startswith(_MAGIC):
            raise ValueError("it does not begin as one")
        at = len(_MAGIC) + _LENGTH
        end = at + int.from_bytes(message[len(_MAGIC) : at], "little")
        header, arrays = json.loads(message[at:end]), []
        for described in header["arrays"]:
            dtype, shape = jnp.dtype(described["dtype"]), tuple(described["shape"])
            count = int(np.prod(shape, dtype=np.int64))
            value: Any = np.frombuffer(message, dtype, count, offset=end).reshape(shape)
            end += count * dtype.itemsize
            arrays.append(value if described["key"] is None else jax.random.wrap_key_data(value, impl=described["key"]))
        if end != len(message):
            raise ValueError(f"it has {len(message) - end} more bytes than it says")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a message of fedsim, got {len(message)} bytes that are none ({error}): use the same version of fedsim "
            "at the server and at all nodes."
        ) from error
    return arrays, header["facts"]
