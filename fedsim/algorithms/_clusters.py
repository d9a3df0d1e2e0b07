"""Base class of k-means and Gaussian mixtures: initial points, updates from moments of the examples, and evaluation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.algorithms._seeding import Seeding
from fedsim.data import FederatedData
from fedsim.evaluation import Evaluation, evaluate
from fedsim.execution import Jit, server_state
from fedsim.model import Model


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clusters(Seeding):
    """Base class of clustering algorithms: initial points, moments, a maximization step, and `scores` for evaluation.

    The initial points are ``start``, or are chosen by k-means++ from the examples of the clients that participate, one point
    per round. `maximize` receives moments only after that. Subclasses define ``no_moments``, `moments`, `maximize` and
    `scores`.

    Attributes:
      num_features: numbers per example. An example of another shape is flattened.
      num_clusters: k.
      start: the initial points, ``[num_clusters, num_features]``. None uses k-means++.
      feature, batches: see `Statistics`.

    >>> Clusters(num_features=2, num_clusters=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_clusters >= 1, got num_clusters=0: give a positive whole number.
    """

    def scores(self, shared: Any, x: jax.Array) -> dict[str, jax.Array]:
        """Returns what `evaluate` reports for examples ``float32 [n, features]``: a dict from name to ``float32 [n]``."""
        raise NotImplementedError(f"{type(self).__name__} must define scores.")

    def evaluate(self, state: Any, data: FederatedData) -> Evaluation:
        """Returns the means of `scores` over all examples, and over the examples of each client."""
        state = server_state(state)
        self.check(data)
        execution = self.execution if isinstance(self.execution, Jit) else None
        return evaluate(self._scorer, self.broadcast(state), data, execution=execution)

    @functools.cached_property
    def _scorer(self) -> Model:
        def scores(shared: Any, examples: Any, key: Any = None) -> dict[str, jax.Array]:
            return self.scores(shared, self.flat_features(examples))

        like = jnp.zeros((1, self.num_features), jnp.float32)
        names = jax.eval_shape(self.scores, self.broadcast(self.init(jax.random.key(0))), like)
        metrics = {name: lambda examples, scores, name=name: scores[name] for name in names}
        cost = next(iter(names))
        return Model(
            init=self.init,
            apply_for_train=scores,
            apply_for_eval=scores,
            loss=lambda examples, scores: scores[cost],
            metrics=metrics,
            features={},
        )
