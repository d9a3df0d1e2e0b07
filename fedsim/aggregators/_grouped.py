"""`Grouped`: a separate aggregate for each group of clients."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Accumulator, Memory, Sent, Update, Wrapper
from fedsim.aggregators._locally_noised import check_not_locally_noised
from fedsim.aggregators._secure_mean import check_not_secure


class Member(NamedTuple):
    """What a client sends: the number of its group, ``int32 []``, and its update."""

    group: jax.Array
    update: Update


class Groups(NamedTuple):
    """The aggregate of all groups: aggregates, leaves ``[groups, ...]``, and total weights, ``float32 [groups]``."""

    updates: Update
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Wrapper):
    """Aggregates the updates of each group of clients separately by ``inner``. A client's update is a `Member`.

    The message has 32 bits more than that of ``inner``, for the number of the group. A group without clients has weight 0.
    What a client keeps for ``inner``, such as the error of its last compressed update, it keeps for each group.

    Attributes:
      groups: number of groups, at least 1.
      inner: the aggregator of the updates of one group.

    Raises:
      ValueError: ``groups`` is not a positive whole number, or ``inner`` is a secure sum or has local noise.

    >>> means = Grouped(groups=3)
    >>> accumulator = means.zero(Member(jnp.int32(0), jnp.zeros(())), slots=2)
    >>> for slot, (group, value) in enumerate([(0, 1.0), (2, 4.0), (2, 6.0)]):
    ...     accumulator = means.accumulate(accumulator, Member(jnp.int32(group), jnp.float32(value)), jnp.float32(1), slot)
    >>> updates, weights = means.finish(accumulator)
    >>> updates.tolist(), weights.tolist()
    ([1.0, 0.0, 5.0], [1.0, 0.0, 2.0])
    """

    groups: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, groups=self.groups)
        reason = "the server would see the group of every client. Use an algorithm with one model."
        check_not_secure(self, reason)
        check_not_locally_noised(self, reason)

    def check(self, update: Member, slots: int) -> None:
        self.inner.check(update.update, slots)

    def init(self, update: Member) -> Memory:
        return self._for_each(self.inner.init(update.update))

    def client_memory(self, update: Member) -> Memory:
        return self._for_each(self.inner.client_memory(update.update))

    def send(self, update: Member, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        of_server, of_client = _select_group((server_memory, memory), update.group)
        sent = self.inner.send(update.update, of_server, of_client, key)
        memory = _with_group(memory, update.group, sent.memory)
        entropy_bits = sent.entropy_bits + jnp.float32(math.log2(self.groups))
        most = tree.most_bits(tree.num_bits(update), compressed=self.may_send_more)
        bits = tree.add_bits(sent.bits, 32, most=most)
        return Sent(Member(update.group, sent.update), memory, bits, entropy_bits)

    def zero(self, update: Member, slots: int) -> Accumulator:
        return Groups(self._for_each(self.inner.zero(update.update, slots)), jnp.zeros(self.groups, jnp.float32))

    def accumulate(self, accumulator: Groups, update: Member, weight: jax.Array, slot: jax.Array) -> Accumulator:
        own = self.inner.accumulate(_select_group(accumulator.updates, update.group), update.update, weight, slot)
        merged = _with_group(accumulator.updates, update.group, own)
        return Groups(merged, accumulator.weights.at[update.group].add(weight))

    def merge(self, a: Groups, b: Groups) -> Accumulator:
        return Groups(jax.vmap(self.inner.merge)(a.updates, b.updates), a.weights + b.weights)

    def merge_stacked(self, accumulators: Groups) -> Accumulator:
        merged = jax.vmap(self.inner.merge_stacked, in_axes=1)(accumulators.updates)
        return Groups(merged, jnp.sum(accumulators.weights, axis=0))

    def merge_devices(self, accumulator: Groups, axis: str) -> Accumulator:
        merged = jax.vmap(lambda one: self.inner.merge_devices(one, axis))(accumulator.updates)
        return Groups(merged, jax.lax.psum(accumulator.weights, axis))

    def finish(self, accumulator: Groups) -> Groups:
        return Groups(jax.vmap(self.inner.finish)(accumulator.updates), accumulator.weights)

    def finish_round(self, accumulator: Groups, memory: Memory, key: jax.Array) -> tuple[Groups, Memory]:
        merged, weights = accumulator
        updates, after = jax.vmap(self.inner.finish_round)(merged, memory, jax.random.split(key, self.groups))
        return Groups(updates, weights), jax.vmap(tree.select)(weights != 0, after, memory)

    def _for_each(self, values: Accumulator) -> Accumulator:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.groups, *jnp.shape(x))), values)


def _select_group(values: Accumulator, group: jax.Array) -> Accumulator:
    return jax.tree.map(lambda x: x[group], values)


def _with_group(values: Accumulator, group: jax.Array, own: Accumulator) -> Accumulator:
    return jax.tree.map(lambda all, one: all.at[group].set(one), values, own)
