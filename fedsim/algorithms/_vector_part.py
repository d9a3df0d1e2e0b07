"""A part of a vector as a message: some of its values, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Part(NamedTuple):
    """Values of a vector, ``[k]``, and their places: ceil(log2 size) bits each, one after another, in whole bytes ``uint8``.

    A whole vector needs no places.

    >>> vector = jnp.arange(10, 20)
    >>> part = Part.of(vector, jnp.array([7, 2, 0]))
    >>> part.values.tolist(), part.places.size, part.put_into(jnp.zeros_like(vector)).tolist()
    ([17, 12, 10], 2, [10, 0, 12, 0, 0, 0, 0, 17, 0, 0])
    """

    values: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, vector: jax.Array, places: jax.Array | None = None) -> Part:
        """The values at these places, ``int32 [k]``; None: all."""
        if places is None:
            return cls(vector, jnp.zeros(0, jnp.uint8))
        bits = (places[:, None] >> jnp.arange(bits_of_place(vector.size))[None]) & 1
        return cls(vector[places], jnp.packbits(bits.ravel().astype(jnp.uint8)))

    def where(self, size: int) -> jax.Array:
        """The places in a vector of this size, ``int32 [k]``."""
        width = bits_of_place(size)
        if len(self.values) == size and not self.places.size:
            return jnp.arange(size)
        bits = jnp.unpackbits(self.places, count=len(self.values) * width).reshape(-1, width).astype(jnp.int32)
        return jnp.sum(bits << jnp.arange(width)[None], axis=1, dtype=jnp.int32)

    def put_into(self, vector: jax.Array) -> jax.Array:
        """The vector with these values in their places."""
        return vector.at[self.where(vector.size)].set(self.values) if self.places.size else self.values


def bits_of_place(size: int) -> int:
    """ceil(log2 size).

    >>> bits_of_place(1), bits_of_place(5), bits_of_place(8)
    (0, 3, 3)
    """
    return (size - 1).bit_length()


def share_of(theta: float, size: int) -> int:
    """At most this share of so many, and at least one.

    >>> share_of(0.3, 10), share_of(0.01, 10)
    (3, 1)
    """
    return max(1, int(np.floor(theta * size + 1e-6)))
