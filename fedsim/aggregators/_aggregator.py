"""`Aggregator`: what a client sends of its update, and how the updates of a cohort are combined into one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedsim import checks, tree

Update = Any
Accumulator = Any
Memory = Any
W = TypeVar("W", bound="Wrapper")


class Sent(NamedTuple):
    """What the server receives from a client, what the client keeps, and the size of the message.

    Attributes:
      update: the update as the server receives it. It is what `Aggregator.accumulate` adds.
      memory: what the client keeps for its next round.
      bits: size of the message. It is an exact ``uint32 []`` if the message cannot have 2**32 bits or more. Otherwise (134
        million floats have that many) it is a rounded ``float32 []``. `fedsim.tree.bits_dtype` chooses the dtype from the
        shapes.
      entropy_bits: an estimate of the size after entropy coding, ``float32 []``.
    """

    update: Update
    memory: Memory
    bits: jax.Array
    entropy_bits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregator:
    """Base class of aggregators. Subclasses define `zero`, `accumulate`, `merge` and `finish`.

    Each update is added to an accumulator as soon as its client has finished, inside the compiled round, so memory does not
    grow with the cohort. Every device has its own accumulator, and the execution decides which device runs which clients.
    Therefore `merge` must be associative and commutative, with `zero` as its neutral element, up to rounding.

    There are two optional extensions. `send` transforms an update on the client, for example to clip or to compress it. `init`
    and `finish_round` let the server keep a memory between rounds.

    Attributes:
      adds_weights: whether the aggregate is a sum, in which a weight multiplies the update, and not a mean.
      skips_empty_rounds: whether a round in which no update counts, or fewer than `fewest_clients`, leaves the state unchanged.
        A mechanism of differential privacy must not show that.
      is_secure: whether clients send masked integers, of which the server sees no more than the sum of several clients.
    """

    adds_weights: ClassVar[bool] = False
    is_secure: ClassVar[bool] = False
    skips_empty_rounds: ClassVar[bool] = True

    @property
    def counts_nonfinite(self) -> bool:
        """Whether a client whose update is not finite sends what `send` makes of zeros, and counts.

        Where clients add noise, the missing noise would show which update was not finite.
        """
        return False

    @property
    def fewest_clients(self) -> int:
        """The fewest clients whose sum the server sees, with secure aggregation; 1 if it sees every update."""
        return 1

    def acts_on(self, num_aggregated: Any) -> Any:
        """Returns whether a round in which this number of updates count changes the server's state, ``bool []``.

        It does not if no update counts, or fewer than `fewest_clients`, unless ``skips_empty_rounds`` is False.

        >>> Mean().acts_on(0), Mean().acts_on(1)
        (False, True)
        """
        # Where it always does, the number, which is private, must not be read.
        return num_aggregated >= self.innermost.fewest_clients if self.innermost.skips_empty_rounds else True

    @property
    def sends_unchanged(self) -> bool:
        """Whether clients send their updates unchanged. If True, `send` is not called."""
        return type(self).send is Aggregator.send

    @property
    def may_send_more(self) -> bool:
        """Whether a message may be larger than the update, as a compressed one that also has the places of all values."""
        return False

    @property
    def is_scalable(self) -> bool:
        """Whether half of a message counts as half of an update, so that the server may multiply that of a stale update."""
        return True

    @property
    def not_differentiable(self) -> str:
        """What makes its derivatives zero or wrong, such as "rounds", for `fedsim.differentiable`; "" if they are right."""
        return ""

    def check(self, update: Update, slots: int) -> None:
        """Raises ``ValueError`` before the first round if cohorts of up to ``slots`` such updates cannot be aggregated."""

    def init(self, update: Update) -> Memory:
        """Returns the server's memory before the first round. ``update`` is an update of zeros."""
        return ()

    def client_memory(self, update: Update) -> Memory:
        """Returns a client's memory before its first round. ``update`` gives the shapes and dtypes of an update."""
        return ()

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        """Transforms an update on the client before it is sent.

        Args:
          update: the client's update. It is finite, and all zeros if it does not count.
          server_memory: the server's memory for this aggregator.
          memory: the client's memory for this aggregator.
          key: a random key for this client and round.

        Returns:
          What the server receives, the client's new memory, and the size of the message.
        """
        bits = tree.num_bits(update)
        return Sent(update, memory, tree.add_bits(bits, most=bits), jnp.float32(bits))

    def zero(self, update: Update, slots: int) -> Accumulator:
        """Returns an empty accumulator for up to ``slots`` updates. ``update`` gives their structure, shapes and dtypes."""
        raise NotImplementedError

    def accumulate(self, accumulator: Accumulator, update: Update, weight: jax.Array, slot: jax.Array) -> Accumulator:
        """Adds one update to an accumulator. An update of weight 0 must not change it.

        Args:
          accumulator: the accumulator before this update.
          update: a client's update as the server receives it (``Sent.update``).
          weight: the client's weight, ``float32 []``.
          slot: the client's position in the cohort, ``int32 []``.
        """
        raise NotImplementedError

    @property
    def innermost(self) -> Aggregator:
        """The aggregator itself, or for a `Wrapper` the aggregator inside all wrappers."""
        return self

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        """Returns one accumulator that contains the updates of both."""
        raise NotImplementedError

    def finish(self, accumulator: Accumulator) -> Update:
        """Returns the aggregate of all updates in an accumulator."""
        raise NotImplementedError

    def finish_round(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        """Returns the aggregate, and the server's memory after the round. By default it calls `finish` and keeps the memory.

        Override it instead of `finish` if the aggregate needs the server's memory or random numbers.
        """
        return self.finish(accumulator), memory

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        """Merges accumulators that are stacked along a new first axis."""
        first = jax.tree.map(lambda x: x[0], accumulators)
        rest = jax.tree.map(lambda x: x[1:], accumulators)
        return jax.lax.scan(lambda a, b: (self.merge(a, b), None), first, rest)[0]

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        """Merges the accumulators of all devices, inside a `jax.shard_map` over ``axis``."""
        return self.merge_stacked(jax.lax.all_gather(accumulator, axis))

    def zero_devices(self, update: Update, slots: int, axis: str) -> Accumulator:
        """Returns an empty accumulator on each device of ``axis``, inside a `jax.shard_map`, for `finish_round_devices`.

        Override both methods together: their accumulator may have another structure than that of `zero`.
        """
        return self.zero(update, slots)

    def finish_round_devices(
        self, accumulator: Accumulator, memory: Memory, key: jax.Array, axis: str
    ) -> tuple[Update, Memory]:
        """Does what `finish_round` does, from one accumulator per device, inside a `jax.shard_map` over ``axis``.

        Override it if the devices can divide this work among themselves.
        """
        return self.finish_round(self.merge_devices(accumulator, axis), memory, key)


def inherits_aggregation(base: type[Aggregator], aggregator: Aggregator, *further: str) -> bool:
    """Returns whether an aggregator inherits all methods of aggregation, and ``further`` ones, unchanged from ``base``.

    Only then may the devices compute the same aggregate in another way.
    """
    names = "zero", "accumulate", "merge", "merge_stacked", "merge_devices", "finish", "finish_round", *further
    return all(getattr(type(aggregator), name) is getattr(base, name) for name in names)


@dataclasses.dataclass(frozen=True, eq=False)
class SumAggregator(Aggregator):
    """Base class of aggregators whose accumulators are merged by addition, over devices with a single all-reduce."""

    def merge(self, a: Accumulator, b: Accumulator) -> Accumulator:
        return tree.add(a, b)

    def merge_stacked(self, accumulators: Accumulator) -> Accumulator:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), accumulators)

    def merge_devices(self, accumulator: Accumulator, axis: str) -> Accumulator:
        # The sum of booleans over devices has an integer dtype. It is converted back, so that it means "any".
        return jax.tree.map(lambda total, one: total.astype(one.dtype), tree.psum(accumulator, axis), accumulator)


