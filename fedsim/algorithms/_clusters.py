"""What k-means and mixtures share: rounds that find starting points among the clients' examples, and then their own.

D. Arthur, S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007 (ACM, pages 1027-1035).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import Aggregator
from fedsim.algorithms._lots import NOBODY, Candidate, Found, SumAndHighest, higher
from fedsim.algorithms._statistics import ClientState, Statistics
from fedsim.data import Batch, FederatedData
from fedsim.execution import Client, ClientUpdate, Evaluation, Jit, evaluate, split
from fedsim.metrics import per_example
from fedsim.model import Model


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clusters(Statistics):
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

    >>> Clusters(num_features=2, num_clusters=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_clusters >= 1, got num_clusters=0.
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

    def scores(self, shared: Any, x: jax.Array) -> dict[str, jax.Array]:
        """What `evaluate` reports of examples ``float32 [n, features]``: by name, ``float32 [n]``."""
        raise NotImplementedError(f"{type(self).__name__} must define scores.")

    def nothing(self, shared: Any) -> Found:
        return Found(self.no_moments(), Candidate(jnp.float32(NOBODY), jnp.zeros(self.num_features, jnp.float32)))

    def merge(self, a: Found, b: Found) -> Found:
        return Found(tree.add(a.statistics, b.statistics), higher(a.candidate, b.candidate))

    def statistics(self, shared: Any, batch: Batch) -> Found:
        x, nothing = self._numbers(batch.examples), self.nothing(shared)
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

        started = state.num_started >= self.num_clusters
        return jax.lax.cond(started, lambda: self.maximize(state, update.statistics), place)

    def evaluate(self, state: Any, data: FederatedData) -> Evaluation:
        """Means of `scores` over all examples, and over each client's."""
        state = split(state).server
        self.check(data)
        execution = self.execution if isinstance(self.execution, Jit) else None
        return evaluate(self._scorer, self.broadcast(state), data, execution=execution)

    @functools.cached_property
    def _scorer(self) -> Model:
        def scores(shared: Any, examples: Any, key: Any = None) -> dict[str, jax.Array]:
            return self.scores(shared, self._numbers(examples))

        like = jnp.zeros((1, self.num_features), jnp.float32)
        names = jax.eval_shape(self.scores, self.broadcast(self.init(jax.random.key(0))), like)
        metrics = {name: lambda examples, scores, name=name: per_example(scores[name]) for name in names}
        cost = next(iter(names))
        return Model(
            init=self.init,
            apply_for_train=scores,
            apply_for_eval=scores,
            loss=lambda examples, scores: scores[cost],
            metrics=metrics,
            features={},
        )

    def _numbers(self, examples: Any) -> jax.Array:
        return examples[self.feature].reshape(-1, self.num_features).astype(jnp.float32)

    def _candidate(self, shared: Any, x: jax.Array, batch: Batch) -> Candidate:
        there = jnp.arange(self.num_clusters) < shared.num_started
        nearest = jnp.min(squared_distances(x, shared.means), axis=1, where=there, initial=jnp.inf)
        chance = jnp.where(shared.num_started == 0, 1.0, nearest)
        lots = jnp.where(chance > 0, jnp.log(chance), NOBODY) + jax.random.gumbel(batch.key, chance.shape)
        lots = jnp.where(batch.mask & (chance > 0), lots, NOBODY)
        best = jnp.argmax(lots)
        return Candidate(lots[best], x[best])


def squared_distances(x: jax.Array, points: jax.Array) -> jax.Array:
    """From every example ``[n, features]`` to every point ``[k, features]``: ``[n, k]``.

    >>> squared_distances(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 4.0]]
    """
    return jnp.sum(jnp.square(x[:, None, :] - points[None]), axis=-1)
