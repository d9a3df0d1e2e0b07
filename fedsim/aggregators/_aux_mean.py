"""`AuxMean`: for clients that send auxiliary numbers, such as a loss, together with their update."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Accumulator, Aggregator, Mean, Memory, Sent, Update, Wrapper, inherits_aggregation
from fedsim.aggregators._grouped import Member
from fedsim.aggregators._locally_noised import check_not_locally_noised
from fedsim.aggregators._secure_mean import check_not_secure

_MEAN = Mean()


class WithAux(NamedTuple):
    """An update with auxiliary data: numbers or flags that are not coordinates of the update, for example a loss.

    The aggregate has the same form: the aggregate of the updates, and the weighted mean of the auxiliary data.

    Attributes:
      update: the update, a pytree.
      aux: the auxiliary data, a pytree of arrays.

    >>> WithAux(jnp.zeros(3), aux=jnp.float32(7)).aux.item()
    7.0
    """

    update: Update
    aux: Any


@dataclasses.dataclass(frozen=True, eq=False)
class AuxMean(Wrapper):
    """Aggregates the updates of `WithAux` pairs by ``inner``, and takes the weighted mean of the auxiliary data.

    Auxiliary data is sent unchanged, with 32 bits per float: it is neither compressed nor clipped, it does not count in
    distances between updates, and attacks do not change it.

    Attributes:
      inner: the aggregator of the updates.

    Raises:
      ValueError: ``inner`` is secure aggregation, which would send the auxiliary data unmasked, or has local noise, without
        which the auxiliary data would be sent.

    >>> from fedsim.aggregators import Clipped
    >>> clipped = AuxMean(inner=Clipped(1.0))
    >>> sent = clipped.send(WithAux(jnp.array([3.0, 4.0]), jnp.float32(7)), (), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update.update.tolist()], sent.update.aux.item(), sent.bits.item()
    ([0.6, 0.8], 7.0, 96)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = (
            "Use an algorithm that sends updates alone, such as FedAvg, and a model without statistics, or one whose clients "
            "keep them (statistics='client')."
        )
        check_not_secure(self, f"the auxiliary data, such as running statistics, would be sent unmasked. {remedy}")
        check_not_locally_noised(self, f"the auxiliary data, such as running statistics, would be sent without noise. {remedy}")

    @classmethod
    def wrap(cls, aggregator: Aggregator) -> AuxMean:
        """Returns ``AuxMean(inner=aggregator)``, or the aggregator itself if it is an `AuxMean` already."""
        return aggregator if isinstance(aggregator, AuxMean) else cls(inner=aggregator)

    @property
    def sends_unchanged(self) -> bool:
        return type(self).send is AuxMean.send and self.inner.sends_unchanged

    def check(self, update: WithAux, slots: int) -> None:
        self.inner.check(update.update, slots)

    def init(self, update: WithAux) -> Memory:
        return self.inner.init(update.update)

    def client_memory(self, update: WithAux) -> Memory:
        return self.inner.client_memory(update.update)

    def send(self, update: WithAux, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent, bits = self.inner.send(update.update, server_memory, memory, key), tree.num_bits(update.aux)
        most = tree.most_bits(tree.num_bits(update), compressed=self.may_send_more)
        return sent._replace(
            update=WithAux(sent.update, update.aux),
            bits=tree.add_bits(sent.bits, bits, most=most),
            entropy_bits=sent.entropy_bits + jnp.float32(bits),
        )

    def zero(self, update: WithAux, slots: int) -> Accumulator:
        return WithAux(self.inner.zero(update.update, slots), _MEAN.zero(update.aux, slots))

    def zero_devices(self, update: WithAux, slots: int, axis: str) -> Accumulator:
        if not inherits_aggregation(AuxMean, self):
            return self.zero(update, slots)
        return WithAux(self.inner.zero_devices(update.update, slots, axis), _MEAN.zero(update.aux, slots))

    def accumulate(self, accumulator: WithAux, update: WithAux, weight: jax.Array, slot: jax.Array) -> Accumulator:
        updates = self.inner.accumulate(accumulator.update, update.update, weight, slot)
        return WithAux(updates, _MEAN.accumulate(accumulator.aux, update.aux, weight, slot))

    def merge(self, a: WithAux, b: WithAux) -> Accumulator:
        return WithAux(self.inner.merge(a.update, b.update), _MEAN.merge(a.aux, b.aux))

    def merge_stacked(self, accumulators: WithAux) -> Accumulator:
        return WithAux(self.inner.merge_stacked(accumulators.update), _MEAN.merge_stacked(accumulators.aux))

    def merge_devices(self, accumulator: WithAux, axis: str) -> Accumulator:
        return WithAux(self.inner.merge_devices(accumulator.update, axis), _MEAN.merge_devices(accumulator.aux, axis))

    def finish(self, accumulator: WithAux) -> WithAux:
        return WithAux(self.inner.finish(accumulator.update), _MEAN.finish(accumulator.aux))

    def finish_round(self, accumulator: WithAux, memory: Memory, key: jax.Array) -> tuple[WithAux, Memory]:
        update, memory = self.inner.finish_round(accumulator.update, memory, key)
        return WithAux(update, _MEAN.finish(accumulator.aux)), memory

    def finish_round_devices(self, accumulator: WithAux, memory: Memory, key: jax.Array, axis: str) -> tuple[WithAux, Memory]:
        if not inherits_aggregation(AuxMean, self):
            return super().finish_round_devices(accumulator, memory, key, axis)
        update, memory = self.inner.finish_round_devices(accumulator.update, memory, key, axis)
        return WithAux(update, _MEAN.finish(_MEAN.merge_devices(accumulator.aux, axis))), memory


def with_aux_of(other: Update, update: Update) -> Update:
    """Returns ``update`` with the auxiliary data of ``other``. Updates without auxiliary data are returned unchanged.

    It restores the auxiliary data of an attacker, because attacks change only the update. The update may be that of a `Member`.

    >>> with_aux_of(WithAux(1.0, aux=7.0), WithAux(-1.0, aux=-7.0))
    WithAux(update=-1.0, aux=7.0)
    """
    if isinstance(update, Member):
        return update._replace(update=with_aux_of(other.update, update.update))
    return WithAux(with_aux_of(other.update, update.update), other.aux) if isinstance(update, WithAux) else update


def with_empty_aux(update: Update) -> Update:
    """Returns ``update`` with () as its auxiliary data, so that only coordinates of the update are left.

    >>> with_empty_aux(WithAux(WithAux(1.0, aux=7.0), aux=8.0))
    WithAux(update=WithAux(update=1.0, aux=()), aux=())
    """
    if isinstance(update, Member):
        return update._replace(update=with_empty_aux(update.update))
    return WithAux(with_empty_aux(update.update), ()) if isinstance(update, WithAux) else update
