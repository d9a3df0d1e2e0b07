"""Statistics that are merged by addition, and the form in which a metric returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Examples = Mapping[str, jax.Array]
Metric = Callable[[Examples, Any], Any]


class Statistic(Protocol):
    """The interface of what a metric returns: a pytree of arrays that is merged by adding its leaves.

    For a batch of ``n`` examples, every leaf is an array ``[n, ...]`` or a `Sparse` value, with an entry for each example.
    Summed over examples, a leaf is ``[...]``. The sums of several clients have the leading axis ``[clients]``, so ``result``
    and ``weight`` must accept leading axes, in NumPy and in JAX arrays.

    >>> class RootMeanSquare(NamedTuple):
    ...     squares: Any
    ...     weight: Any
    ...     def result(self): return Mean(self.squares, self.weight).result() ** 0.5
    >>> def rms(examples, outputs): return RootMeanSquare(outputs**2, jnp.ones(len(outputs), jnp.int32))
    >>> statistic = rms({}, jnp.array([1.0, 7.0]))
    >>> float(jax.tree.map(lambda leaf: np.sum(leaf, axis=0), statistic).result())
    5.0
    """

    @property
    def weight(self) -> Any:
        """How much data the statistic is of, ``[...]``. `Evaluation.over_clients` leaves out clients of weight 0."""

    def result(self) -> Any:
        """Returns the value of the metric, ``[...]`` or ``[..., shape of one value]``."""


class Mean(NamedTuple):
    """A weighted mean before the division.

    Attributes:
      total: the sum of weight times value, ``[...]``.
      weight: the sum of weights, of the same shape.

    >>> a, b = Mean(3.0, 4.0), Mean(1.0, 1.0)
    >>> float(a.merge(b).result())
    0.8
    >>> float(Mean(0.0, 0.0).result())
    0.0
    """

    total: Any
    weight: Any

    def merge(self, other: Mean) -> Mean:
        """Returns the mean over both sets of examples."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def result(self) -> Any:
        """Returns ``total / weight``, and 0 where the weight is 0."""
        return divide(self.total, self.weight)


class Sum(NamedTuple):
    """A sum over examples.

    Attributes:
      total: the sum of one number per example, ``[...]``, or of one array per example, ``[..., shape]``.

    >>> int(Sum(3).result())
    3
    """

    total: Any

    @property
    def weight(self) -> Any:
        """The absolute value of the total."""
        return abs(self.total)

    def result(self) -> Any:
        """Returns the total."""
        return self.total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
    """An array per example in which few entries are not zero: a leaf of the statistic of a batch.

    A metric that counts into a large array, such as a confusion matrix, returns this in place of the arrays of all examples.

    Attributes:
      index: the positions of the entries in the flattened array, ``int32 [n, m]``. Values at a repeated position are added.
      values: the entries, ``[n, m]``.
      shape: the shape of the array.

    >>> Sparse.of(jnp.array([2, 0]), shape=(3,)).dense().tolist()
    [[0, 0, 1], [1, 0, 0]]
    """

    index: Any
    values: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, index: jax.Array, shape: Sequence[int], values: Any = 1) -> Sparse:
        """Returns ``values`` (broadcast to ``index``) at flat positions ``index``, ``[n]`` or ``[n, m]``.

        Values at positions out of range are dropped.
        """
        index = jnp.asarray(index, jnp.int32)
        index = index[:, None] if index.ndim == 1 else index
        values = jnp.asarray(values)
        values = jnp.broadcast_to(values[:, None] if values.ndim == 1 else values, index.shape)
        in_range = (index >= 0) & (index < int(np.prod(shape)))
        zero = jnp.zeros((), values.dtype)
        return cls(jnp.where(in_range, index, 0), jnp.where(in_range, values, zero), tuple(shape))

    def dense(self) -> jax.Array:
        """Returns the arrays of all examples, ``[n, *shape]``."""
        n, size = self.index.shape[0], int(np.prod(self.shape))
        arrays = jnp.zeros((n, size), self.values.dtype).at[jnp.arange(n)[:, None], self.index].add(self.values)
        return arrays.reshape(n, *self.shape)


def is_sparse(leaf: Any) -> bool:
    """Returns whether a leaf of a statistic is `Sparse`."""
    return isinstance(leaf, Sparse)


def array_module(statistic: Any) -> ModuleType:
    """Returns ``jax.numpy`` if a leaf is a JAX array, otherwise ``numpy``."""
    return jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(statistic)) else np


def divide(total: Any, weight: Any) -> Any:
    """Returns ``total / weight``, and 0 where the weight is 0; in ``float32`` for JAX arrays."""
    xp = array_module((total, weight))
    total, weight = (jnp.asarray(x, jnp.float32) if xp is jnp else np.asarray(x) for x in (total, weight))
    return xp.where(weight == 0, 0.0, total / xp.where(weight == 0, 1, weight))


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of ``values [n]`` where ``mask [n]`` is true, and 0 if the mask is false everywhere.

    >>> float(masked_mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
    2.0
    """
    weight = mask.astype(values.dtype)
    # A masked value may be inf or NaN (padding rows are arbitrary), so it is replaced, not multiplied by 0.
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(weight), 1)


def per_example(values: jax.Array) -> Mean:
    """Returns the statistic of a metric that has one value per example, ``values [n]``, with equal weights.

    >>> per_example(jnp.array([0.5, 2.5])).weight.tolist()
    [1, 1]
    """
    return Mean(values, jnp.ones_like(values, dtype=jnp.int32))
