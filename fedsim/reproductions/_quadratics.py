"""Quadratic functions as a model and as data, and the rounds until they are minimized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.algorithm import Algorithm
from fedsim.data import Cohort, FederatedData
from fedsim.model import Model

_TOGETHER = 50
_DIVERGED = 1e6


def quadratic(start: np.ndarray) -> Model:
    """Returns the model x of examples f(x) = 1/2 x' hessian x - slope' x, which begins at ``start``, ``float32 [d]``.

    >>> model = quadratic(np.array([2.0, 0.0], np.float32))
    >>> examples = {"hessian": jnp.eye(2)[None], "slope": jnp.array([[1.0, 0.0]])}
    >>> model.apply_for_eval(model.init(jax.random.key(0)), examples).tolist()
    [0.0]
    """

    def value(params: Any, examples: Mapping[str, jax.Array], key: Any = None) -> jax.Array:
        x = params["x"]
        return 0.5 * jnp.einsum("i,nij,j->n", x, examples["hessian"], x) - examples["slope"] @ x

    (d,) = start.shape
    return Model(
        init=lambda key: {"x": jnp.asarray(start)},
        apply_for_train=value,
        apply_for_eval=value,
        loss=lambda examples, outputs: outputs,
        metrics={},
        features={
            "hessian": jax.ShapeDtypeStruct((d, d), jnp.float32),
            "slope": jax.ShapeDtypeStruct((d,), jnp.float32),
        },
    )


def functions(hessians: np.ndarray, slopes: np.ndarray) -> FederatedData:
    """Returns clients with one function each, from ``[clients, d, d]`` and ``[clients, d]``.

    >>> functions(np.ones([2, 1, 1]), np.zeros([2, 1])).num_clients
    2
    """
    columns = {"hessian": hessians.astype(np.float32), "slope": slopes.astype(np.float32)}
    return FederatedData.from_arrays(columns, sizes=[1] * len(slopes))


def measure_rounds(
    algorithm: Algorithm,
    state: Any,
    data: FederatedData,
    *,
    measure: Callable[[Any], Any],
    target: float,
    most: int,
) -> np.ndarray:
    """Trains with all clients until a measure is below a target, and returns the measure after each round, ``[rounds]``.

    Args:
      algorithm: any algorithm.
      state: its state before the first round.
      data: the clients.
      measure: a function from the info of several rounds to the measure after each of them.
      target: the target. The last round that is returned is the first one below it, if there is one.
      most: the largest number of rounds. There are fewer, too, if the measure exceeds 1e6 or is not finite.
    """
    everyone, found = np.arange(data.num_clients), [np.zeros(0, np.float32)]
    for done in range(0, most, _TOGETHER):
        cohorts = [Cohort(data, everyone, round, rng.root(0)) for round in range(done, min(done + _TOGETHER, most))]
        state, info = algorithm.apply_rounds(state, cohorts, max_rounds=_TOGETHER)
        values = np.asarray(measure(info))
        if (values < target).any():
            found.append(values[: 1 + int(np.argmax(values < target))])
            break
        found.append(values)
        if not values[-1] < _DIVERGED:
            break
    return np.concatenate(found)
