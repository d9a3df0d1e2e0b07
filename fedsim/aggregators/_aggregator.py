"""`Aggregator`: how the clients' updates become one: what a client sends, and a monoid that folds it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree

Update = Any
Accumulator = Any
Memory = Any


class Sent(NamedTuple):
    """What arrives of a client's update.

    Attributes:
      update: what the server sees of it, to be folded.
      memory: what the client keeps for its next round.
      bits: size of the message: ``uint32 []``, exact, below 2**32 bits, and ``float32 []``, rounded, where it may be larger, as
        that of 134 million floats is; `fedsim.tree.bits_dtype` chooses, by shapes.
      entropy_bits: an estimate of its size after entropy coding, ``float32 []``.
    """

    update: Update
    memory: Memory
    bits: jax.Array
    entropy_bits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregator:
    """A fold over updates: ``zero``, ``accumulate``, ``merge``, ``finish``.

    An update is folded in the moment its client is done, inside the compiled round, so memory does not grow with the
    cohort. ``merge`` must be associative and commutative with ``zero`` as its neutral element, up to rounding: which
    device folds which clients is the executor's business.

    Before that the client may transform what it sends (`send`), and the server may keep something from round to round
    (`init`, `conclude`). Those who need neither write the four functions of the fold.
    """

    @property
    def plain(self) -> bool:
        """Whether updates arrive as they are, so that nothing need be asked of `send`."""
        return type(self).send is Aggregator.send

    def check(self, update: Update, slots: int) -> None:
        """Raises ``ValueError``, before the first round, if cohorts of up to ``slots`` such updates cannot be aggregated."""

    def init(self, update: Update) -> Memory:
        """What the server keeps for this aggregator before the first round; ``update`` is one of zeros."""
        return ()

    def client_memory(self, update: Update) -> Memory:
        """What a client that was never seen keeps for this aggregator; ``update`` gives shapes and dtypes."""
        return ()

    def send(self, update: Update, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        """On the client: what arrives of an update.

        Args:
          update: finite; zeros if it does not count.
          common: the server's memory.
          memory: this client's.
          key: this client's key of the round, for the message.
        """
        bits = tree.num_bits(update)
        return Sent(update, memory, tree.add_bits(bits, most=bits), jnp.float32(bits))

    def zero(self, update: Update, slots: int) -> Accumulator:
        """The fold of no updates; ``update`` gives structure, shapes and dtypes, ``slots`` the largest possible cohort."""
        raise NotImplementedError

    def accumulate(self, accumulator: Accumulator, update: Update, weight: jax.Array, slot: jax.Array) -> Accumulator:
        """Folds one update in; a weight of 0 must leave the accumulator as it was.

        Args:
          accumulator: the fold so far.
          update: what `send` made of a client's update.
          weight: ``float32 []``.
          slot: the client's place in the cohort, ``int32 []``: for those that keep updates side by side.
        """
        raise NotImplementedError

    @property
    def innermost(self) -> Aggregator:
        """What folds: of an aggregator around another one, that."""
        return self

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        """The fold of both."""
        raise NotImplementedError

    def finish(self, accumulator: Accumulator) -> Update:
        """The aggregate that the server gets."""
        raise NotImplementedError

    def conclude(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        """`finish` for those with a memory or randomness of the server's: the aggregate, and the memory after the round."""
        return self.finish(accumulator), memory

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        """Merges accumulators stacked along a new first axis."""
        first = jax.tree.map(lambda x: x[0], accumulators)
        rest = jax.tree.map(lambda x: x[1:], accumulators)
        return jax.lax.scan(lambda a, b: (self.merge(a, b), None), first, rest)[0]

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        """Merges one accumulator per device, inside a `jax.shard_map` over ``axis``."""
        return self.merge_stacked(jax.lax.all_gather(accumulator, axis))

    def zero_devices(self, update: Update, slots: int, axis: str) -> Accumulator:
        """`zero` on each device of ``axis``, inside a `jax.shard_map`, for a fold that `conclude_devices` ends.

        Who writes one of the two writes both: they may agree on an accumulator of another form than `zero` gives.
        """
        return self.zero(update, slots)

    def conclude_devices(self, accumulator: Accumulator, memory: Memory, key: jax.Array, axis: str) -> tuple[Update, Memory]:
        """`conclude` of one accumulator per device, inside a `jax.shard_map`: for those who share this work out."""
        return self.conclude(self.merge_devices(accumulator, axis), memory, key)