def accumulation_dtype(dtype: Any) -> Any:
    """Returns the dtype for sums of this dtype: itself if it is a float of at least 32 bits, otherwise ``float32``.

    Sums of integers or of half-precision floats could overflow, and the mean of integers is not an integer.

    >>> jnp.dtype(accumulation_dtype(jnp.dtype("bfloat16"))), jnp.dtype(accumulation_dtype(jnp.dtype("float32")))
    (dtype('float32'), dtype('float32'))
    """
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.float32


def widened(a: Any) -> Any:
    """Returns a pytree with each leaf in its `accumulation_dtype`, for what rounding in half precision would spoil.

    >>> str(widened({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype)
    'float32'
    """
    return jax.tree.map(lambda x: x.astype(accumulation_dtype(x.dtype)), a)


class WeightedTotal(NamedTuple):
    """The sum of weight times update, in the update's structure, and the sum of the weights, ``float32 []``."""

    total: Update
    weight: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Sum(SumAggregator):
    """The sum of weight times update, for example of counts or sufficient statistics.

    Sums have the dtype of the updates, and at least ``float32``.

    >>> total = Sum()
    >>> accumulator = total.zero({"w": jnp.zeros(2)}, slots=2)
    >>> accumulator = total.accumulate(accumulator, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1), 0)
    >>> accumulator = total.accumulate(accumulator, {"w": jnp.array([4.0, 5.0])}, jnp.float32(2), 1)
    >>> total.finish(accumulator)["w"].tolist()
    [9.0, 12.0]
    """

    adds_weights = True

    def zero(self, update: Update, slots: int) -> WeightedTotal:
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), update)
        return WeightedTotal(total, jnp.zeros((), jnp.float32))

    def accumulate(self, accumulator: WeightedTotal, update: Update, weight: jax.Array, slot: jax.Array) -> WeightedTotal:
        total = jax.tree.map(lambda sum, x: sum + weight * x.astype(sum.dtype), accumulator.total, update)
        return WeightedTotal(total, accumulator.weight + weight)

    def finish(self, accumulator: WeightedTotal) -> Update:
        return accumulator.total


