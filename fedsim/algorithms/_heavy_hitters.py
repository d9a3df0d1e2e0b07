"""Federated analytics: heavy hitters by a sketch.

G. Cormode, S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", Journal of
Algorithms 55, 2005: https://doi.org/10.1016/j.jalgor.2003.12.001. M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent
items in data streams", Theoretical Computer Science 312, 2004 (the count-sketch):
https://doi.org/10.1016/S0304-3975(03)00400-6. Hashing: M. Thorup, "High speed hashing for integers and strings", 2015, vector
multiply-shift, strongly universal: https://arxiv.org/abs/1504.06804.
Deviation: items are integers below ``num_items``, all of which are asked for; the papers keep candidates in a heap.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim.algorithms._statistics import Statistics
from fedsim.data import Batch, FederatedData
from fedsim.execution import split


class SketchState(NamedTuple):
    """Keys of the hash functions, ``uint32 [2, depth, 3]``, and the sketch of all rounds, ``int32 [depth, width]``."""

    words: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeavyHitters(Statistics):
    """Finds the most frequent values of an integer feature without counting each: in ``depth`` rows of ``width`` counters.

    In each row a hash function gives every item a counter, which it shares with others. Sketches add up.

    Guarantees, for N values of which an item has f, and F = √Σf²:
      - count-min: the estimate is never below f, and above f + e N / width with probability e^-depth at most.
      - count-sketch: the estimate is off by more than 2 F / √width with probability e^(-depth/8) at most.
      - Counts are exact while a round has at most 2**24 values at a counter, and all rounds 2**31.

    `evaluate` gives the ``recall``: which share of the ``top`` most frequent items of some data are among those of the sketch.

    Attributes:
      num_items: items are 0 to ``num_items`` - 1; other values do not count.
      sketch: ``"count-min"``, or ``"count-sketch"``, which is unbiased and the better the steeper frequencies fall.
      width: a power of 2, from 2 to 131,072.
      depth: at least 1; odd for a count-sketch.
      top: how many items `evaluate` compares.
      feature, batches: see `Statistics`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"y": np.array([7, 7, 7, 3, 3, 900])}, sizes=[4, 2])
    >>> hitters = HeavyHitters(num_items=1000)
    >>> state, _ = hitters.apply(hitters.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> [found.tolist() for found in hitters.heaviest(state, 2)]
    [[7, 3], [3.0, 2.0]]
    """

    num_items: int
    sketch: Literal["count-min", "count-sketch"] = "count-min"
    width: int = 1024
    depth: int = 5
    top: int = 10
    feature: str = "y"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_items=self.num_items, depth=self.depth, top=self.top)
        checks.one_of("count-min", "count-sketch", sketch=self.sketch)
        checks.whole(2, 2**17, width=self.width, remedy="give a power of 2")
        if int(self.width).bit_count() != 1:
            raise ValueError(f"Expected width to be a power of 2 from 2 to 131,072, got width={self.width}.")
        if self.sketch == "count-sketch" and self.depth % 2 == 0:
            raise ValueError(f"Expected an odd depth, for the median of the rows, got depth={self.depth}.")

    def check(self, data: FederatedData) -> None:
        super().check(data)
        dtype = data.columns[self.feature].dtype
        if dtype.kind not in "iu":
            raise ValueError(f"Expected integers, and {self.feature!r} is {dtype}: name another feature.")

    def init(self, key: jax.Array) -> SketchState:
        words = jax.random.bits(rng.stream(key, "hash"), (2, self.depth, 3), jnp.uint32)
        return SketchState(words, jnp.zeros((self.depth, self.width), jnp.int32))

    def broadcast(self, state: SketchState) -> jax.Array:
        return state.words

    def nothing(self, shared: jax.Array) -> jax.Array:
        return jnp.zeros((self.depth, self.width), jnp.float32)

    def statistics(self, shared: jax.Array, batch: Batch) -> jax.Array:
        items, mask = self.values(batch)
        counter, sign = self._places(shared, items)
        count = (mask & (items >= 0) & (items < self.num_items)).astype(jnp.float32)
        rows = jnp.arange(self.depth, dtype=jnp.int32)[:, None]
        return self.nothing(shared).at[rows, counter].add(sign * count[None])

    def server_update(self, state: SketchState, update: jax.Array) -> SketchState:
        return state._replace(counts=state.counts + jnp.rint(update).astype(jnp.int32))

    def estimate(self, state: SketchState, items: Any) -> jax.Array:
        """How often items ``int [n]`` occurred: ``float32 [n]``."""
        counter, sign = self._places(state.words, jnp.asarray(items))
        found = jnp.take_along_axis(state.counts, counter, axis=1).astype(jnp.float32) * sign
        return jnp.min(found, axis=0) if self.sketch == "count-min" else jnp.median(found, axis=0)

    def heaviest(self, state: SketchState, count: int) -> tuple[jax.Array, jax.Array]:
        """The items of the largest estimates, ``int32 [count]``, and these, ``float32 [count]``."""
        estimates, items = jax.lax.top_k(self.estimate(state, np.arange(self.num_items, dtype=np.int32)), count)
        return items, estimates

    def evaluate(self, state: SketchState, data: FederatedData) -> dict[str, float]:
        """How many of the most frequent items of some data the sketch finds: ``recall``."""
        state = split(state).server
        self.check(data)
        items = np.asarray(data.columns[self.feature]).ravel()
        counts = np.bincount(items[(items >= 0) & (items < self.num_items)], minlength=self.num_items)
        top = min(self.top, int(np.count_nonzero(counts)))
        # An item that is as frequent as the last of them is as good.
        found = counts[np.asarray(self.heaviest(state, top)[0])] if top else counts[:0]
        return {"recall": float(np.mean(found >= np.sort(counts)[-top])) if top else 1.0}

    def _places(self, words: jax.Array, items: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each item's counter in each row, ``int32 [depth, n]``, and the sign it counts with, ``float32 [depth, n]``."""
        item = items.astype(jnp.uint32)
        halves = jnp.stack([item & 0xFFFF, item >> 16, jnp.ones_like(item)])
        # Vector multiply-shift of 16-bit halves modulo 2**32: its upper 17 bits are strongly universal.
        hashed = jnp.sum(words[..., None] * halves[None, None], axis=2, dtype=jnp.uint32)
        counter = (hashed[0] >> (32 - (self.width.bit_length() - 1))).astype(jnp.int32)
        sign = 1 - 2 * (hashed[1] >> 31).astype(jnp.float32)
        return counter, jnp.ones_like(sign) if self.sketch == "count-min" else sign
