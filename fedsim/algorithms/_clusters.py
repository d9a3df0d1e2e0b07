"""What k-means and mixtures share: rounds that find starting points among the clients' examples, then their own; evaluation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.algorithms._seeding import Seeding
from fedsim.data import FederatedData
from fedsim.execution import Evaluation, Jit, evaluate, split
from fedsim.metrics import per_example
from fedsim.model import Model


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clusters(Seeding):
    """Clusters of examples: k points to start from, moments, a maximization, and `scores` of examples that are evaluated.

    Points are started as in k-means++ from the examples of the clients that take part, a point a round, or given. Only then
    does `maximize` get moments. Subclasses write ``no_moments``, `moments`, `maximize` and `scores`.

    Attributes:
      num_features: numbers per example; an example of another shape is flattened.
      num_clusters: k.
      start: points to start from, ``[num_clusters, num_features]``; None: k-means++.
      feature, batches: see `Statistics`.

    >>> Clusters(num_features=2, num_clusters=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_clusters >= 1, got num_clusters=0: give a positive whole number.
    """

    def scores(self, shared: Any, x: jax.Array) -> dict[str, jax.Array]:
        """What `evaluate` reports of examples ``float32 [n, features]``: by name, ``float32 [n]``."""
        raise NotImplementedError(f"{type(self).__name__} must define scores.")

    def evaluate(self, state: Any, data: FederatedData) -> Evaluation:
        """Means of `scores` over all examples, and over each client's."""
        state = split(state).server
        self.check(data)
        execution = self.execution if isinstance(self.execution, Jit) else None
        return evaluate(self._scorer, self.broadcast(state), data, execution=execution)

    @functools.cached_property
    def _scorer(self) -> Model:
        def scores(shared: Any, examples: Any, key: Any = None) -> dict[str, jax.Array]:
            return self.scores(shared, self.numbers(examples))

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
