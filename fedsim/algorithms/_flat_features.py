"""Examples as vectors, and the evaluation of a state by scores of vectors, for clusters and principal components."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.data import FederatedData
from fedsim.evaluation import Evaluation, evaluate
from fedsim.execution import Jit
from fedsim.metrics import Better, Metric, per_example
from fedsim.model import Model
from fedsim.rounds import server_state


def vectors(column: jax.Array) -> jax.Array:
    """Returns the examples ``[n, ...]`` of a column as vectors, ``float32 [n, features]``."""
    return column.reshape(len(column), math.prod(column.shape[1:])).astype(jnp.float32)


def check_num_features(num_features: int, feature: str, data: FederatedData) -> None:
    """Raises ``ValueError`` unless an example of the feature has ``num_features`` numbers."""
    size = math.prod(data.columns[feature].shape[1:])
    if size != num_features:
        raise ValueError(f"Expected num_features={size}, the size of an example in {feature!r}, got {num_features}.")


def evaluate_scores(algorithm: Any, model: Model, state: Any, data: FederatedData) -> Evaluation:
    """Returns the means of an algorithm's scores over all examples, and over the examples of each client."""
    state = server_state(state)
    algorithm.check(data)
    execution = algorithm.execution if isinstance(algorithm.execution, Jit) else None
    return evaluate(model, algorithm.broadcast(state), data, execution=execution)


def scorer(algorithm: Any, better: Better) -> Model:
    """Returns a model for `evaluate_scores`. Its parameters are what the algorithm broadcasts, and its metrics are the
    entries of ``algorithm.scores(shared, x)``, a dict from name to ``float32 [n]``, for examples ``x float32 [n, features]``.
    """

    def scores(shared: Any, examples: Any, key: Any = None) -> dict[str, jax.Array]:
        return algorithm.scores(shared, vectors(examples[algorithm.feature]))

    def metric(name: str) -> Metric:
        return lambda examples, scores: per_example(scores[name], better)

    like = jnp.zeros((1, algorithm.num_features), jnp.float32)
    names = jax.eval_shape(algorithm.scores, algorithm.broadcast(algorithm.init(jax.random.key(0))), like)
    return Model(
        init=algorithm.init,
        apply_for_train=scores,
        apply_for_eval=scores,
        loss=lambda examples, scores: next(iter(scores.values())),
        metrics={name: metric(name) for name in names},
        features={},
    )
