"""`SideBySide`: for aggregates that no fold gives, because they need all updates of the cohort at once."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import psutil

from fedsim.aggregators._aggregator import SumAggregator, Update


class Gathered(NamedTuple):
    """Updates so far, leaves ``[slots, ...]``, and their weights, ``float32 [slots]``; rows that nobody wrote are zeros."""

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SideBySide(SumAggregator):
    """Keeps the cohort's updates side by side; subclasses write `combine`.

    Its memory grows with the cohort: slots times the size of an update, on every device.

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

    def check(self, update: Update, slots: int) -> None:
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(update))
        device = jax.local_devices()[0]
        free = psutil.virtual_memory().available
        if device.platform != "cpu":
            free = (device.memory_stats() or {}).get("bytes_limit", free)
        if slots * size > free:
            raise ValueError(
                f"{type(self).__name__} keeps all updates of a cohort side by side: {slots} clients of {size / 1e6:,.1f} MB "
                f"are {slots * size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free. Take a smaller cohort or model, or an "
                "aggregator that folds, such as Mean."
            )

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