def folds_as(kind: type[Aggregator], aggregator: Aggregator, *more: str) -> bool:
    """Whether a subclass changed nothing of the fold, nor of these methods: so that devices may do it in another way."""
    names = "zero", "accumulate", "merge", "merge_stacked", "merge_devices", "finish", "conclude", *more
    return all(getattr(type(aggregator), name) is getattr(kind, name) for name in names)


@dataclasses.dataclass(frozen=True, eq=False)
class SumAggregator(Aggregator):
    """An aggregator whose accumulators merge by addition: one all-reduce instead of a scan over gathered ones."""

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        return tree.add(a, b)

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), accumulators)

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        # A sum of flags over devices is a number: any of them is a flag, as for the lanes of one.
        return jax.tree.map(lambda total, one: total.astype(one.dtype), tree.psum(accumulator, axis), accumulator)


def wide(dtype: Any) -> Any:
    """What to compute in: sums of integers or of half precision would overflow, and a mean of integers is none."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.float32


class WeightedTotal(NamedTuple):
    """Sums so far: ``total`` of weight times update, in the update's structure, and ``weight``, ``float32 []``."""

    total: Update
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Sum(SumAggregator):
    """The sum of weight times update, in ``float32`` (or wider, if they are): counts, histograms, sufficient statistics.

    >>> total = Sum()
    >>> fold = total.zero({"w": jnp.zeros(2)}, slots=2)
    >>> fold = total.accumulate(fold, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1), 0)
    >>> fold = total.accumulate(fold, {"w": jnp.array([4.0, 5.0])}, jnp.float32(2), 1)
    >>> total.finish(fold)["w"].tolist()
    [9.0, 12.0]
    """

    def zero(self, update: Update, slots: int) -> WeightedTotal:
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), update)
        return WeightedTotal(total, jnp.zeros((), jnp.float32))

    def accumulate(self, accumulator: WeightedTotal, update: Update, weight: jax.Array, slot: jax.Array) -> WeightedTotal:
        total = jax.tree.map(lambda sum, x: sum + weight * x.astype(sum.dtype), accumulator.total, update)
        return WeightedTotal(total, accumulator.weight + weight)

    def finish(self, accumulator: WeightedTotal) -> Update:
        return accumulator.total


@dataclasses.dataclass(frozen=True, eq=False)
class Mean(Sum):
    """The weighted mean of the updates, summed in ``float32`` (or wider, if they are); zeros if the total weight is 0.

    >>> mean = Mean()
    >>> fold = mean.zero({"w": jnp.zeros(2)}, slots=2)
    >>> fold = mean.accumulate(fold, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1), 0)
    >>> fold = mean.accumulate(fold, {"w": jnp.array([4.0, 5.0])}, jnp.float32(2), 1)
    >>> mean.finish(fold)["w"].tolist()
    [3.0, 4.0]
    """

    def finish(self, accumulator: WeightedTotal) -> Update:
        weight = accumulator.weight
        return tree.scale(accumulator.total, jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight)))


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(Aggregator):
    """An aggregator that changes something about another one: subclasses override what differs.

    The outermost acts first on the client and last on the server: ``Clipped(1.0, inner=Compressed(..., inner=Mean()))``
    clips, then compresses, then takes the mean.

    Attributes:
      inner: what it wraps.

    >>> Wrapper(inner=Sum()).finish(WeightedTotal(jnp.float32(3), jnp.float32(2))).item()
    3.0
    """

    inner: Aggregator = dataclasses.field(default_factory=Mean, kw_only=True)

    def __post_init__(self) -> None:
        checks.instance(Aggregator, "Mean()", inner=self.inner)

    @property
    def plain(self) -> bool:
        return type(self).send is Wrapper.send and self.inner.plain

    @property
    def innermost(self) -> Aggregator:
        return self.inner.innermost

    def check(self, update: Update, slots: int) -> None:
        self.inner.check(update, slots)

    def init(self, update: Update) -> Memory:
        return self.inner.init(update)

    def client_memory(self, update: Update) -> Memory:
        return self.inner.client_memory(update)

    def send(self, update: Update, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        return self.inner.send(update, common, memory, key)

    def zero(self, update: Update, slots: int) -> Accumulator:
        return self.inner.zero(update, slots)

    def accumulate(self, accumulator: Accumulator, update: Update, weight: jax.Array, slot: jax.Array) -> Accumulator:
        return self.inner.accumulate(accumulator, update, weight, slot)

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        return self.inner.merge(a, b)

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        return self.inner.merge_stacked(accumulators)

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        return self.inner.merge_devices(accumulator, axis)

    def finish(self, accumulator: Accumulator) -> Update:
        return self.inner.finish(accumulator)

    def conclude(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        return self.inner.conclude(accumulator, memory, key)
