"""Statistics that are merged by addition, and the form in which a metric returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.names import better_by_name

Examples = Mapping[str, jax.Array]
Metric = Callable[[Examples, Any], Any]
Better = Literal["higher", "lower"]


class Statistic(Protocol):
    """The interface of what a metric returns: a pytree of arrays that is merged by adding its leaves.

    For a batch of ``n`` examples, every leaf is an array ``[n, ...]`` or a `Sparse` value, with an entry for each example.
    Summed over examples, a leaf is ``[...]``. The sums of several clients have the leading axis ``[clients]``, so ``result``
    and ``weight`` must accept leading axes, in NumPy and in JAX arrays.

    A statistic may have an attribute ``better``, "higher" or "lower": which values are better. Without it, or if it is None, no
    worst clients and no best checkpoint are determined by the metric. See `better_of`.

    >>> from typing import NamedTuple
    >>> class RootMeanSquare(NamedTuple):
    ...     squares: Any
    ...     weight: Any
    ...     better = "lower"
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


class _Mean(NamedTuple):
    total: Any
    weight: Any


class Mean(_Mean):
    """A weighted mean before the division: a named tuple of ``total`` and ``weight``.

    Attributes:
      total: the sum of weight times value, ``[...]``.
      weight: the sum of weights, of the same shape.
      better: which means are better, "higher" or "lower"; None if this is not known. It is no leaf of the pytree.

    Raises:
      ValueError: ``better`` is none of these.

    >>> a, b = Mean(3.0, 4.0, better="higher"), Mean(1.0, 1.0)
    >>> float(a.merge(b).result()), a.merge(b).better
    (0.8, 'higher')
    >>> float(Mean(0.0, 0.0).result())
    nan
    """

    better: ClassVar[Better | None] = None

    def __new__(cls, total: Any, weight: Any, better: Better | None = None) -> Mean:
        if better is not None:
            checks.one_of(*get_args(Better), better=better)
            cls = _HigherIsBetter if better == "higher" else _LowerIsBetter
        return super().__new__(cls, total, weight)

    def merge(self, other: Mean) -> Mean:
        """Returns the mean over both sets of examples."""
        return self._replace(total=self.total + other.total, weight=self.weight + other.weight)

    def result(self) -> Any:
        """Returns ``total / weight``, and NaN where the weight is 0: without examples there is no mean."""
        return divide(self.total, self.weight, otherwise=np.nan)


# Classes, because JAX makes a named tuple again from its class and its leaves.
class _HigherIsBetter(Mean):
    better = "higher"


class _LowerIsBetter(Mean):
    better = "lower"


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
      values: the entries, ``[n, m]`` of any number type.
      shape: the shape of the array of one example.

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
    """Returns whether a leaf of a statistic is `Sparse`; for use as ``is_leaf`` of functions of `jax.tree`.

    >>> is_sparse(Sparse.of(jnp.array([2, 0]), shape=(3,))), is_sparse(jnp.zeros(3))
    (True, False)
    """
    return isinstance(leaf, Sparse)


def array_module(statistic: Any) -> ModuleType:
    """Returns ``jax.numpy`` if a leaf is a JAX array, otherwise ``numpy``."""
    return jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(statistic)) else np


def divide(total: Any, weight: Any, otherwise: float = 0.0) -> Any:
    """Returns ``total / weight``, and ``otherwise`` where the weight is 0; in ``float32`` for JAX arrays.

    >>> divide(np.array([3.0, 5.0]), np.array([2.0, 0.0])).tolist()
    [1.5, 0.0]
    """
    xp = array_module((total, weight))
    total, weight = (jnp.asarray(x, jnp.float32) if xp is jnp else np.asarray(x) for x in (total, weight))
    return xp.where(weight == 0, otherwise, total / xp.where(weight == 0, 1, weight))


class MeanLoss(NamedTuple):
    """The mean of losses that are added batch by batch, ``float32``; 0 without examples.

    Its rounding error does not grow with the number of batches.

    Attributes:
      total: the sum of count times loss, ``float32 [...]``.
      num_examples: of the same shape.

    >>> losses = MeanLoss.zero().add(jnp.float32(0.5), jnp.float32(3)).add(jnp.float32(1.0), jnp.float32(1))
    >>> float(losses.result()), float(MeanLoss.zero().result())
    (0.625, 0.0)
    """

    total: tree.Total
    num_examples: tree.Total

    @classmethod
    def zero(cls, shape: tuple[int, ...] = ()) -> MeanLoss:
        """Returns the mean of no losses; of several means, for example one for each domain, with a shape."""
        return cls(*(tree.Total.of(jnp.zeros(shape, jnp.float32)) for _ in range(2)))

    def add(self, loss: jax.Array, count: jax.Array) -> MeanLoss:
        """Returns the mean with a further batch: its mean loss, and its number of examples."""
        return MeanLoss(self.total.add(loss.astype(jnp.float32) * count), self.num_examples.add(count))

    def merge(self, other: MeanLoss) -> MeanLoss:
        """Returns the mean over both sets of batches."""
        return MeanLoss(self.total.merge(other.total), self.num_examples.merge(other.num_examples))

    def result(self) -> jax.Array:
        """Returns the mean, ``float32 [...]``."""
        return divide(self.total.value(), self.num_examples.value())


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of ``values [n]`` where ``mask [n]`` is true, and 0 if the mask is false everywhere.

    >>> float(masked_mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])))
    2.0
    """
    weight = mask.astype(values.dtype)
    # A masked value may be inf or NaN (padding rows are arbitrary), so it is replaced, not multiplied by 0.
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(weight), 1)


def per_example(values: jax.Array, better: Better | None = None) -> Mean:
    """Returns the statistic of a metric that has one value per example, ``values [n]``, with equal weights.

    Args:
      values: one number per example.
      better: which values are better, "higher" or "lower"; None if this is not known.

    >>> statistic = per_example(jnp.array([0.5, 2.5]), better="lower")
    >>> statistic.weight.tolist(), statistic.better
    ([1, 1], 'lower')
    """
    return Mean(values, jnp.ones_like(values, dtype=jnp.int32), better)


class Score(float):
    """A number that says whether higher or lower values of it are better, for evaluations that return numbers by name.

    Args:
      value: the number.
      better: "higher" or "lower".

    Raises:
      ValueError: ``better`` is neither.

    >>> score = Score(0.25, better="lower")
    >>> score + 1, score.better
    (1.25, 'lower')
    """

    def __new__(cls, value: float, better: Better) -> Score:
        checks.one_of(*get_args(Better), better=better)
        return super().__new__(cls, value)

    def __init__(self, value: float, better: Better) -> None:
        self.better = better


def better_of(name: str, value: Any) -> Better | None:
    """Returns which values of a metric are better: "higher", "lower", or None if this is not known.

    A statistic or a `Score` says it by its attribute ``better``. If it does not, lower values of a metric called "loss" are
    better, and higher ones of one called "accuracy", also with ``personal_`` before the name. Nothing follows from other names.

    >>> better_of("error", Mean(3.0, 4.0, better="lower")), better_of("error", 0.75), better_of("loss", 0.75)
    ('lower', None, 'lower')
    """
    return getattr(value, "better", None) or better_by_name(name)
