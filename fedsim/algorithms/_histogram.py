"""Federated analytics: a histogram.

D. Ramage, S. Mazzocchi, "Federated analytics: collaborative data science without data collection", Google AI blog, 2020. The
sums are those of K. Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017:
https://doi.org/10.1145/3133956.3133982, but without cryptography and without noise. There are no deviations. The result is
exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.algorithms._statistics import Statistics, check_exact
from fedsim.data import Batch, FederatedData
from fedsim.metrics import Score
from fedsim.rounds import RoundInfo, server_state


class HistogramState(NamedTuple):
    """``counts int32 [bins + 2]`` over all rounds: values below ``low``, values in each bin, and values above ``high``."""

    counts: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Histogram(Statistics):
    """Computes a histogram of a feature over the examples of all clients, added up over rounds.

    The bins are ``bins`` equal parts of [low, high]. For federated analytics, see Ramage and Mazzocchi (2020),
    https://ai.googleblog.com/2020/05/federated-analytics-collaborative-data.html.

    Bins are half-open, and the last one is closed, as in `numpy.histogram`. With sampling without replacement
    (`ShuffledSampler`), an epoch of rounds counts every client once. Counts are exact while a bin has at most 2**24 values in a
    round, and fewer than 2**31 in all rounds.

    `evaluate` returns the total variation distance between the histograms of the state and of some data.

    Attributes:
      low, high: the range, in the precision of ``float32``.
      bins: at least 1.
      feature, batches: see `Statistics`.

    Raises:
      ValueError: ``bins`` is not a positive whole number, or ``low`` is not below ``high``. Before the first round: edges of
        bins are equal in ``float32``, or the range and the feature have whole numbers beyond 2**24, which ``float32`` rounds.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.0, 0.1, 0.6, 1.0, 7.0], np.float32)}, sizes=[3, 2])
    >>> histogram = Histogram(bins=2)
    >>> state, _ = histogram.apply(histogram.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.counts.tolist()
    [0, 2, 2, 1]
    """

    not_differentiable = "counts values"

    low: float = 0.0
    high: float = 1.0
    bins: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(low=self.low)
        checks.number(above=self.low, high=self.high, remedy=f"low={self.low} is to be below")
        checks.whole(1, bins=self.bins)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_exact("Histogram", self.feature, self.edges, data)

    @property
    def edges(self) -> np.ndarray:
        """The lower edges of the bins and the upper edge of the last bin, ``float32 [bins + 1]``."""
        return np.linspace(self.low, self.high, self.bins + 1).astype(np.float32)

    def init(self, key: jax.Array) -> HistogramState:
        return HistogramState(jnp.zeros(self.bins + 2, jnp.int32))

    def broadcast(self, state: HistogramState) -> tuple[()]:
        return ()

    def zero_statistics(self, shared: Any) -> jax.Array:
        return jnp.zeros(self.bins + 2, jnp.float32)

    def statistics(self, shared: Any, batch: Batch) -> jax.Array:
        values, mask = self.values(batch)
        values, edges = values.astype(jnp.float32), jnp.asarray(self.edges)
        place = jnp.searchsorted(edges, values, side="right") - (values == edges[-1]).astype(jnp.int32)
        return self.zero_statistics(shared).at[place].add(mask.astype(jnp.float32))

    def server_update(self, state: HistogramState, update: jax.Array, info: RoundInfo) -> HistogramState:
        return HistogramState(state.counts + jnp.rint(update).astype(jnp.int32))

    def evaluate(self, state: HistogramState, data: FederatedData) -> dict[str, float]:
        """Returns ``total_variation``, in [0, 1]: the distance between this histogram and the histogram of some data.

        It is NaN without values.
        """
        state = server_state(state)
        self.check(data)
        values = np.asarray(data.columns[self.feature], np.float32).ravel()
        place = np.searchsorted(self.edges, values, side="right") - (values == self.edges[-1])
        theirs = np.bincount(place, minlength=self.bins + 2) / max(1, len(values))
        ours = np.asarray(state.counts, np.float64)
        distance = np.abs(ours / max(1.0, ours.sum()) - theirs).sum() / 2 if len(values) else np.nan
        return {"total_variation": Score(distance, better="lower")}
