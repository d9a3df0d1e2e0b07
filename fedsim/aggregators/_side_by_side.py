"""`SideBySide`: for aggregates that no fold gives, because they need all updates of the cohort at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Memory, SumAggregator, Update, folds_as

_SMALL = 2**15  # coordinates of a leaf that is not shared out: devices meet once for each that is

Summed = Callable[[Any], Any]


class Gathered(NamedTuple):
    """Updates so far and their weights, ``float32 [slots]``; rows that nobody wrote are zeros.

    A leaf ``[n, ...]`` is kept in as many parts as there are devices, or in one: ``[parts, slots, n / parts, ...]``.
    """

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SideBySide(SumAggregator):
    """Keeps the cohort's updates side by side; subclasses write `combine`, or `combine_part`.

    With `combine_part`, by itself or within `Beside`, devices share out leaves of more than 32,768 coordinates whose first
    dimension they divide.

    Its memory grows with the cohort: slots times the size of an update, on every device and in each of its lanes. What cannot
    fit is refused before the first round.

    >>> class Largest(SideBySide):
    ...     def combine(self, updates, weights):
    ...         return jax.tree.map(lambda rows: jnp.max(rows, axis=0), updates)
    >>> largest = Largest()
    >>> fold = largest.zero(jnp.zeros(2), slots=3)
    >>> fold = largest.accumulate(fold, jnp.array([1.0, 5.0]), jnp.float32(1), 0)
    >>> fold = largest.accumulate(fold, jnp.array([4.0, 2.0]), jnp.float32(1), 2)
    >>> largest.finish(fold).tolist()
    [4.0, 5.0]
    """

    def combine(self, updates: Update, weights: jax.Array) -> Update:
        """The aggregate of updates ``[slots, ...]`` with weights ``float32 [slots]``; a row of weight 0 does not exist."""
        return self.combine_part(updates, weights, lambda sums: sums)

    def combine_part(self, updates: Update, weights: jax.Array, summed: Summed) -> Update:
        """`combine` of some coordinates, for who needs to know of the others no more than sums: devices share them out.

        Args:
          updates: of these coordinates, ``[slots, ...]``; of leaves that are not shared out the first device has the rows, and
            the others have zeros: what they make of them is not used.
          weights: ``float32 [slots]``.
          summed: makes of sums over these coordinates, to which zeros add nothing, sums over all. Whether it is called may
            depend on weights and on what it gave: a device that calls it alone waits for ever.

        Returns:
          of the form of one row.

        Raises:
          ValueError: it is not, where a leaf is shared out; before a round that is one program.

        >>> class Longest(SideBySide):
        ...     def combine_part(self, updates, weights, summed):
        ...         return updates[jnp.argmax(summed(jnp.sum(updates**2, axis=1)))]
        >>> Longest().combine(jnp.array([[1.0, 5.0], [4.0, 2.0]]), jnp.ones(2)).tolist()
        [1.0, 5.0]
        """
        raise NotImplementedError

    def zero(self, update: Update, slots: int) -> Gathered:
        return self._zero(update, slots, parts=1)

    def zero_devices(self, update: Update, slots: int, axis: str) -> Gathered:
        return self._zero(update, slots, parts=jax.lax.axis_size(axis)) if self._shared_out else self.zero(update, slots)

    def _zero(self, update: Update, slots: int, parts: int) -> Gathered:
        def leaf(x: jax.Array) -> jax.Array:
            if not x.shape:
                return jnp.zeros((1, slots), x.dtype)
            of = parts if x.size > _SMALL and x.shape[0] % parts == 0 and x.dtype != bool else 1
            return jnp.zeros((of, slots, x.shape[0] // of, *x.shape[1:]), x.dtype)

        return Gathered(jax.tree.map(leaf, update), jnp.zeros(slots, jnp.float32))

    def accumulate(self, accumulator: Gathered, update: Update, weight: jax.Array, slot: jax.Array) -> Gathered:
        def leaf(rows: jax.Array, row: jax.Array) -> jax.Array:
            row = row.astype(rows.dtype).reshape(rows.shape[0], *rows.shape[2:])
            return rows.at[:, slot].set(jnp.where(weight == 0, rows[:, slot], row))

        return Gathered(jax.tree.map(leaf, accumulator.updates, update), accumulator.weights.at[slot].add(weight))

    def finish(self, accumulator: Gathered) -> Update:
        return self.combine(jax.tree.map(_whole, accumulator.updates), accumulator.weights)

    def conclude_devices(self, accumulator: Gathered, memory: Memory, key: jax.Array, axis: str) -> tuple[Update, Memory]:
        leaves, structure = jax.tree.flatten(accumulator.updates if self._shared_out else ())
        parts = [rows.shape[0] for rows in leaves]
        if max(parts, default=1) == 1:
            return super().conclude_devices(accumulator, memory, key, axis)
        shared = [i for i, of in enumerate(parts) if of > 1]
        others = [i for i, of in enumerate(parts) if of == 1]
        first = jax.lax.axis_index(axis) == 0
        # One device wrote a row, all others have zeros there.
        whole, weights = tree.psum(([leaves[i] for i in others], accumulator.weights), axis)
        for i, rows in zip(others, whole, strict=True):
            leaves[i] = jnp.where(first, rows[0], 0).astype(leaves[i].dtype)
        for i in shared:
            leaves[i] = jax.lax.psum_scatter(leaves[i], axis, tiled=True)[0]
        own = jax.tree.unflatten(structure, leaves)
        part = jax.tree.map(jnp.asarray, self.combine_part(own, weights, lambda sums: tree.psum(sums, axis)))
        forms = [_form(part), _form(jax.eval_shape(lambda rows: jax.tree.map(lambda leaf: leaf[0], rows), own))]
        if forms[0] != forms[1]:
            raise ValueError(
                f"{type(self).__name__}.combine_part makes {forms[0]} of coordinates {forms[1]}: give an aggregate of their "
                "form, or write combine, which gets whole updates."
            )
        leaves = jax.tree.leaves(part)
        firsts = tree.psum([jnp.where(first, leaves[i], jnp.zeros_like(leaves[i])) for i in others], axis)
        for i, x in zip(others, firsts, strict=True):
            leaves[i] = x.astype(leaves[i].dtype)  # A sum of flags is a number.
        for i in shared:
            leaves[i] = jax.lax.all_gather(leaves[i], axis, tiled=True)
        return jax.tree.unflatten(structure, leaves), memory

    @property
    def _shared_out(self) -> bool:
        """Whether `combine_part` is all there is to it: a subclass may change what is done with whole updates."""
        return type(self).combine_part is not SideBySide.combine_part and folds_as(SideBySide, self, "combine")


def _form(of: Any) -> str:
    """Structure and shapes, to be compared and shown."""
    return f"{jax.tree.structure(of)} {[leaf.shape for leaf in jax.tree.leaves(of)]}"


def _whole(rows: jax.Array) -> jax.Array:
    """``[slots, n, ...]`` of ``[parts, slots, n / parts, ...]``."""
    return rows[0] if len(rows) == 1 else jnp.concatenate(list(rows), axis=1)
