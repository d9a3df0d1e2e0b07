"""`SideBySide`: for aggregates that no fold gives, because they need all updates of the cohort at once."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim.aggregators._aggregator import SumAggregator, Update


class Gathered(NamedTuple):
    """Updates so far, leaves ``[slots, ...]``, and their weights, ``float32 [slots]``; rows that nobody wrote are zeros."""

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SideBySide(SumAggregator):
    """Keeps the cohort's updates side by side; subclasses write `combine`.

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
        raise NotImplementedError

    def zero(self, update: Update, slots: int) -> Gathered:
        return Gathered(jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), update), jnp.zeros(slots, jnp.float32))

    def accumulate(self, accumulator: Gathered, update: Update, weight: jax.Array, slot: jax.Array) -> Gathered:
        updates = jax.tree.map(lambda rows, row: rows.at[slot].add(jnp.where(weight == 0, 0, row)), accumulator.updates, update)
        return Gathered(updates, accumulator.weights.at[slot].add(weight))

    def finish(self, accumulator: Gathered) -> Update:
        return self.combine(*accumulator)
