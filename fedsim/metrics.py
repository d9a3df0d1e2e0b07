"""Metrics as mergeable sums: a mean is a total and a weight, and two means merge by adding both.

Every metric of fedsim is a function ``(examples, outputs) -> Mean`` whose two leaves hold one value per
example. Summed over any set of examples (a batch, a client, a device, a population) and in any order, they
give the same mean, so the clients' values and the global value come out of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Examples = Mapping[str, jax.Array]


class Mean(NamedTuple):
    """A weighted mean that has not been divided yet.

    Attributes:
      total: sum of weight times value, ``float32 [...]``.
      weight: sum of weights, ``float32 [...]``, same shape as ``total``.

    >>> a, b = Mean(3.0, 4.0), Mean(1.0, 1.0)
    >>> float(a.merge(b).result())
    0.800000011920929
    >>> float(Mean(0.0, 0.0).result())
    0.0
    """

    total: jax.Array | float
    weight: jax.Array | float

    def merge(self, other: Mean) -> Mean:
        """The mean over both sets of examples."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def result(self) -> jax.Array:
        """``total / weight``, and 0 where the weight is 0 (no examples: nothing to say)."""
        weight = jnp.asarray(self.weight, jnp.float32)
        safe = jnp.where(weight == 0, 1.0, weight)
        return jnp.where(weight == 0, 0.0, jnp.asarray(self.total, jnp.float32) / safe)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of ``values [n]`` where ``mask [n]`` is true; 0 if it is true nowhere.

    >>> float(masked_mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
    2.0
    """
    weight = mask.astype(values.dtype)
    # A masked value may be inf or NaN (padding rows are arbitrary), so it is replaced, not multiplied by 0.
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(weight), 1)


def cross_entropy(examples: Examples, outputs: jax.Array) -> jax.Array:
    """Softmax cross-entropy of logits ``float32 [n, classes]`` with labels ``examples["y"] int [n]``, in nats.

    >>> losses = cross_entropy({"y": jnp.array([0])}, jnp.zeros([1, 2]))
    >>> [round(float(loss), 4) for loss in losses]
    [0.6931]
    """
    labels = examples["y"].astype(jnp.int32)
    picked = jnp.take_along_axis(outputs, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(outputs, axis=1) - picked


def squared_error(examples: Examples, outputs: jax.Array) -> jax.Array:
    """Squared difference of outputs ``float32 [n]`` from targets ``examples["y"] float32 [n]``.

    >>> squared_error({"y": jnp.array([1.0, 2.0])}, jnp.array([1.0, 5.0])).tolist()
    [0.0, 9.0]
    """
    return jnp.square(outputs - examples["y"])


def accuracy(examples: Examples, outputs: jax.Array) -> Mean:
    """Fraction of examples whose largest logit is at the label ``examples["y"]``.

    >>> mean = accuracy({"y": jnp.array([1, 0])}, jnp.array([[0.0, 1.0], [0.0, 1.0]]))
    >>> mean.total.tolist(), mean.weight.tolist()
    ([1.0, 0.0], [1.0, 1.0])
    """
    return per_example((jnp.argmax(outputs, axis=1) == examples["y"]).astype(jnp.float32))


def per_example(values: jax.Array) -> Mean:
    """The metric whose value of each example is ``values [n]``: a loss, say.

    >>> per_example(jnp.array([0.5, 2.5])).weight.tolist()
    [1.0, 1.0]
    """
    return Mean(values, jnp.ones_like(values))
