"""Federated analytics: quantiles from histograms of shrinking ranges.

J. I. Munro, M. S. Paterson, "Selection and sorting with limited storage", Theoretical Computer Science 12, 1980:
https://doi.org/10.1016/0304-3975(80)90061-4. The paper makes several passes over the data, and each pass counts within the
range that the previous pass left. Deviation: the range is divided into equal parts, not at sampled values, so the bound depends
on the range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.algorithms._statistics import Statistics, check_exact
from fedsim.data import Batch, FederatedData
from fedsim.metrics import Score
from fedsim.rounds import RoundInfo, server_state


class QuantilesState(NamedTuple):
    """Edges of the parts of each quantile's bracket, ``float32 [quantiles, bins + 1]``.

    A quantile lies above the first edge, ``low [quantiles]``, and not above the last edge, ``high [quantiles]``.
    """

    edges: jax.Array

    @property
    def low(self) -> jax.Array:
        return self.edges[:, 0]

    @property
    def high(self) -> jax.Array:
        return self.edges[:, -1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Quantiles(Statistics):
    """Finds quantiles of a feature, by histograms of intervals that become smaller in every round.

    Every round reduces the interval that contains a quantile by a factor of ``bins``. A quantile is the smallest value such
    that a fraction of all values does not exceed it. Its bracket is the interval that contains it. Each client counts its
    values up to every edge of ``bins`` equal parts of each bracket. The part in which the sum of the counts reaches the
    fraction becomes the next bracket.

    Guarantees:
      - After r rounds in which all clients participated, a quantile q lies in (low, high], and high - low <= (high₀ - low₀) /
        bins**r, until low and high are neighbouring ``float32`` numbers. Then ``high`` is the quantile, as defined by
        ``numpy.quantile(method="inverted_cdf")``.
      - A quantile at or below the initial ``low`` is found as ``low``, and a quantile above the initial ``high`` as ``high``.
      - With sampled clients, a bracket is correct for the values of the clients of its rounds.
      - Ranks are exact up to 4 million values per round, and accurate to 1 in 4 million beyond.

    `evaluate` returns the largest error of the fraction of values up to each ``high``.

    Attributes:
      fractions: each in (0, 1]. 0.5 is the median.
      low, high: a range that contains the quantiles.
      bins: number of parts of a bracket, at least 2.
      feature, batches: see `Statistics`.

    Raises:
      ValueError: a fraction is not in ``(0, 1]``, ``low`` is not below ``high``, or there are fewer than 2 bins. Before the
        first round: ``low`` and ``high`` are equal in ``float32``, or the range and the feature have whole numbers above 2**24.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.3, 0.1, 0.6, 0.9, 0.8], np.float32)}, sizes=[3, 2])
    >>> quantiles = Quantiles(fractions=(0.5,), bins=10)
    >>> state, cohort = quantiles.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"])
    >>> for _ in range(8):
    ...     state, _ = quantiles.apply(state, cohort)
    >>> round(state.high.item(), 6)
    0.6
    """

    not_differentiable = "counts values"

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

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_exact("Quantiles", self.feature, np.array([self.low, self.high], np.float32), data)

    def init(self, key: jax.Array) -> QuantilesState:
        return self._cut(*(jnp.full((len(self.fractions), 1), edge, jnp.float32) for edge in (self.low, self.high)))

    def zero_statistics(self, shared: QuantilesState) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(shared.edges), jnp.float32(0)

    def statistics(self, shared: QuantilesState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        values, mask = self.values(batch)
        values, ones = values.astype(jnp.float32), mask.astype(jnp.float32)
        # The number of edges below a value, which is also the index of the first edge for which the value counts.
        above = jax.vmap(lambda edges: jnp.searchsorted(edges, values))(shared.edges)
        here = jnp.arange(len(self.fractions), dtype=jnp.int32)[:, None]
        counts, none = self.zero_statistics(shared)
        return counts.at[here, above].add(jnp.broadcast_to(ones, above.shape), mode="drop"), none + jnp.sum(ones)

    def server_update(self, state: QuantilesState, update: tuple[jax.Array, jax.Array], info: RoundInfo) -> QuantilesState:
        counts, total = update
        # The smallest integer rank that reaches the fraction, up to the rounding of float32.
        rank = jnp.ceil(jnp.asarray(self.fractions, jnp.float32) * total * (1 - 2**-22))
        first = jnp.sum(jnp.cumsum(counts, axis=1) < rank[:, None], axis=1)[:, None]  # the first edge with at least that rank
        return self._cut(*(jnp.take_along_axis(state.edges, jnp.clip(at, 0, self.bins), axis=1) for at in (first - 1, first)))

    def _cut(self, low: jax.Array, high: jax.Array) -> QuantilesState:
        """Returns brackets from ``low`` to ``high``, both ``[quantiles, 1]``, in equal parts.

        The first and the last edge are exact, and edges never decrease because of rounding.
        """
        share = jnp.arange(self.bins + 1, dtype=jnp.float32)[None] / self.bins
        # The difference of two neighbouring floats is exact, so brackets shrink down to the last bit.
        edges = jax.lax.cummax(jnp.clip(low + (high - low) * share, low, high), axis=1)
        return QuantilesState(edges.at[:, :1].set(low).at[:, -1:].set(high))

    def evaluate(self, state: QuantilesState, data: FederatedData) -> dict[str, float]:
        """Returns ``rank_error``: the largest error of the fraction of values up to each quantile; NaN without values."""
        state = server_state(state)
        self.check(data)
        values = np.sort(np.asarray(data.columns[self.feature], np.float32).ravel())
        found = np.stack([np.searchsorted(values, state.high, side=side) / max(1, len(values)) for side in ("left", "right")])
        error = np.max(np.maximum(found[0] - self.fractions, self.fractions - found[1]).clip(0)) if len(values) else np.nan
        return {"rank_error": Score(error, better="lower")}
