"""Losses and accuracies of one label, or one set of labels, per example."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.metrics._statistics import Examples, Mean, per_example


def cross_entropy(examples: Examples, outputs: jax.Array) -> jax.Array:
    """Returns the softmax cross-entropy of logits ``float32 [n, classes]`` with labels ``examples["y"] int [n]``, in nats.

    >>> losses = cross_entropy({"y": jnp.array([0])}, jnp.zeros([1, 2]))
    >>> [round(float(loss), 4) for loss in losses]
    [0.6931]
    """
    labels = examples["y"].astype(jnp.int32)
    picked = jnp.take_along_axis(outputs, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(outputs, axis=1) - picked


def squared_error(examples: Examples, outputs: jax.Array) -> jax.Array:
    """Returns the squared difference of outputs ``float32 [n]`` and targets ``examples["y"] [n]``, floats or whole numbers.

    >>> squared_error({"y": jnp.array([1.0, 2.0])}, jnp.array([1.0, 5.0])).tolist()
    [0.0, 9.0]
    """
    return jnp.square(outputs - examples["y"].astype(outputs.dtype))


def accuracy(examples: Examples, outputs: jax.Array) -> Mean:
    """The fraction of examples whose largest logit is that of the label. An example with a logit that is NaN is a miss.

    Labels are ``examples["y"] int [n]``, and outputs are logits ``[n, classes]``.

    Raises:
      ValueError: outputs have one class.

    >>> mean = accuracy({"y": jnp.array([1, 0])}, jnp.array([[0.0, 1.0], [0.0, 1.0]]))
    >>> mean.total.tolist(), mean.weight.tolist()
    ([1, 0], [1, 1])
    """
    return per_example((predicted_class(outputs) == examples["y"]).astype(jnp.int32), better="higher")


@dataclasses.dataclass(frozen=True)
class TopKAccuracy:
    """The fraction of examples whose label is among the ``k`` classes with the largest logits.

    Labels are ``examples["y"] int [n]``, and outputs are logits ``[n, classes]``. Of equal logits, those of lower classes
    come first.

    Attributes:
      k: the number of classes.

    Raises:
      ValueError: ``k`` is not a positive whole number, or outputs have one class.

    >>> logits = jnp.array([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]])
    >>> TopKAccuracy(2)({"y": jnp.array([2, 2])}, logits).total.tolist()
    [1, 0]
    """

    k: int

    def __post_init__(self) -> None:
        checks.whole(1, k=self.k)

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        return per_example(in_top_k(outputs, examples["y"], self.k).astype(jnp.int32), better="higher")


@dataclasses.dataclass(frozen=True)
class RecallAtK:
    """The fraction of all labels that are among the ``k`` classes with the largest logits, for several labels per example.

    Labels are ``examples["y"] [n, classes]``, 1 for each class that the example belongs to and otherwise 0, and outputs are
    logits ``[n, classes]``. Examples are weighted by their number of labels, so those without labels do not count.

    Attributes:
      k: the number of classes, reduced to all of them if there are fewer.

    Raises:
      ValueError: ``k`` is not a positive whole number.

    >>> mean = RecallAtK(1)({"y": jnp.array([[1, 1, 0], [0, 0, 0]])}, jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]))
    >>> mean.total.tolist(), mean.weight.tolist()
    ([1, 0], [2, 0])
    """

    k: int

    def __post_init__(self) -> None:
        checks.whole(1, k=self.k)

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels = (examples["y"] != 0).astype(jnp.int32)
        largest = jax.lax.top_k(outputs, min(self.k, outputs.shape[1]))[1]
        hits = jnp.sum(jnp.take_along_axis(labels, largest, axis=1), axis=1)
        hits = jnp.where(jnp.any(jnp.isnan(outputs), axis=1), 0, hits)
        return Mean(hits, jnp.sum(labels, axis=1), better="higher")


def predicted_class(logits: jax.Array) -> jax.Array:
    """Returns the class of the largest of the logits ``[..., classes]``, ``int32 [...]``; ``classes`` where one is NaN.

    No label has that class, so a model whose outputs are NaN is never right.

    Raises:
      ValueError: there is one class, as in outputs ``[n, 1]`` of a model for two classes.
    """
    if logits.shape[-1] == 1:
        raise ValueError(
            f"Expected logits of at least two classes, got outputs of shape {list(logits.shape)}: of one logit the largest is "
            "always that of class 0. Return logits [n, 2], or use a metric of your own."
        )
    largest = jnp.argmax(logits, axis=-1)
    value = jnp.take_along_axis(logits, largest[..., None], axis=-1)[..., 0]  # NaN if one of them is
    return jnp.where(jnp.isnan(value), logits.shape[-1], largest).astype(jnp.int32)


def in_top_k(logits: jax.Array, labels: jax.Array, k: int) -> jax.Array:
    """Returns for logits ``[..., classes]`` and labels ``int [...]`` whether each label is among the ``k`` largest logits."""
    labels = labels.astype(jnp.int32)[..., None]
    own = jnp.take_along_axis(logits, labels, axis=-1)
    before = (logits > own) | ((logits == own) & (jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < labels))
    # A logit of minus infinity (a class that is ruled out) is never a hit, nor is one beside a logit that is NaN.
    is_known = predicted_class(logits) < logits.shape[-1]
    return is_known & (jnp.sum(before, axis=-1) < k) & (own[..., 0] > -jnp.inf)
