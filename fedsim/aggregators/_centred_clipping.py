"""Centred clipping.

S. P. Karimireddy, L. He, M. Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021:
https://arxiv.org/abs/2012.10333. ``radius`` is the paper's τ. Deviations: there is one iteration per round (the paper's L = 1),
so every update is needed only once and updates need not be stored. The mean is weighted by the clients' weights; use
``weighting="uniform"`` for the paper's unweighted mean.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Accumulator, Mean, Memory, Sent, Update
from fedsim.aggregators._clipped import check_floats


@dataclasses.dataclass(frozen=True, eq=False)
class CentredClipping(Mean):
    """The mean of updates that are clipped around the last aggregate v: v + (u_i - v) * min(1, radius / ‖u_i - v‖).

    The server keeps v between rounds; it is zero at first, and stays as it is if no client contributes. An attacker can move
    the aggregate per round by at most its share of the weight times the radius. The method is designed for clients that use
    momentum, which averages out what clipping removes. Memory does not grow with the cohort.

    Clipping is computed where an update is sent, also for attackers' updates. In a real system the server would clip what it
    receives.

    Attributes:
      radius: τ, the largest distance of an update from v, positive and finite. If it exceeds all distances, the aggregate is
        the mean.

    Guarantees:
      - The aggregate is at most ``radius`` away from the last aggregate, up to the rounding of what is sent in half precision.

    Raises:
      ValueError: ``radius`` is not positive and finite. Before the first round: an update has leaves that are not floats.

    >>> import jax.numpy as jnp
    >>> clipping = CentredClipping(2.0)
    >>> sent = clipping.send(jnp.array([13.0, 14.0]), jnp.array([10.0, 10.0]), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update.tolist()]
    [11.2, 11.6]
    """

    radius: float = 10.0

    def __post_init__(self) -> None:
        checks.positive(radius=self.radius, remedy="how far an update may be from the last aggregate")

    @property
    def is_scalable(self) -> bool:
        return False  # Messages contain v, which the scale of a stale update would move.

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("CentredClipping", update)

    def init(self, update: Update) -> Memory:
        return self.finish(self.zero(update, 1))

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        difference = jax.tree.map(lambda u, v: u.astype(v.dtype) - v, update, server_memory)
        clipped = jax.tree.map(
            lambda u, v, d: (v + d).astype(u.dtype), update, server_memory, tree.clip(difference, self.radius)
        )
        return super().send(clipped, server_memory, memory, key)

    def finish_round(self, accumulator: Accumulator, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        update = self.finish(accumulator)
        # One call of a round with several may have no clients, whose mean of 0 is no centre.
        return update, tree.select(accumulator.weight != 0, update, memory)
