"""`Grouped`: for clients that belong to groups, of which each has an aggregate of its own."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Accumulator, Memory, Sent, Update, Wrapper


class Member(NamedTuple):
    """What a client sends: its group, ``int32 []``, and its update."""

    group: jax.Array
    update: Update


class Groups(NamedTuple):
    """What the server gets: each group's aggregate, leaves ``[groups, ...]``, and total weight, ``float32 [groups]``."""

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Wrapper):
    """One inner aggregator for every group; a client's update, a `Member`, goes to that of its own.

    A message is as long as the inner aggregator's, and an integer for the group longer. A group nobody belongs to has weight 0.

    Attributes:
      groups: how many, at least 1.
      inner: what each of them is aggregated by.

    >>> means = Grouped(groups=3)
    >>> fold = means.zero(Member(jnp.int32(0), jnp.zeros(())), slots=2)
    >>> for slot, (group, value) in enumerate([(0, 1.0), (2, 4.0), (2, 6.0)]):
    ...     fold = means.accumulate(fold, Member(jnp.int32(group), jnp.float32(value)), jnp.float32(1), slot)
    >>> updates, weights = means.finish(fold)
    >>> updates.tolist(), weights.tolist()
    ([1.0, 0.0, 5.0], [1.0, 0.0, 2.0])
    """

    groups: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, groups=self.groups)

    def check(self, update: Member, slots: int) -> None:
        self.inner.check(update.update, slots)

    def init(self, update: Member) -> Memory:
        return self._for_each(self.inner.init(update.update))

    def client_memory(self, update: Member) -> Memory:
        return self.inner.client_memory(update.update)

    def send(self, update: Member, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent = self.inner.send(update.update, _of(common, update.group), memory, key)
        entropy_bits = sent.entropy_bits + jnp.float32(math.log2(self.groups))
        bits = tree.add_bits(sent.bits, 32, most=tree.num_bits(update))
        return sent._replace(update=Member(update.group, sent.update), bits=bits, entropy_bits=entropy_bits)

    def zero(self, update: Member, slots: int) -> Accumulator:
        return Groups(self._for_each(self.inner.zero(update.update, slots)), jnp.zeros(self.groups, jnp.float32))

    def accumulate(self, accumulator: Groups, update: Member, weight: jax.Array, slot: jax.Array) -> Accumulator:
        own = self.inner.accumulate(_of(accumulator.updates, update.group), update.update, weight, slot)
        folds = jax.tree.map(lambda all, one: all.at[update.group].set(one), accumulator.updates, own)
        return Groups(folds, accumulator.weights.at[update.group].add(weight))

    def merge(self, a: Groups, b: Groups) -> Accumulator:
        return Groups(jax.vmap(self.inner.merge)(a.updates, b.updates), a.weights + b.weights)

    def merge_stacked(self, accumulators: Groups) -> Accumulator:
        folds = jax.vmap(self.inner.merge_stacked, in_axes=1)(accumulators.updates)
        return Groups(folds, jnp.sum(accumulators.weights, axis=0))

    def merge_devices(self, accumulator: Groups, axis: str) -> Accumulator:
        folds = jax.vmap(lambda fold: self.inner.merge_devices(fold, axis))(accumulator.updates)
        return Groups(folds, jax.lax.psum(accumulator.weights, axis))

    def finish(self, accumulator: Groups) -> Groups:
        return Groups(jax.vmap(self.inner.finish)(accumulator.updates), accumulator.weights)

    def conclude(self, accumulator: Groups, memory: Memory, key: jax.Array) -> tuple[Groups, Memory]:
        folds, weights = accumulator
        updates, after = jax.vmap(self.inner.conclude)(folds, memory, jax.random.split(key, self.groups))
        return Groups(updates, weights), jax.vmap(tree.select)(weights != 0, after, memory)

    def _for_each(self, values: Accumulator) -> Accumulator:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.groups, *jnp.shape(x))), values)


def _of(all: Accumulator, group: jax.Array) -> Accumulator:
    return jax.tree.map(lambda x: x[group], all)
