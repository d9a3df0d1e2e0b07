"""Initial points of clusters: k-means++ over the examples of all clients of a round.

D. Arthur, S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007 (ACM, pages 1027-1035).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import Aggregator
from fedsim.algorithms._flat_features import FlatFeatures
from fedsim.algorithms._gumbel_max import (
    LOWEST,
    Candidate,
    StatisticsAndCandidate,
    SumAndHighestPriority,
    draw_candidate,
    no_candidate,
    with_higher_priority,
)
from fedsim.data import Batch
from fedsim.rounds import Client, ClientUpdate, RoundInfo


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Seeding(FlatFeatures):
    """Initializes k points from ``start``, or by k-means++ from the examples of the clients that participate, one point per
    round.

    While ``shared.num_started`` is below k, a round draws the next point from all examples of its cohort. The probability of an
    example is proportional to its squared distance to the nearest point so far, and uniform for the first point. Every example
    gets a priority: the logarithm of this distance plus Gumbel noise. A client sends its example with the highest priority, and
    the server keeps the highest of all. This is the same as a k-means++ draw from all these examples at once. `maximize`
    receives moments only after all points are initialized.

    Attributes:
      num_features: see `FlatFeatures`.
      num_clusters: k.
      start: the initial points, ``[num_clusters, num_features]``. None uses k-means++.
      feature, batches: see `Statistics`.

    >>> Seeding(num_features=2, num_clusters=3).points()[1].item()
    0
    """

    aggregator: Aggregator = dataclasses.field(default_factory=SumAndHighestPriority)
    num_clusters: int = 10
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_clusters=self.num_clusters)
        if self.start is not None:
            shape = (self.num_clusters, self.num_features)
            if np.shape(self.start) != shape or not np.all(np.isfinite(self.start)):
                raise ValueError(f"Expected start to hold finite numbers {list(shape)}, got {list(np.shape(self.start))}.")

    def points(self) -> tuple[jax.Array, jax.Array]:
        """Returns the points before the first round, and how many of them are initialized."""
        if self.start is None:
            return jnp.zeros((self.num_clusters, self.num_features), jnp.float32), jnp.int32(0)
        return jnp.asarray(np.asarray(self.start, np.float32)), jnp.int32(self.num_clusters)

    def no_moments(self) -> Any:
        """Returns the moments of no examples."""
        raise NotImplementedError(f"{type(self).__name__} must define no_moments.")

    def moments(self, shared: Any, x: jax.Array, mask: jax.Array) -> Any:
        """Returns what `maximize` needs from examples ``float32 [n, features]``: sums over the examples where ``mask [n]`` is
        True.
        """
        raise NotImplementedError(f"{type(self).__name__} must define moments.")

    def maximize(self, state: Any, moments: Any) -> Any:
        """Returns the state after a round, from the moments of all its examples."""
        raise NotImplementedError(f"{type(self).__name__} must define maximize.")

    def zero_statistics(self, shared: Any) -> StatisticsAndCandidate:
        return StatisticsAndCandidate(tree.Total.of(self.no_moments()), no_candidate(self.num_features))

    def merge(self, a: StatisticsAndCandidate, b: StatisticsAndCandidate) -> StatisticsAndCandidate:
        return StatisticsAndCandidate(a.statistics.merge(b.statistics), with_higher_priority(a.candidate, b.candidate))

    def statistics(self, shared: Any, batch: Batch) -> StatisticsAndCandidate:
        x, zero = self.flat_features(batch.examples), self.zero_statistics(shared)
        return jax.lax.cond(
            shared.num_started < self.num_clusters,
            lambda: zero._replace(candidate=self._candidate(shared, x, batch)),
            lambda: zero._replace(statistics=tree.Total.of(self.moments(shared, x, batch.mask))),
        )

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        found, share = self.collect(shared, client)
        moments = tree.scale(found.statistics.value(), share)
        return ClientUpdate(StatisticsAndCandidate(moments, found.candidate), jnp.float32(1))

    def server_update(self, state: Any, update: StatisticsAndCandidate, info: RoundInfo) -> Any:
        def place() -> Any:
            # If there are fewer distinct examples than points, the remaining points are copies of the first.
            point = jnp.where(update.candidate.priority > LOWEST, update.candidate.point, state.means[0])
            return state._replace(means=state.means.at[state.num_started].set(point), num_started=state.num_started + 1)

        return jax.lax.cond(state.num_started >= self.num_clusters, lambda: self.maximize(state, update.statistics), place)

    def _candidate(self, shared: Any, x: jax.Array, batch: Batch) -> Candidate:
        there = jnp.arange(self.num_clusters) < shared.num_started
        nearest = jnp.min(squared_distances(x, shared.means), axis=1, where=there, initial=jnp.inf)
        return draw_candidate(x, jnp.where(shared.num_started == 0, 1.0, nearest), batch.mask, batch.key)


def squared_distances(x: jax.Array, points: jax.Array) -> jax.Array:
    """Returns the squared distances ``[n, k]`` from examples ``[n, features]`` to points ``[k, features]``.

    >>> squared_distances(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 4.0]]
    """
    return jnp.sum(jnp.square(x[:, None, :] - points[None]), axis=-1)
