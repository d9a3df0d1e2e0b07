"""Base class of clusters and principal components: examples as vectors, and the evaluation of a state on examples."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.algorithms._statistics import Statistics
from fedsim.data import FederatedData
from fedsim.evaluation import Evaluation, evaluate
from fedsim.execution import Jit
from fedsim.metrics import Better, Metric, per_example
from fedsim.model import Model
from fedsim.rounds import server_state


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FlatFeatures(Statistics):
    """An algorithm that reads examples as vectors. Subclasses define `scores`, by which `evaluate` evaluates a state,
    and set ``better = "higher"`` if higher scores are better.

    Attributes:
      num_features: numbers per example. An example of another shape is flattened.
      feature, batches: see `Statistics`.

    >>> FlatFeatures(num_features=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_features >= 1, got num_features=0: give a positive whole number.
    """

    num_features: int

    better: ClassVar[Better] = "lower"  # which scores are better

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_features=self.num_features)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        shape = data.columns[self.feature].shape[1:]
        if math.prod(shape) != self.num_features:
            raise ValueError(
                f"Expected num_features={math.prod(shape)}, the size of an example in {self.feature!r}, got "
                f"{self.num_features}."
            )

    def flat_features(self, examples: Any) -> jax.Array:
        """Returns a batch's examples, ``float32 [n, features]``."""
        return examples[self.feature].reshape(-1, self.num_features).astype(jnp.float32)

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

        def metric(name: str) -> Metric:
            return lambda examples, scores: per_example(scores[name], self.better)

        cost = next(iter(names))
        return Model(
            init=self.init,
            apply_for_train=scores,
            apply_for_eval=scores,
            loss=lambda examples, scores: scores[cost],
            metrics={name: metric(name) for name in names},
            features={},
        )