@dataclasses.dataclass(frozen=True, eq=False)
class Mean(Sum):
    """The weighted mean of the updates.

    Sums have the dtype of the updates, and at least ``float32``. If the total weight is 0, the mean is 0.

    >>> mean = Mean()
    >>> accumulator = mean.zero({"w": jnp.zeros(2)}, slots=2)
    >>> accumulator = mean.accumulate(accumulator, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1), 0)
    >>> accumulator = mean.accumulate(accumulator, {"w": jnp.array([4.0, 5.0])}, jnp.float32(2), 1)
    >>> mean.finish(accumulator)["w"].tolist()
    [3.0, 4.0]
    """

    adds_weights = False

    def finish(self, accumulator: WeightedTotal) -> Update:
        weight = accumulator.weight.astype(jax.dtypes.canonicalize_dtype(float))  # float64 with x64, as updates may be
        return tree.scale(accumulator.total, jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight)))


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(Aggregator):
    """Base class of aggregators that modify another aggregator. Subclasses override the methods that differ.

    The outermost wrapper acts first on the client and last on the server: ``Clipped(1.0, inner=Compressed(...,
    inner=Mean()))`` clips, then compresses, then takes the mean.

    Attributes:
      inner: the aggregator that is modified.

    Raises:
      ValueError: ``inner`` is not an `Aggregator`.

    >>> Wrapper(inner=Sum()).finish(WeightedTotal(jnp.float32(3), jnp.float32(2))).item()
    3.0
    """

    inner: Aggregator = dataclasses.field(default_factory=Mean, kw_only=True)

    def __post_init__(self) -> None:
        checks.instance(Aggregator, "Mean()", inner=self.inner)

    @property
    def sends_unchanged(self) -> bool:
        return type(self).send is Wrapper.send and self.inner.sends_unchanged

    @property
    def may_send_more(self) -> bool:
        return self.inner.may_send_more

    @property
    def counts_nonfinite(self) -> bool:
        return self.inner.counts_nonfinite

    @property
    def fewest_clients(self) -> int:
        return self.inner.fewest_clients

    @property
    def innermost(self) -> Aggregator:
        return self.inner.innermost

    def find(self, kind: type[W]) -> W | None:
        """Returns the first wrapper of a kind inside this one, from the outermost on; None if there is none.

        >>> Wrapper(inner=Wrapper(inner=Sum())).find(Wrapper).inner
        Sum()
        """
        inner = self.inner
        while isinstance(inner, Wrapper):
            if isinstance(inner, kind):
                return inner
            inner = inner.inner
        return None

    def check(self, update: Update, slots: int) -> None:
        self.inner.check(update, slots)

    def init(self, update: Update) -> Memory:
        return self.inner.init(update)

    def client_memory(self, update: Update) -> Memory:
        return self.inner.client_memory(update)

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        return self.inner.send(update, server_memory, memory, key)

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

    def finish_round(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        return self.inner.finish_round(accumulator, memory, key)
