"""A part of a vector as a message: some of its values, and where they are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.compressors._selection import chosen, places, spread
from fedsim.model import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part(tree.Message):
    """Values of a vector, and which they are: in the shorter of two forms, and in none if they are all.

    Either their places, ceil(log2 size) bits each, one after another, in whole bytes ``uint8``; or the mask of
    `fedsim.compressors._selection`, a bit for every coordinate, in whole words ``uint32``.

    Attributes:
      values: ``[count]``; or, beside a mask and not packed, ``[size]``: where they belong, and 0 elsewhere, so that nobody has
        to spread them.
      which: of one of the forms, ``[bytes]`` or ``[words]``, or ``[0]``.
      count: how many are sent.

    >>> from fedsim.compressors._selection import largest
    >>> vector = jnp.arange(10, 20)
    >>> part = Part.of(vector, largest(jnp.array([3.0, 0, 2, 0, 0, 0, 0, 1, 0, 0]), 3), 3)
    >>> part.values.tolist(), part.which.size, part.num_bits, part.put_into(jnp.zeros_like(vector)).tolist()
    ([10, 12, 17], 2, 112, [10, 0, 12, 0, 0, 0, 0, 17, 0, 0])
    """

    values: jax.Array
    which: jax.Array
    count: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, vector: jax.Array, mask: jax.Array | None = None, count: int = 0, *, packed: bool = False) -> Part:
        """The ``count`` values of a vector ``[size]`` whose bits are set in ``mask``, ``uint32 [words]``; None: all.

        ``packed``: that ``values`` have no others beside them, for a compressor, which would send those too.
        """
        if mask is None or count == vector.size:
            return cls(vector, jnp.zeros(0, jnp.uint8), vector.size)
        width = bits_of_place(vector.size)
        is_mask = 8 * -(-count * width // 8) > 32 * len(mask)
        if is_mask and not packed:
            return cls(jnp.where(chosen(mask, vector.size), vector, 0), mask, count)
        there = places(mask, count)
        if is_mask:
            return cls(vector[there], mask, count)
        bits = (there[:, None] >> jnp.arange(width)[None]) & 1
        return cls(vector[there], jnp.packbits(bits.ravel().astype(jnp.uint8)), count)

    @property
    def num_bits(self) -> int:
        """Size of the message: of the values that are sent, and of which they are."""
        return 8 * (self.count * self.values.dtype.itemsize + self.which.size * self.which.dtype.itemsize)

    def where(self, size: int) -> jax.Array:
        """The places in a vector of this size, ``int32 [count]``."""
        if self._is_mask:
            return places(self.which, self.count)
        if self.count == size:
            return jnp.arange(size)
        width = bits_of_place(size)
        bits = jnp.unpackbits(self.which, count=self.count * width).reshape(-1, width).astype(jnp.int32)
        return jnp.sum(bits << jnp.arange(width)[None], axis=1, dtype=jnp.int32)

    def put_into(self, params: Params) -> Params:
        """The tree, of ``size`` elements in all, with these values in their places in the order of `fedsim.tree.flat`."""
        # Before they meet a client's own: a compiler spreads what is the same for all clients once a round.
        values, there = (tree.unflat(x, params) for x in self._spread(sum(leaf.size for leaf in jax.tree.leaves(params))))
        return jax.tree.map(lambda which, new, leaf: jnp.where(which, new.astype(leaf.dtype), leaf), there, values, params)

    def _spread(self, size: int) -> tuple[jax.Array, jax.Array]:
        """The values in their places, and where there are any, both ``[size]``."""
        if self.count == size:
            return self.values, jnp.ones(size, bool)
        zeros = jnp.zeros(size, self.values.dtype)
        if self._is_mask:
            values = self.values if len(self.values) == size else spread(self.which, self.values, zeros)
            return values, chosen(self.which, size)
        at = self.where(size)
        return zeros.at[at].set(self.values), jnp.zeros(size, bool).at[at].set(True)

    @property
    def _is_mask(self) -> bool:
        return self.which.dtype == jnp.uint32


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
