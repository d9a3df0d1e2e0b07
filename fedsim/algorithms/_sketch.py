"""Sketches of item frequencies: a few rows of counters, and many items share a counter.

G. Cormode, S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", Journal of
Algorithms 55, 2005: https://doi.org/10.1016/j.jalgor.2003.12.001. M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent
items in data streams", Theoretical Computer Science 312, 2004 (the count-sketch):
https://doi.org/10.1016/S0304-3975(03)00400-6. Hashing: M. Thorup, "High speed hashing for integers and strings", 2015, vector
multiply-shift, strongly universal: https://arxiv.org/abs/1504.06804.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedsim import checks


@dataclasses.dataclass(frozen=True)
class Sketch:
    """``depth`` rows of ``width`` counters; see `fedsim.algorithms.HeavyHitters` for the fields. Counts of sketches can be
    added.

    >>> sketch = Sketch("count-min", width=64, depth=3)
    >>> words = sketch.words(jax.random.key(0))
    >>> counts = sketch.count(words, jnp.array([7, 7, 3]), jnp.array([True, True, False]))
    >>> sketch.estimate(words, counts, jnp.array([7])).tolist()
    [2.0]
    """

    kind: Literal["count-min", "count-sketch"]
    width: int
    depth: int

    def __post_init__(self) -> None:
        checks.one_of("count-min", "count-sketch", sketch=self.kind)
        checks.whole(2, 2**17, width=self.width, remedy="give a power of 2")
        if int(self.width).bit_count() != 1:
            raise ValueError(f"Expected width to be a power of 2 from 2 to 131,072, got width={self.width}.")
        if self.kind == "count-sketch" and self.depth % 2 == 0:
            raise ValueError(f"Expected an odd depth, for the median of the rows, got depth={self.depth}.")

    def words(self, key: jax.Array) -> jax.Array:
        """Returns keys of the hash functions, ``uint32 [2, depth, 3]``."""
        return jax.random.bits(key, (2, self.depth, 3), jnp.uint32)

    def count(self, words: jax.Array, items: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the counters, ``float32 [depth, width]``, for the items ``int [n]`` where ``mask [n]`` is True."""
        counter, sign = self.counters(words, items)
        rows = jnp.arange(self.depth, dtype=jnp.int32)[:, None]
        return jnp.zeros((self.depth, self.width), jnp.float32).at[rows, counter].add(sign * mask.astype(jnp.float32)[None])

    def estimate(self, words: jax.Array, counts: jax.Array, items: jax.Array) -> jax.Array:
        """Returns the estimated frequencies, ``float32 [n]``, of items ``int [n]``, from counters ``[depth, width]``."""
        counter, sign = self.counters(words, items)
        found = jnp.take_along_axis(counts, counter, axis=1).astype(jnp.float32) * sign
        return jnp.min(found, axis=0) if self.kind == "count-min" else jnp.median(found, axis=0)

    def counters(self, words: jax.Array, items: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns each item's counter in each row, ``int32 [depth, n]``, and the sign with which it counts, ``float32 [depth,
        n]``.
        """
        item = items.astype(jnp.uint32)
        halves = jnp.stack([item & 0xFFFF, item >> 16, jnp.ones_like(item)])
        # Vector multiply-shift of 16-bit halves modulo 2**32. Its upper 17 bits are strongly universal.
        hashed = jnp.sum(words[..., None] * halves[None, None], axis=2, dtype=jnp.uint32)
        counter = (hashed[0] >> (32 - (self.width.bit_length() - 1))).astype(jnp.int32)
        sign = 1 - 2 * (hashed[1] >> 31).astype(jnp.float32)
        return counter, jnp.ones_like(sign) if self.kind == "count-min" else sign
