"""`Beside`: for clients that send numbers beside their update, which are no coordinates of it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Accumulator, Aggregator, Mean, Memory, Sent, Update, Wrapper, folds_as

_MEAN = Mean()


class Noted(NamedTuple):
    """An update, and numbers beside it: a loss, say, or how far the client could have gone, or flags.

    What the server makes of a round has the same form: the aggregate, and the notes' weighted mean.

    >>> Noted(jnp.zeros(3), notes=jnp.float32(7)).notes.item()
    7.0
    """

    update: Update
    notes: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Beside(Wrapper):
    """Aggregates the updates of `Noted` ones by another aggregator, and takes the weighted mean of their notes.

    Notes are sent as they are, 32 bits a float: they are neither compressed nor clipped, and no distance between updates
    knows of them. An attack leaves them alone.

    Attributes:
      inner: what the updates are aggregated by.

    >>> from fedsim.aggregators import Clipped
    >>> clipped = Beside(inner=Clipped(1.0))
    >>> sent = clipped.send(Noted(jnp.array([3.0, 4.0]), jnp.float32(7)), (), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update.update.tolist()], sent.update.notes.item(), sent.bits.item()
    ([0.6, 0.8], 7.0, 96)
    """

    @classmethod
    def around(cls, aggregator: Aggregator) -> Beside:
        """What an algorithm makes of the aggregator that it is given: once around it."""
        return aggregator if isinstance(aggregator, Beside) else cls(inner=aggregator)

    @property
    def plain(self) -> bool:
        return self.inner.plain

    def check(self, update: Noted, slots: int) -> None:
        self.inner.check(update.update, slots)

    def init(self, update: Noted) -> Memory:
        return self.inner.init(update.update)

    def client_memory(self, update: Noted) -> Memory:
        return self.inner.client_memory(update.update)

    def send(self, update: Noted, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent, bits = self.inner.send(update.update, common, memory, key), tree.num_bits(update.notes)
        return sent._replace(
            update=Noted(sent.update, update.notes),
            bits=tree.add_bits(sent.bits, bits, most=tree.num_bits(update)),
            entropy_bits=sent.entropy_bits + jnp.float32(bits),
        )

    def zero(self, update: Noted, slots: int) -> Accumulator:
        return Noted(self.inner.zero(update.update, slots), _MEAN.zero(update.notes, slots))

    def zero_devices(self, update: Noted, slots: int, axis: str) -> Accumulator:
        if not folds_as(Beside, self):
            return self.zero(update, slots)
        return Noted(self.inner.zero_devices(update.update, slots, axis), _MEAN.zero(update.notes, slots))

    def accumulate(self, accumulator: Noted, update: Noted, weight: jax.Array, slot: jax.Array) -> Accumulator:
        updates = self.inner.accumulate(accumulator.update, update.update, weight, slot)
        return Noted(updates, _MEAN.accumulate(accumulator.notes, update.notes, weight, slot))

    def merge(self, a: Noted, b: Noted) -> Accumulator:
        return Noted(self.inner.merge(a.update, b.update), _MEAN.merge(a.notes, b.notes))

    def merge_stacked(self, accumulators: Noted) -> Accumulator:
        return Noted(self.inner.merge_stacked(accumulators.update), _MEAN.merge_stacked(accumulators.notes))

    def merge_devices(self, accumulator: Noted, axis: str) -> Accumulator:
        return Noted(self.inner.merge_devices(accumulator.update, axis), _MEAN.merge_devices(accumulator.notes, axis))

    def finish(self, accumulator: Noted) -> Noted:
        return Noted(self.inner.finish(accumulator.update), _MEAN.finish(accumulator.notes))

    def conclude(self, accumulator: Noted, memory: Memory, key: jax.Array) -> tuple[Noted, Memory]:
        update, memory = self.inner.conclude(accumulator.update, memory, key)
        return Noted(update, _MEAN.finish(accumulator.notes)), memory

    def conclude_devices(self, accumulator: Noted, memory: Memory, key: jax.Array, axis: str) -> tuple[Noted, Memory]:
        if not folds_as(Beside, self):
            return super().conclude_devices(accumulator, memory, key, axis)
        update, memory = self.inner.conclude_devices(accumulator.update, memory, key, axis)
        return Noted(update, _MEAN.finish(_MEAN.merge_devices(accumulator.notes, axis))), memory


def with_notes_of(other: Update, update: Update) -> Update:
    """``update`` with the notes of another one, if they have any: what attackers say beside the harm they do.

    >>> with_notes_of(Noted(1.0, notes=7.0), Noted(-1.0, notes=-7.0))
    Noted(update=-1.0, notes=7.0)
    """
    return update._replace(notes=other.notes) if isinstance(update, Noted) else update
