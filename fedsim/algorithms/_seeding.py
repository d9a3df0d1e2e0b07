"""Where clusters start from: k-means++ over the examples of all clients of a round.

D. Arthur, S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007 (ACM, pages 1027-1035).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import Aggregator
from fedsim.algorithms._lots import NOBODY, Candidate, Found, SumAndHighest, drawn, higher, nobody
from fedsim.algorithms._statistics import ClientState, Statistics
from fedsim.data import Batch, FederatedData
from fedsim.execution import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Seeding(Statistics):
    """k points, started as in k-means++ from the examples of the clients that take part, a point a round, or given.

    While ``shared.num_started`` is below k, a round draws the next point among all examples of its cohort, each with a chance
    in proportion to its squared distance to the nearest point so far (alike for the first): every example has a lot, the
    logarithm of its distance plus Gumbel noise; a client sends its highest, and the server keeps the highest of all. That is
    the draw of k-means++ from all these examples at once. Only from then on does `maximize` get statistics.

    Attributes:
      num_features: numbers per example; an example of another shape is flattened.
      num_clusters: k.
      start: points to start from, ``[num_clusters, num_features]``; None: k-means++.
      feature, batches: see `Statistics`.

    >>> Seeding(num_features=2, num_clusters=3).points()[1].item()
    0
    """

    aggregator: Aggregator = dataclasses.field(default_factory=SumAndHighest)
    num_features: int
    num_clusters: int = 10
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_features=self.num_features, num_clusters=self.num_clusters)
        if self.start is not None:
            shape = (self.num_clusters, self.num_features)
            if np.shape(self.start) != shape or not np.all(np.isfinite(self.start)):
                raise ValueError(f"Expected finite starting points {list(shape)}, got {list(np.shape(self.start))}.")

    def check(self, data: FederatedData) -> None:
        super().check(data)
        shape = data.columns[self.feature].shape[1:]
        if math.prod(shape) != self.num_features:
            raise ValueError(
                f"Feature {self.feature!r} has {math.prod(shape)} numbers per example: got num_features={self.num_features}."
            )

    def points(self) -> tuple[jax.Array, jax.Array]:
        """The points before the first round, and how many of them count."""
        if self.start is None:
            return jnp.zeros((self.num_clusters, self.num_features), jnp.float32), jnp.int32(0)
        return jnp.asarray(np.asarray(self.start, np.float32)), jnp.int32(self.num_clusters)

    def no_moments(self) -> Any:
        """The moments of no examples."""
        raise NotImplementedError(f"{type(self).__name__} must define no_moments.")

    def moments(self, shared: Any, x: jax.Array, mask: jax.Array) -> Any:
        """What `maximize` needs of examples ``float32 [n, features]``: sums over those where ``mask [n]`` is True."""
        raise NotImplementedError(f"{type(self).__name__} must define moments.")

    def maximize(self, state: Any, moments: Any) -> Any:
        """The state after a round, from the moments of all its examples."""
        raise NotImplementedError(f"{type(self).__name__} must define maximize.")

    def nothing(self, shared: Any) -> Found:
        return Found(self.no_moments(), nobody(self.num_features))

    def merge(self, a: Found, b: Found) -> Found:
        return Found(tree.add(a.statistics, b.statistics), higher(a.candidate, b.candidate))

    def statistics(self, shared: Any, batch: Batch) -> Found:
        x, nothing = self.numbers(batch.examples), self.nothing(shared)
        return jax.lax.cond(
            shared.num_started < self.num_clusters,
            lambda: nothing._replace(candidate=self._candidate(shared, x, batch)),
            lambda: nothing._replace(statistics=self.moments(shared, x, batch.mask)),
        )

    def client_final(self, shared: Any, state: ClientState, client: Client) -> ClientUpdate:
        found = state.statistics
        result = super().client_final(shared, state._replace(statistics=found.statistics), client)
        return result._replace(update=Found(result.update, found.candidate))

    def server_update(self, state: Any, update: Found) -> Any:
        def place() -> Any:
            # Fewer different examples than points: the rest of the points are copies of the first.
            point = jnp.where(update.candidate.lot > NOBODY, update.candidate.point, state.means[0])
            return state._replace(means=state.means.at[state.num_started].set(point), num_started=state.num_started + 1)

        return jax.lax.cond(state.num_started >= self.num_clusters, lambda: self.maximize(state, update.statistics), place)

    def numbers(self, examples: Any) -> jax.Array:
        """A batch's examples, ``float32 [n, features]``."""
        return examples[self.feature].reshape(-1, self.num_features).astype(jnp.float32)

    def _candidate(self, shared: Any, x: jax.Array, batch: Batch) -> Candidate:
        there = jnp.arange(self.num_clusters) < shared.num_started
        nearest = jnp.min(squared_distances(x, shared.means), axis=1, where=there, initial=jnp.inf)
        return drawn(x, jnp.where(shared.num_started == 0, 1.0, nearest), batch.mask, batch.key)


def squared_distances(x: jax.Array, points: jax.Array) -> jax.Array:
    """From every example ``[n, features]`` to every point ``[k, features]``: ``[n, k]``.

    >>> squared_distances(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 4.0]]
    """
    return jnp.sum(jnp.square(x[:, None, :] - points[None]), axis=-1)
