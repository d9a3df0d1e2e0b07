"""Federated analytics: quantiles by histograms that close in.

J. I. Munro, M. S. Paterson, "Selection and sorting with limited storage", Theoretical Computer Science 12, 1980:
https://doi.org/10.1016/0304-3975(80)90061-4: several passes over the data, each of which counts inside of what the last
one left. Deviation: the range is cut into equal parts, not at sampled values, so the bound is in terms of the range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.algorithms._statistics import Statistics
from fedsim.data import Batch, FederatedData
from fedsim.execution import split


class QuantilesState(NamedTuple):
    """Edges of the parts of each quantile's bracket, ``float32 [quantiles, bins + 1]``: the quantile lies above the first edge,
    ``low [quantiles]``, and not above the last one, ``high``."""

    edges: jax.Array

    @property
    def low(self) -> jax.Array:
        return self.edges[:, 0]

    @property
    def high(self) -> jax.Array:
        return self.edges[:, -1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Quantiles(Statistics):
    """The smallest values that a fraction of all values does not exceed, closer by a factor of ``bins`` in every round.

    Each client counts its values up to every edge of ``bins`` equal parts of each quantile's bracket; the part in which the
    sum passes the fraction becomes the bracket.

    Guarantees:
      - After r rounds in which everybody took part, a quantile q lies in (low, high] and high - low <= (high₀ - low₀) /
        bins**r, until these are neighbours among the ``float32``: then ``high`` is the quantile, as
        ``numpy.quantile(method="inverted_cdf")`` has it.
      - A quantile at or below ``low``, or above ``high``, is found as that.
      - With sampled clients a bracket is right for the values seen in its rounds.
      - Ranks are exact up to 4 million values a round, and to 1 in 4 million beyond.

    `evaluate` gives by how much the fraction of values up to each ``high`` is off, at most.

    Attributes:
      fractions: each in (0, 1]; 0.5 is the median.
      low, high: a range that has the quantiles.
      bins: at least 2, parts that a bracket is cut into.
      feature, batches: see `Statistics`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.3, 0.1, 0.6, 0.9, 0.8], np.float32)}, sizes=[3, 2])
    >>> quantiles = Quantiles(fractions=(0.5,), bins=10)
    >>> state, cohort = quantiles.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"])
    >>> for _ in range(8):
    ...     state, _ = quantiles.apply(state, cohort)
    >>> round(state.high.item(), 6)
    0.6
    """

    fractions: Sequence[float] = (0.25, 0.5, 0.75)
    low: float = 0.0
    high: float = 1.0
    bins: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if np.ndim(self.fractions) != 1 or not len(self.fractions):
            raise ValueError(f"Expected fractions in (0, 1], got fractions={self.fractions!r}.")
        for fraction in self.fractions:
            checks.number(above=0, most=1, fractions=fraction)
        checks.number(low=self.low)
        checks.number(above=self.low, high=self.high, remedy=f"low={self.low} is to be below")
        checks.whole(2, bins=self.bins)

    def init(self, key: jax.Array) -> QuantilesState:
        return self._cut(*(jnp.full((len(self.fractions), 1), edge, jnp.float32) for edge in (self.low, self.high)))

    def nothing(self, shared: QuantilesState) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(shared.edges), jnp.float32(0)

    def statistics(self, shared: QuantilesState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        values, mask = self.values(batch)
        values, seen = values.astype(jnp.float32), mask.astype(jnp.float32)
        # How many edges a value lies above: it counts from the edge after these.
        above = jax.vmap(lambda edges: jnp.searchsorted(edges, values))(shared.edges)
        here = jnp.arange(len(self.fractions), dtype=jnp.int32)[:, None]
        counts, none = self.nothing(shared)
        return counts.at[here, above].add(jnp.broadcast_to(seen, above.shape), mode="drop"), none + jnp.sum(seen)

    def server_update(self, state: QuantilesState, update: tuple[jax.Array, jax.Array]) -> QuantilesState:
        counts, total = update
        # The smallest whole number that is the fraction, up to the rounding of float32.
        rank = jnp.ceil(jnp.asarray(self.fractions, jnp.float32) * total * (1 - 2**-22))
        first = jnp.sum(jnp.cumsum(counts, axis=1) < rank[:, None], axis=1)[:, None]  # the first edge with at least that rank
        return self._cut(*(jnp.take_along_axis(state.edges, jnp.clip(at, 0, self.bins), axis=1) for at in (first - 1, first)))

    def _cut(self, low: jax.Array, high: jax.Array) -> QuantilesState:
        """Brackets from ``low`` to ``high [quantiles, 1]`` in equal parts; ends are exact, and no rounding goes backwards."""
        share = jnp.arange(self.bins + 1, dtype=jnp.float32)[None] / self.bins
        # Of two neighbouring floats the difference is exact, so the brackets close in to the last bit.
        edges = jax.lax.cummax(jnp.clip(low + (high - low) * share, low, high), axis=1)
        return QuantilesState(edges.at[:, :1].set(low).at[:, -1:].set(high))

    def evaluate(self, state: QuantilesState, data: FederatedData) -> dict[str, float]:
        """By how much the fraction of values up to each quantile is off, at most: ``rank_error``."""
        state = split(state).server
        self.check(data)
        values = np.sort(np.asarray(data.columns[self.feature], np.float32).ravel())
        found = np.stack([np.searchsorted(values, state.high, side=side) / max(1, len(values)) for side in ("left", "right")])
        return {"rank_error": float(np.max(np.maximum(found[0] - self.fractions, self.fractions - found[1]).clip(0)))}
