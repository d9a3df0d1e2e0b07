"""Federated analytics: heavy hitters from a sketch.

G. Cormode, S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", Journal of
Algorithms 55, 2005: https://doi.org/10.1016/j.jalgor.2003.12.001. M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent
items in data streams", Theoretical Computer Science 312, 2004 (the count-sketch):
https://doi.org/10.1016/S0304-3975(03)00400-6. Deviation: items are integers below ``num_items``, and the frequencies of all of
them are estimated. The papers keep candidates in a heap.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim.algorithms._sketch import Sketch
from fedsim.algorithms._statistics import Statistics
from fedsim.data import Batch, FederatedData
from fedsim.metrics import Score
from fedsim.rounds import RoundInfo, server_state


class SketchState(NamedTuple):
    """The state of the server.

    Attributes:
      words: keys of the hash functions, ``uint32 [2, depth, 3]``.
      counts: the sketch of all rounds, ``int32 [depth, width]``.
    """

    words: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeavyHitters(Statistics):
    """Finds the most frequent values of an integer feature with a count-min sketch or a count-sketch.

    A sketch has ``depth`` rows of ``width`` counters. It does not have a counter for each value. In each row, a hash function
    assigns a counter to every item, and several items share a counter. Sketches can be added.

    Guarantees, for N values in total, an item with frequency f, and F = √Σf² over all items:
      - count-min: the estimate is never below f. It is above f + e N / width with probability at most e^-depth.
      - count-sketch: the error of the estimate is above 2 F / √width with probability at most e^(-depth/8).
      - Counts are exact while a counter has at most 2**24 values in a round, and fewer than 2**31 in all rounds.

    `evaluate` returns the ``recall``: the fraction of the ``top`` most frequent items of some data that the sketch also finds
    among its ``top`` items.

    Attributes:
      num_items: items are 0 to ``num_items`` - 1. Other values do not count. Values that do not fit into 32 bits raise an
        error.
      sketch: ``"count-min"`` or ``"count-sketch"``. A count-sketch is unbiased, and more accurate the faster frequencies
        decrease.
      width: a power of 2, from 2 to 131,072.
      depth: at least 1, and odd for a count-sketch.
      top: how many items `evaluate` compares.
      feature, batches: see `Statistics`.

    Raises:
      ValueError: an attribute is not a positive whole number, or the feature has no integers.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"y": np.array([7, 7, 7, 3, 3, 900])}, sizes=[4, 2])
    >>> hitters = HeavyHitters(num_items=1000)
    >>> state, _ = hitters.apply(hitters.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> [found.tolist() for found in hitters.heaviest(state, 2)]
    [[7, 3], [3.0, 2.0]]
    """

    not_differentiable = "counts values"

    num_items: int
    sketch: Literal["count-min", "count-sketch"] = "count-min"
    width: int = 1024
    depth: int = 5
    top: int = 10
    feature: str = "y"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_items=self.num_items, depth=self.depth, top=self.top)
        self._sketch()

    def _sketch(self) -> Sketch:
        return Sketch(self.sketch, self.width, self.depth)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        dtype = data.columns[self.feature].dtype
        if dtype.kind not in "iu":
            raise ValueError(f"Expected a feature of integers, got {self.feature!r} of {dtype}: set feature to another one.")

    def init(self, key: jax.Array) -> SketchState:
        return SketchState(self._sketch().words(rng.stream(key, "hash")), jnp.zeros((self.depth, self.width), jnp.int32))

    def broadcast(self, state: SketchState) -> jax.Array:
        return state.words

    def zero_statistics(self, shared: jax.Array) -> jax.Array:
        return jnp.zeros((self.depth, self.width), jnp.float32)

    def statistics(self, shared: jax.Array, batch: Batch) -> jax.Array:
        items, mask = self.values(batch)
        return self._sketch().count(shared, items, mask & (items >= 0) & (items < self.num_items))

    def server_update(self, state: SketchState, update: jax.Array, info: RoundInfo) -> SketchState:
        return state._replace(counts=state.counts + jnp.rint(update).astype(jnp.int32))

    def estimate(self, state: SketchState, items: Any) -> jax.Array:
        """Returns the estimated frequencies, ``float32 [n]``, of items ``int [n]``."""
        return self._sketch().estimate(state.words, state.counts, jnp.asarray(items))

    def heaviest(self, state: SketchState, count: int) -> tuple[jax.Array, jax.Array]:
        """Returns the items with the largest estimates, ``int32 [count]``, and the estimates, ``float32 [count]``.

        If there are fewer than ``count`` items, it returns all of them.
        """
        checks.whole(1, count=count)
        estimates = self.estimate(state, np.arange(self.num_items, dtype=np.int32))
        estimates, items = jax.lax.top_k(estimates, min(count, self.num_items))
        return items, estimates

    def evaluate(self, state: SketchState, data: FederatedData) -> dict[str, float]:
        """Returns ``recall``: the fraction of the most frequent items of some data that the sketch finds; NaN without items."""
        state = server_state(state)
        self.check(data)
        items = np.asarray(data.columns[self.feature]).ravel()
        counts = np.bincount(items[(items >= 0) & (items < self.num_items)], minlength=self.num_items)
        top = min(self.top, int(np.count_nonzero(counts)))
        # An item that is as frequent as the last of them also counts as found.
        found = counts[np.asarray(self.heaviest(state, top)[0])] if top else counts[:0]
        return {"recall": Score(np.mean(found >= np.sort(counts)[-top]) if top else np.nan, better="higher")}
