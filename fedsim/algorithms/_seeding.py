"""Initial points of clusters: k-means++ over the examples of all clients, one point per round.

D. Arthur, S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007 (ACM, pages 1027-1035).

A round draws the next point from all examples of its cohort, by the Gumbel-max trick. The probability of an example is
proportional to its squared distance to the nearest point so far, and uniform for the first point. Every example gets a
priority: the logarithm of this distance plus Gumbel noise. A client sends its example with the highest priority, and the server
keeps the highest of all. This is the same as a k-means++ draw from all these examples at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum

_LOWEST = -1e9


class Candidate(NamedTuple):
    """An example, ``point float32 [features]``, and its priority. The candidate with the highest priority is drawn."""

    priority: jax.Array
    point: jax.Array

    @classmethod
    def none(cls, features: int) -> Candidate:
        """Returns a placeholder with a lower priority than any example."""
        return cls(jnp.float32(_LOWEST), jnp.zeros(features, jnp.float32))

    def times(self, share: jax.Array) -> Candidate:
        """Returns the candidate of ``share`` times as many examples: the maximum of m Gumbel variables is one plus log(m)."""
        priority = jnp.where(self.priority > _LOWEST, self.priority + jnp.log(share), self.priority)
        return self._replace(priority=priority)

    def or_higher(self, other: Candidate) -> Candidate:
        """Returns the candidate with the higher priority."""
        return tree.select(other.priority > self.priority, other, self)


class StatisticsAndCandidate(NamedTuple):
    """What a client sends: statistics, which are summed, and a candidate. The candidate with the highest priority is kept."""

    statistics: Any
    candidate: Candidate


def draw_candidate(points: jax.Array, num_started: jax.Array, x: jax.Array, mask: jax.Array, key: jax.Array) -> Candidate:
    """Draws the next point from the examples ``x float32 [n, features]`` where ``mask [n]`` is True.

    The first ``num_started`` of ``points [k, features]`` are initialized. Examples that equal one of them get the lowest
    priority.
    """
    there = jnp.arange(len(points)) < num_started
    nearest = jnp.min(squared_distances(x, points), axis=1, where=there, initial=jnp.inf)
    weight = jnp.where(num_started == 0, 1.0, nearest)
    priorities = jnp.where(weight > 0, jnp.log(weight), _LOWEST) + jax.random.gumbel(key, weight.shape, jnp.float32)
    priorities = jnp.where(mask & (weight > 0), priorities, _LOWEST)
    best = jnp.argmax(priorities)
    return Candidate(priorities[best], x[best])


def add_point(points: jax.Array, num_started: jax.Array, drawn: Candidate) -> jax.Array:
    """Returns ``points`` with the drawn one, which follows the first ``num_started``."""
    # If there are fewer distinct examples than points, the remaining points are copies of the first.
    return points.at[num_started].set(jnp.where(drawn.priority > _LOWEST, drawn.point, points[0]))


def squared_distances(x: jax.Array, points: jax.Array) -> jax.Array:
    """Returns the squared distances ``[n, k]`` from examples ``[n, features]`` to points ``[k, features]``.

    >>> squared_distances(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 0.0], [2.0, 1.0]])).tolist()
    [[1.0, 4.0]]
    """
    return jnp.sum(jnp.square(x[:, None, :] - points[None]), axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class SumAndHighestPriority(Aggregator):
    """Aggregates `StatisticsAndCandidate`: sums the statistics, and keeps the candidate with the highest priority."""

    adds_weights = True

    def zero(self, update: Any, slots: int) -> Any:
        return StatisticsAndCandidate(Sum().zero(update.statistics, slots), Candidate.none(*update.candidate.point.shape))

    def accumulate(self, accumulator: Any, update: Any, weight: jax.Array, slot: jax.Array) -> Any:
        candidate = update.candidate._replace(priority=jnp.where(weight == 0, _LOWEST, update.candidate.priority))
        total = Sum().accumulate(accumulator.statistics, update.statistics, weight, slot)
        return StatisticsAndCandidate(total, accumulator.candidate.or_higher(candidate))

    def merge(self, a: Any, b: Any) -> Any:
        return StatisticsAndCandidate(Sum().merge(a.statistics, b.statistics), a.candidate.or_higher(b.candidate))

    def finish(self, accumulator: Any) -> Any:
        return accumulator._replace(statistics=Sum().finish(accumulator.statistics))
