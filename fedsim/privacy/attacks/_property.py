"""Property inference: whether a client's examples have a property, from its update.

L. Melis, C. Song, E. De Cristofaro, V. Shmatikov, "Exploiting unintended feature leakage in collaborative learning", S&P 2019,
section 4 and algorithm 3, single batches: https://arxiv.org/abs/1805.04049. Deviation: the classifier is a logistic
regression on standardized updates, not a random forest.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.algorithm import Algorithm, map_clients
from fedsim.data import Cohort
from fedsim.rounds import parts_of


def sent_updates(algorithm: Algorithm, state: Any, cohort: Cohort) -> np.ndarray:
    """Returns the update of every client as its local training computes it, ``float32 [clients, d]``.

    This is what a server without secure aggregation sees, and what an attacker computes from examples of its own.

    Args:
      algorithm: which defines ``client_update``, and whose clients keep no memory.
      state: before the round.
      cohort: the clients.

    Raises:
      ValueError: the clients keep a memory, or the model has running statistics, or frozen or kept parts.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> sent_updates(algorithm, algorithm.init(jax.random.key(0)), Cohort.of(data, data.client_ids[:3])).shape
    (3, 650)
    """
    if type(algorithm).client_memory is not Algorithm.client_memory:
        raise ValueError(
            f"Expected an algorithm whose clients keep no memory, got {type(algorithm).__name__}: its updates depend on the "
            "rounds before. Use FedAvg."
        )
    if parts_of(state).parts != ():
        raise ValueError(
            "Expected a model without running statistics and without frozen or kept parts, got one that has some: use a model "
            "without."
        )
    shared = algorithm.broadcast(parts_of(state).server)

    def work(shared: Any, client: Any) -> Any:
        return algorithm.client_update(shared, client).update

    updates = map_clients(work, shared, cohort, batches=algorithm.batches)
    leaves = [np.asarray(leaf).reshape(cohort.slots, -1) for leaf in jax.tree.leaves(updates)]
    return np.concatenate(leaves, axis=1)[: len(cohort)]


def property_scores(shadows: Any, has_property: Any, updates: Any, *, regularization: float = 1.0) -> np.ndarray:
    """Returns log-odds that the clients of updates have the property, by a linear classifier of the attacker's own updates.

    Args:
      shadows: ``[k, d]``, updates that the attacker computes from examples of its own, with the model of the round.
      has_property: ``bool [k]``, which of these have the property.
      updates: ``[n, d]``, the updates that are attacked.
      regularization: the weight of the squared norm of the classifier, per coordinate of standardized updates.

    Returns:
      ``float64 [n]``, above 0 for clients that are said to have the property.

    Raises:
      ValueError: the shapes do not fit, or all shadows agree in the property.
      ImportError: scikit-learn is not installed.

    >>> draw = np.random.default_rng(0)
    >>> has = draw.random(100) < 0.5
    >>> updates = draw.normal(size=[100, 5]) + np.where(has, 3.0, 0.0)[:, None]
    >>> found = property_scores(updates[:50], has[:50], updates[50:]) > 0
    >>> float((found == has[50:]).mean())
    1.0
    """
    shadows, updates, has_property = np.asarray(shadows), np.asarray(updates), np.asarray(has_property)
    if shadows.ndim != 2 or updates.shape[1:] != shadows.shape[1:] or has_property.shape != shadows.shape[:1]:
        raise ValueError(
            f"Expected shadows [k, d], has_property bool [k] and updates [n, d], got {list(shadows.shape)}, "
            f"{list(has_property.shape)} and {list(updates.shape)}."
        )
    if len(np.unique(has_property)) != 2:
        raise ValueError("Expected shadows with and without the property, got one kind: draw more shadow clients.")
    checks.positive(regularization=regularization)
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError("Property inference needs scikit-learn: pip install scikit-learn.") from error
    strength = 1 / (regularization * shadows.shape[1])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    return classifier.fit(shadows.astype(np.float64), has_property).decision_function(updates.astype(np.float64))
