"""Draws one example from all clients at once: every example gets a random number, its lot, and the highest lot is drawn."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum

NOBODY = -1e9


class Candidate(NamedTuple):
    """An example, ``float32 [features]``, and its lot. The candidate with the highest lot is drawn."""

    lot: jax.Array
    point: jax.Array


class Found(NamedTuple):
    """What a client sends: statistics, which are summed, and a candidate. The candidate with the highest lot is kept."""

    statistics: Any
    candidate: Candidate


def nobody(features: int) -> Candidate:
    """Returns a placeholder with a lower lot than any example."""
    return Candidate(jnp.float32(NOBODY), jnp.zeros(features, jnp.float32))


def drawn(x: jax.Array, chance: jax.Array, mask: jax.Array, key: jax.Array) -> Candidate:
    """Draws one of the examples ``float32 [n, features]``, with probabilities proportional to ``chance [n]``.

    A lot is the logarithm of the chance plus Gumbel noise, and the example with the highest lot is returned. Examples that are
    masked or have no chance get the lowest lot.
    """
    lots = jnp.where(chance > 0, jnp.log(chance), NOBODY) + jax.random.gumbel(key, chance.shape)
    lots = jnp.where(mask & (chance > 0), lots, NOBODY)
    best = jnp.argmax(lots)
    return Candidate(lots[best], x[best])


def higher(a: Candidate, b: Candidate) -> Candidate:
    """Returns the candidate with the higher lot."""
    return tree.select(b.lot > a.lot, b, a)


@dataclasses.dataclass(frozen=True, eq=False)
class SumAndHighest(Aggregator):
    """Sums the statistics and keeps the candidate with the highest lot: a `fedsim.aggregators.Aggregator` of `Found`."""

    def zero(self, update: Any, slots: int) -> Any:
        return Found(Sum().zero(update.statistics, slots), nobody(*update.candidate.point.shape))

    def accumulate(self, accumulator: Any, update: Any, weight: jax.Array, slot: jax.Array) -> Any:
        candidate = update.candidate._replace(lot=jnp.where(weight == 0, NOBODY, update.candidate.lot))
        total = Sum().accumulate(accumulator.statistics, update.statistics, weight, slot)
        return Found(total, higher(accumulator.candidate, candidate))

    def merge(self, a: Any, b: Any) -> Any:
        return Found(Sum().merge(a.statistics, b.statistics), higher(a.candidate, b.candidate))

    def finish(self, accumulator: Any) -> Any:
        return accumulator._replace(statistics=Sum().finish(accumulator.statistics))
