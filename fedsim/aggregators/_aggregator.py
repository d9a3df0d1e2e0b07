"""`Aggregator`: how the clients' updates become one, as a monoid; and the mean."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree

Update = Any
Accumulator = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregator:
    """A fold over updates: ``zero``, ``accumulate``, ``merge``, ``finish``.

    An update is folded in the moment its client is done, inside the compiled round, so memory does not grow with the
    cohort. ``merge`` must be associative and commutative with ``zero`` as its neutral element, up to rounding: which
    device folds which clients is the executor's business.
    """

    def zero(self, update: Update) -> Accumulator:
        """The fold of no updates; ``update`` gives structure, shapes and dtypes."""
        raise NotImplementedError

    def accumulate(self, accumulator: Accumulator, update: Update, weight: jax.Array) -> Accumulator:
        """Folds one update in; a weight of 0 must leave the accumulator as it was."""
        raise NotImplementedError

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        """The fold of both."""
        raise NotImplementedError

    def finish(self, accumulator: Accumulator) -> Update:
        """The aggregate that the server gets."""
        raise NotImplementedError

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        """Merges accumulators stacked along a new first axis."""
        first = jax.tree.map(lambda x: x[0], accumulators)
        rest = jax.tree.map(lambda x: x[1:], accumulators)
        return jax.lax.scan(lambda a, b: (self.merge(a, b), None), first, rest)[0]

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        """Merges one accumulator per device, inside a `jax.shard_map` over ``axis``."""
        return self.merge_stacked(jax.lax.all_gather(accumulator, axis))


class MeanAccumulator(NamedTuple):
    """Sums of a `Mean` so far: ``total`` has the update's structure, ``weight`` is ``float32 []``."""

    total: Update
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Mean(Aggregator):
    """The weighted mean of the updates, summed in ``float32`` (or wider, if they are); zeros if the total weight is 0.

    >>> mean = Mean()
    >>> fold = mean.zero({"w": jnp.zeros(2)})
    >>> fold = mean.accumulate(fold, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1))
    >>> fold = mean.accumulate(fold, {"w": jnp.array([4.0, 5.0])}, jnp.float32(2))
    >>> mean.finish(fold)["w"].tolist()
    [3.0, 4.0]
    """

    def zero(self, update: Update) -> MeanAccumulator:
        # Sums of integers or of half precision would overflow, and a mean of integers is none.
        def wide(dtype: Any) -> Any:
            return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.float32

        total = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), update)
        return MeanAccumulator(total, jnp.zeros((), jnp.float32))

    def accumulate(self, accumulator: MeanAccumulator, update: Update, weight: jax.Array) -> MeanAccumulator:
        total = jax.tree.map(lambda sum, x: sum + weight * x.astype(sum.dtype), accumulator.total, update)
        return MeanAccumulator(total, accumulator.weight + weight)

    def merge(self, a: MeanAccumulator, b: MeanAccumulator) -> MeanAccumulator:
        return MeanAccumulator(tree.add(a.total, b.total), a.weight + b.weight)

    def finish(self, accumulator: MeanAccumulator) -> Update:
        weight = accumulator.weight
        return tree.scale(accumulator.total, jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight)))

    # Sums commute with sums: cheaper than a scan over gathered accumulators.
    def merge_stacked(self, accumulators: MeanAccumulator) -> MeanAccumulator:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), accumulators)

    def merge_devices(self, accumulator: MeanAccumulator, axis: str) -> MeanAccumulator:
        return jax.lax.psum(accumulator, axis)
