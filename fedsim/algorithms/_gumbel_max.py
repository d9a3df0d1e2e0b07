"""Draws one example from the examples of all clients by the Gumbel-max trick.

Every example gets a random priority, and the example with the highest priority is drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum

LOWEST = -1e9


class Candidate(NamedTuple):
    """An example, ``point float32 [features]``, and its priority. The candidate with the highest priority is drawn."""

    priority: jax.Array
    point: jax.Array


class StatisticsAndCandidate(NamedTuple):
    """What a client sends: statistics, which are summed, and a candidate. The candidate with the highest priority is kept."""

    statistics: Any
    candidate: Candidate


def no_candidate(features: int) -> Candidate:
    """Returns a placeholder with a lower priority than any example."""
    return Candidate(jnp.float32(LOWEST), jnp.zeros(features, jnp.float32))


def draw_candidate(x: jax.Array, weight: jax.Array, mask: jax.Array, key: jax.Array) -> Candidate:
    """Draws one of the examples ``float32 [n, features]``, with probabilities proportional to ``weight [n]``.

    A priority is the logarithm of the weight plus Gumbel noise, and the example with the highest priority is returned. Examples
    that are masked or have weight 0 get the lowest priority.
    """
    priorities = jnp.where(weight > 0, jnp.log(weight), LOWEST) + jax.random.gumbel(key, weight.shape)
    priorities = jnp.where(mask & (weight > 0), priorities, LOWEST)
    best = jnp.argmax(priorities)
    return Candidate(priorities[best], x[best])


def with_higher_priority(a: Candidate, b: Candidate) -> Candidate:
    """Returns the candidate with the higher priority."""
    return tree.select(b.priority > a.priority, b, a)


@dataclasses.dataclass(frozen=True, eq=False)
class SumAndHighestPriority(Aggregator):
    """Aggregates `StatisticsAndCandidate`: sums the statistics, and keeps the candidate with the highest priority."""

    adds_weights = True

    def zero(self, update: Any, slots: int) -> Any:
        return StatisticsAndCandidate(Sum().zero(update.statistics, slots), no_candidate(*update.candidate.point.shape))

    def accumulate(self, accumulator: Any, update: Any, weight: jax.Array, slot: jax.Array) -> Any:
        candidate = update.candidate._replace(priority=jnp.where(weight == 0, LOWEST, update.candidate.priority))
        total = Sum().accumulate(accumulator.statistics, update.statistics, weight, slot)
        return StatisticsAndCandidate(total, with_higher_priority(accumulator.candidate, candidate))

    def merge(self, a: Any, b: Any) -> Any:
        return StatisticsAndCandidate(Sum().merge(a.statistics, b.statistics), with_higher_priority(a.candidate, b.candidate))

    def finish(self, accumulator: Any) -> Any:
        return accumulator._replace(statistics=Sum().finish(accumulator.statistics))
