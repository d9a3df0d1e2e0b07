"""Objectives of `fedsim.tune`: functions of the state after the last round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.model import Model

_ROWS = 4096  # how many examples the model reads at a time


def validation_loss(model: Model, data: FederatedData, *, worst: float | None = None) -> Callable[[Any], jax.Array]:
    """Returns a function from a state to the loss of ``state.params`` on some data, ``float32 []``, which `jax.grad` accepts.

    Args:
      model: the model, which is evaluated without dropout.
      data: the examples; all of them are on the device.
      worst: None means the mean over all examples. A fraction in (0, 1] means the mean over this fraction of the clients, those
        with the largest losses and at least one client, of each client's mean loss: 1e-6 is the loss of the worst client.

    Raises:
      ValueError: the model cannot read the data, ``worst`` is not in (0, 1], or no client has examples.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.arange(384, dtype=np.uint8).reshape(6, 8, 8, 1) % 17, "y": np.arange(6, dtype=np.int32)}, sizes=[4, 2])
    >>> model = fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedSGD(model=model)
    >>> state = algorithm.init(jax.random.key(0))
    >>> evaluation = fedsim.evaluate(model, state.params, data)
    >>> bool(jnp.isclose(validation_loss(model, data)(state), evaluation.overall["loss"]))
    True
    >>> bool(jnp.isclose(validation_loss(model, data, worst=1e-6)(state), jnp.nanmax(evaluation.clients["loss"].result())))
    True
    """
    checks.instance(Model, "fedsim.models.digits_logistic()", model=model)
    checks.instance(FederatedData, "fedsim.datasets.load('digits').test", data=data)
    checks.number(above=0, most=1, or_none=True, worst=worst)
    model.check(data)
    count, present = int(data.sizes.sum()), data.sizes > 0
    if not count:
        raise ValueError("Expected data with examples, got clients without any.")
    chunks = -(-count // _ROWS)
    rows = np.resize(np.arange(count), (chunks, -(-count // chunks)))  # a few examples twice, which are cut off below
    columns = {name: jnp.asarray(np.asarray(data.columns[name])[rows]) for name in model.features}
    owner = jnp.asarray(np.repeat(np.arange(data.num_clients), data.sizes))

    def loss(state: Any) -> jax.Array:
        @jax.checkpoint  # so that the activations of one chunk at a time are stored
        def of_chunk(examples: dict[str, jax.Array]) -> jax.Array:
            return model.losses(examples, model.apply_for_eval(state.params, examples))

        losses = jax.lax.map(of_chunk, columns).ravel()[:count]
        if worst is None:
            return jnp.mean(losses)
        totals = jnp.zeros(data.num_clients, jnp.float32).at[owner].add(losses)
        means = totals[np.flatnonzero(present)] / data.sizes[present].astype(np.float32)
        return jnp.mean(jax.lax.top_k(means, max(1, math.ceil(worst * present.sum() - 1e-9)))[0])

    return loss
