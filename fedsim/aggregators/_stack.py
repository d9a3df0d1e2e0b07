"""`StackAggregator`: base class of aggregators that need all updates of a cohort at once, such as the median."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Memory, SumAggregator, Update, inherits_aggregation

# Leaves of at most this many coordinates are not divided among devices, because every divided leaf needs communication.
_MAX_UNDIVIDED = 2**15

AllReduce = Callable[[Any], Any]


class StackedUpdates(NamedTuple):
    """The updates of a cohort and their weights, ``float32 [slots]``. Rows of clients without an update are zeros.

    A leaf ``[n, ...]`` is stored as ``[segments, slots, n / segments, ...]``. There is one segment per device if devices divide
    the leaf among themselves, and otherwise one segment.
    """

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class StackAggregator(SumAggregator):
    """Base class of aggregators that store all updates of a cohort. Subclasses define `combine` or `combine_coordinates`.

    With `combine_coordinates`, also inside an `AuxMean`, each device aggregates a segment of every leaf that has more than
    32,768 coordinates and whose first dimension is divisible by the number of devices.

    Memory grows with the cohort: every device stores slots times the size of an update in each of its lanes. If this does not
    fit, an error is raised before the first round.

    >>> class Largest(StackAggregator):
    ...     def combine(self, updates, weights):
    ...         return jax.tree.map(lambda rows: jnp.max(rows, axis=0), updates)
    >>> largest = Largest()
    >>> accumulator = largest.zero(jnp.zeros(2), slots=3)
    >>> accumulator = largest.accumulate(accumulator, jnp.array([1.0, 5.0]), jnp.float32(1), 0)
    >>> accumulator = largest.accumulate(accumulator, jnp.array([4.0, 2.0]), jnp.float32(1), 2)
    >>> largest.finish(accumulator).tolist()
    [4.0, 5.0]
    """

    def combine(self, updates: Update, weights: jax.Array) -> Update:
        """Returns the aggregate of updates ``[slots, ...]`` with weights ``float32 [slots]``. Rows of weight 0 do not count."""
        return self.combine_coordinates(updates, weights, lambda sums: sums)

    def combine_coordinates(self, updates: Update, weights: jax.Array, all_reduce: AllReduce) -> Update:
        """Aggregates the coordinates that one device holds.

        Define it instead of `combine` if each coordinate of the aggregate depends on the other coordinates only through sums
        over coordinates, such as norms. Devices then divide the coordinates among themselves.

        Args:
          updates: the coordinates on this device, ``[slots, ...]``. For leaves that are not divided, the first device has the
            rows and the other devices have zeros, whose aggregate is ignored.
          weights: ``float32 [slots]``.
          all_reduce: takes sums over the coordinates on this device, and returns sums over all coordinates. Zeros must not
            contribute to the sums. All devices must call it equally often, otherwise they wait forever. So a decision to call
            it may depend only on ``weights`` and on earlier results of ``all_reduce``.

        Returns:
          The aggregate, with the structure and shapes of one row.

        Raises:
          ValueError: the aggregate of a divided leaf has another structure or shape. If the round is a single program, the
            error is raised before the round.

        >>> class Longest(StackAggregator):
        ...     def combine_coordinates(self, updates, weights, all_reduce):
        ...         return updates[jnp.argmax(all_reduce(jnp.sum(updates**2, axis=1)))]
        >>> Longest().combine(jnp.array([[1.0, 5.0], [4.0, 2.0]]), jnp.ones(2)).tolist()
        [1.0, 5.0]
        """
        raise NotImplementedError

    def zero(self, update: Update, slots: int) -> StackedUpdates:
        return self._zero(update, slots, devices=1)

    def zero_devices(self, update: Update, slots: int, axis: str) -> StackedUpdates:
        return self._zero(update, slots, devices=jax.lax.axis_size(axis)) if self._is_divisible else self.zero(update, slots)

    def _zero(self, update: Update, slots: int, devices: int) -> StackedUpdates:
        def leaf(x: jax.Array) -> jax.Array:
            if not x.shape:
                return jnp.zeros((1, slots), x.dtype)
            segments = devices if x.size > _MAX_UNDIVIDED and x.shape[0] % devices == 0 and x.dtype != bool else 1
            return jnp.zeros((segments, slots, x.shape[0] // segments, *x.shape[1:]), x.dtype)

        return StackedUpdates(jax.tree.map(leaf, update), jnp.zeros(slots, jnp.float32))

    def accumulate(self, accumulator: StackedUpdates, update: Update, weight: jax.Array, slot: jax.Array) -> StackedUpdates:
        def leaf(rows: jax.Array, row: jax.Array) -> jax.Array:
            row = row.astype(rows.dtype).reshape(rows.shape[0], *rows.shape[2:])
            return rows.at[:, slot].set(jnp.where(weight == 0, rows[:, slot], row))

        return StackedUpdates(jax.tree.map(leaf, accumulator.updates, update), accumulator.weights.at[slot].add(weight))

    def stacked(self, accumulator: StackedUpdates) -> tuple[Update, jax.Array]:
        """Returns all updates ``[slots, ...]`` and their weights ``float32 [slots]``, for `finish_round`.

        Override `finish_round` if the aggregate needs random numbers; devices do not divide the coordinates then.

        >>> stack = StackAggregator()
        >>> updates, weights = stack.stacked(stack.accumulate(stack.zero(jnp.zeros(2), 2), jnp.ones(2), jnp.float32(3), 1))
        >>> updates.tolist(), weights.tolist()
        ([[0.0, 0.0], [1.0, 1.0]], [0.0, 3.0])
        """
        return jax.tree.map(_join_segments, accumulator.updates), accumulator.weights

    def finish(self, accumulator: StackedUpdates) -> Update:
        return self.combine(*self.stacked(accumulator))

    def finish_round_devices(
        self, accumulator: StackedUpdates, memory: Memory, key: jax.Array, axis: str
    ) -> tuple[Update, Memory]:
        leaves, structure = jax.tree.flatten(accumulator.updates if self._is_divisible else ())
        segments = [rows.shape[0] for rows in leaves]
        if max(segments, default=1) == 1:
            return super().finish_round_devices(accumulator, memory, key, axis)
        divided = [i for i, count in enumerate(segments) if count > 1]
        others = [i for i, count in enumerate(segments) if count == 1]
        first = jax.lax.axis_index(axis) == 0
        # Every row was written by one device and is zero on all other devices, so a sum collects the rows.
        whole, weights = tree.psum(([leaves[i] for i in others], accumulator.weights), axis)
        for i, rows in zip(others, whole, strict=True):
            leaves[i] = jnp.where(first, rows[0], 0).astype(leaves[i].dtype)
        for i in divided:
            leaves[i] = jax.lax.psum_scatter(leaves[i], axis, tiled=True)[0]
        own = jax.tree.unflatten(structure, leaves)
        aggregate = jax.tree.map(jnp.asarray, self.combine_coordinates(own, weights, lambda sums: tree.psum(sums, axis)))
        got, expected = _form(aggregate), _form(jax.eval_shape(lambda rows: jax.tree.map(lambda leaf: leaf[0], rows), own))
        if got != expected:
            raise ValueError(
                f"Expected {type(self).__name__}.combine_coordinates to return {expected}, the form of one row, "
                f"got {got}. For an aggregate of another form, define combine instead, which receives whole updates."
            )
        leaves = jax.tree.leaves(aggregate)
        firsts = tree.psum([jnp.where(first, leaves[i], jnp.zeros_like(leaves[i])) for i in others], axis)
        for i, x in zip(others, firsts, strict=True):
            leaves[i] = x.astype(leaves[i].dtype)  # The sum of booleans has an integer dtype.
        for i in divided:
            leaves[i] = jax.lax.all_gather(leaves[i], axis, tiled=True)
        return jax.tree.unflatten(structure, leaves), memory

    @property
    def _is_divisible(self) -> bool:
        """Whether a subclass defines only `combine_coordinates`, and overrides nothing that works on whole updates."""
        return type(self).combine_coordinates is not StackAggregator.combine_coordinates and inherits_aggregation(
            StackAggregator, self, "combine"
        )


def _form(value: Any) -> str:
    """Returns the structure and shapes of a pytree as text."""
    return f"{jax.tree.structure(value)} {[leaf.shape for leaf in jax.tree.leaves(value)]}"


def _join_segments(rows: jax.Array) -> jax.Array:
    """Returns ``[slots, n, ...]`` from ``[segments, slots, n / segments, ...]``."""
    return rows[0] if len(rows) == 1 else jnp.concatenate(list(rows), axis=1)
