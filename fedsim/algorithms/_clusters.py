"""Base class of k-means and Gaussian mixtures: initial points, and updates from moments of the examples."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import Aggregator
from fedsim.algorithm import Algorithm
from fedsim.algorithms._flat_features import check_num_features, evaluate_scores, scorer, vectors
from fedsim.algorithms._seeding import Candidate, StatisticsAndCandidate, SumAndHighestPriority, add_point, draw_candidate
from fedsim.algorithms._statistics import Statistics, check_numbers, one_pass, over_examples
from fedsim.data import Batch, Batches, FederatedData
from fedsim.evaluation import Evaluation
from fedsim.metrics import Better
from fedsim.model import Model
from fedsim.rounds import Client, ClientUpdate, RoundInfo


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clusters(Algorithm):
    """Base class of clustering algorithms: initial points, moments, a maximization step, and `scores` for evaluation.

    The initial points are ``start``, or are chosen by k-means++ from the examples of the clients that participate, one point
    per round, while ``shared.num_started`` is below k. `maximize` receives moments only after that. Subclasses define
    ``no_moments``, `moments`, `maximize` and `scores`, and set ``better = "higher"`` if higher scores are better. As in
    `Statistics`, every example counts once, however ``batches`` reads it.

    Attributes:
      num_features: numbers per example. An example of another shape is flattened.
      num_clusters: k.
      start: the initial points, ``[num_clusters, num_features]``. None uses k-means++.
      feature: the column to read.
      aggregator: a sum of moments, and the candidate for the next point, by default.
      batches: see `Statistics`.

    Raises:
      ValueError: a number is below 1, or ``start`` has another shape or numbers that are not finite.

    >>> Clusters(num_features=2, num_clusters=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_clusters >= 1, got num_clusters=0: give a positive whole number.
    """

    capabilities = Statistics.capabilities
    better: ClassVar[Better] = "lower"  # which scores are better

    batches: Batches = dataclasses.field(default_factory=one_pass)
    aggregator: Aggregator = dataclasses.field(default_factory=SumAndHighestPriority)
    feature: str = "x"
    num_features: int
    num_clusters: int = 10
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_features=self.num_features, num_clusters=self.num_clusters)
        if self.start is not None:
            shape = (self.num_clusters, self.num_features)
            if np.shape(self.start) != shape or not np.all(np.isfinite(self.start)):
                raise ValueError(f"Expected start to hold finite numbers {list(shape)}, got {list(np.shape(self.start))}.")

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_numbers(type(self).__name__, self.feature, data)
        check_num_features(self.num_features, self.feature, data)

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

    def scores(self, shared: Any, x: jax.Array) -> dict[str, jax.Array]:
        """Returns what `evaluate` reports for examples ``float32 [n, features]``: a dict from name to ``float32 [n]``."""
        raise NotImplementedError(f"{type(self).__name__} must define scores.")

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        def add(so_far: StatisticsAndCandidate, batch: Batch) -> StatisticsAndCandidate:
            moments, candidate = so_far
            x = vectors(batch.examples[self.feature])

            def draw() -> StatisticsAndCandidate:
                drawn = draw_candidate(shared.means, shared.num_started, x, batch.mask, batch.key)
                return StatisticsAndCandidate(moments, candidate.or_higher(drawn))

            return jax.lax.cond(
                shared.num_started < self.num_clusters,
                draw,
                lambda: StatisticsAndCandidate(moments.add(self.moments(shared, x, batch.mask)), candidate),
            )

        none = StatisticsAndCandidate(tree.Total.of(self.no_moments()), Candidate.none(self.num_features))
        (moments, candidate), share = over_examples(client, self.batches, add, none)
        return ClientUpdate(StatisticsAndCandidate(tree.scale(moments.value(), share), candidate.times(share)), jnp.float32(1))

    def server_update(self, state: Any, update: StatisticsAndCandidate, info: RoundInfo) -> Any:
        def place() -> Any:
            means = add_point(state.means, state.num_started, update.candidate)
            return state._replace(means=means, num_started=state.num_started + 1)

        return jax.lax.cond(state.num_started >= self.num_clusters, lambda: self.maximize(state, update.statistics), place)

    def evaluate(self, state: Any, data: FederatedData) -> Evaluation:
        """Returns the means of `scores` over all examples, and over the examples of each client."""
        return evaluate_scores(self, self._scorer, state, data)

    @functools.cached_property
    def _scorer(self) -> Model:
        return scorer(self, self.better)
