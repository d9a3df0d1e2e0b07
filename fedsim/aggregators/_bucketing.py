"""Bucketing.

S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, algorithm 1:
https://arxiv.org/abs/2006.09365. ``size`` is the paper's s, and ``inner`` its Aggr. Deviations: the mean of a bucket is
weighted by the clients' weights, and their sum is its weight, so that bucketing alone does not change the mean. In the paper
all weights are equal (``weighting="uniform"``). If the last bucket has fewer than s clients, it is their mean, too.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.aggregators._aggregator import Accumulator, Memory, Update, Wrapper
from fedsim.aggregators._rows import total, widen
from fedsim.aggregators._stack import StackAggregator, StackedUpdates

_STACK = StackAggregator()


@dataclasses.dataclass(frozen=True, eq=False)
class Bucketing(Wrapper):
    """Divides the clients of a round into random buckets of ``size`` clients, and aggregates the means of the buckets.

    The means differ less than the updates do if clients have different data, so ``inner`` rejects fewer honest clients. But one
    attacker makes a whole bucket malicious: of n clients, f attackers become up to f of n / size buckets. Buckets are drawn in
    every round, from its key and the clients' positions in the cohort.

    By name, as in a configuration, it is ``"bucketing(size=2, inner='krum(attackers=1)')"``.

    What clients do to their updates must be outside: ``Clipped(1.0, inner=Bucketing(2, inner=Krum(attackers=1)))``.

    Attributes:
      size: s, the number of clients of a bucket, at least 1. With 1, the aggregate is that of ``inner``.
      inner: the aggregator of the means of the buckets.

    Raises:
      ValueError: ``size`` is below 1, or ``inner`` changes what clients send. Before the first round: ``inner`` cannot
        aggregate as many updates as there are buckets.

    >>> from fedsim.aggregators import CoordinateMedian
    >>> buckets = Bucketing(2, inner=CoordinateMedian())
    >>> accumulator = buckets.zero(jnp.zeros(()), slots=4)
    >>> for slot, x in enumerate([2.0, 2.0, 2.0, 6.0]):
    ...     accumulator = buckets.accumulate(accumulator, jnp.float32(x), jnp.float32(1), slot)
    >>> buckets.finish_round(accumulator, (), jax.random.key(0))[0].item()  # the median of 2 and of (2 + 6) / 2
    3.0
    """

    size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, size=self.size, remedy="the number of clients of a bucket")
        if not self.inner.sends_unchanged:
            raise ValueError(
                f"Expected an aggregator whose clients send their updates as they are, got inner={self.inner}, which would act "
                "on clients instead of buckets: put Bucketing inside of it, or use another aggregator."
            )

    @property
    def not_differentiable(self) -> str:
        return self.inner.not_differentiable

    def check(self, update: Update, slots: int) -> None:
        self.inner.check(update, -(-slots // self.size))

    def zero(self, update: Update, slots: int) -> StackedUpdates:
        return _STACK.zero(update, slots)

    def accumulate(self, accumulator: StackedUpdates, update: Update, weight: jax.Array, slot: jax.Array) -> StackedUpdates:
        return _STACK.accumulate(accumulator, update, weight, slot)

    def merge(self, a: StackedUpdates, b: StackedUpdates) -> StackedUpdates:
        return _STACK.merge(a, b)

    def merge_stacked(self, accumulators: StackedUpdates) -> StackedUpdates:
        return _STACK.merge_stacked(accumulators)

    def merge_devices(self, accumulator: StackedUpdates, axis: str) -> StackedUpdates:
        return _STACK.merge_devices(accumulator, axis)

    def finish(self, accumulator: StackedUpdates) -> Update:
        raise NotImplementedError("Bucketing draws buckets, which needs a key: call finish_round.")

    def finish_round(self, accumulator: StackedUpdates, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        updates, weights = _STACK.stacked(accumulator)
        # Clients without an update come last. The draw of a slot does not depend on how many slots there are.
        order = jnp.lexsort((rng.hashed(rng.stream(key, "buckets"), len(weights)), weights == 0))
        bucket = jnp.argsort(order) // self.size
        count = -(-len(weights) // self.size)
        parts = jnp.where(bucket[None, :] == jnp.arange(count)[:, None], weights[None, :], 0)
        sums = jnp.sum(parts, axis=1)
        shares = parts / jnp.where(sums == 0, 1, sums)[:, None]
        means = jax.tree.map(lambda rows: total(widen(rows), shares), updates)

        def add(i: jax.Array, inner: Accumulator) -> Accumulator:
            return self.inner.accumulate(inner, jax.tree.map(lambda rows: rows[i], means), sums[i], i)

        none = self.inner.zero(jax.tree.map(lambda rows: rows[0], means), count)
        return self.inner.finish_round(jax.lax.fori_loop(0, count, add, none), memory, rng.stream(key, "inner"))
