"""Centred clipping.

S. P. Karimireddy, L. He, M. Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021:
https://arxiv.org/abs/2012.10333. ``radius`` is its τ. Deviations: one iteration a round (its L = 1), which needs no update
twice and so folds; the mean is weighted, which in the paper it is not (``weighting="uniform"``).
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks
from fedsim.aggregators._aggregator import Accumulator, Mean, Memory, Sent, Update
from fedsim.aggregators._clipped import check_floats, clip


@dataclasses.dataclass(frozen=True, eq=False)
class CentredClipping(Mean):
    """The mean of updates that are clipped around the last aggregate v: v + (u_i - v) * min(1, radius / ‖u_i - v‖).

    The server remembers v, at first zeros. Who wants to do harm moves the aggregate by his share of the radius at most, and
    has to do so round after round. Made for clients with momentum, which it needs to average out what is clipped; a fold, so
    its memory does not grow with the cohort.

    It acts where an update is sent, on attackers' updates as on any other: a server would do it on arrival.

    Attributes:
      radius: τ > 0 and finite, how far from v an update may be. Beyond all distances it is the mean.

    Guarantees:
      - The aggregate is at most ``radius`` from the last one.

    Raises:
      ValueError: ``radius`` is not positive and finite; before the first round, an update with leaves that are not floats.

    >>> import jax.numpy as jnp
    >>> clipping = CentredClipping(2.0)
    >>> sent = clipping.send(jnp.array([13.0, 14.0]), jnp.array([10.0, 10.0]), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update.tolist()]
    [11.2, 11.6]
    """

    radius: float = 10.0

    def __post_init__(self) -> None:
        checks.positive(radius=self.radius, remedy="how far an update may be from the last aggregate")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("CentredClipping", update)

    def init(self, update: Update) -> Memory:
        return self.finish(self.zero(update, 1))

    def send(self, update: Update, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        moved = jax.tree.map(lambda u, v: u.astype(v.dtype) - v, update, common)
        near = jax.tree.map(lambda u, v, d: (v + d).astype(u.dtype), update, common, clip(moved, self.radius))
        return super().send(near, common, memory, key)

    def conclude(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        update = self.finish(accumulator)
        return update, update
