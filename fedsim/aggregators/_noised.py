"""Gaussian noise on the aggregate.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially private recurrent language models", ICLR 2018, algorithm
1: https://arxiv.org/abs/1710.06963. As a defense against backdoors: Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you
really backdoor federated learning?", 2019: https://arxiv.org/abs/1911.07963. ``multiplier`` is z, and ``norm`` is S. Deviation:
n is the number of clients whose update counts in the round, not the expected number.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Accumulator, Memory, Update, Wrapper


class Counted(NamedTuple):
    """The inner accumulator, and the number of updates in it, ``float32 []``."""

    inner: Accumulator
    clients: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Noised(Wrapper):
    """Adds Gaussian noise of standard deviation multiplier * norm / n to every coordinate of the aggregate of n updates.

    For a uniform mean of updates whose norm is at most ``norm``, this is the Gaussian mechanism: ``Noised(1.0, norm=0.5,
    inner=Clipped(0.5))`` with ``weighting="uniform"``. fedsim has no privacy accountant, so it does not compute the resulting
    privacy loss. For other weights or another aggregate, there is no privacy guarantee.

    Attributes:
      multiplier: z, the standard deviation of the noise in units of norm / n, which is the largest effect of one client on the
        mean. At least 0.
      norm: S, the largest norm of an update, positive: the ``norm`` of `Clipped`.
      inner: see `Wrapper`.

    Raises:
      ValueError: an attribute is out of its range.

    >>> noised = Noised(0.5, norm=2.0)
    >>> accumulator = noised.accumulate(noised.zero(jnp.zeros(10_000), slots=1), jnp.zeros(10_000), jnp.float32(1), 0)
    >>> round(float(jnp.std(noised.finish_round(accumulator, (), jax.random.key(0))[0])), 1)
    1.0
    """

    multiplier: float
    norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, multiplier=self.multiplier)
        checks.positive(norm=self.norm, remedy="the norm that updates are clipped to")

    def zero(self, update: Update, slots: int) -> Counted:
        return Counted(super().zero(update, slots), jnp.float32(0))

    def accumulate(self, accumulator: Counted, update: Update, weight: jax.Array, slot: jax.Array) -> Counted:
        clients = accumulator.clients + (weight != 0).astype(jnp.float32)
        return Counted(super().accumulate(accumulator.inner, update, weight, slot), clients)

    def merge(self, a: Counted, b: Counted) -> Counted:
        return Counted(super().merge(a.inner, b.inner), a.clients + b.clients)

    def merge_stacked(self, accumulators: Counted) -> Counted:
        return Counted(super().merge_stacked(accumulators.inner), jnp.sum(accumulators.clients))

    def merge_devices(self, accumulator: Counted, axis: str) -> Counted:
        return Counted(super().merge_devices(accumulator.inner, axis), jax.lax.psum(accumulator.clients, axis))

    def finish(self, accumulator: Counted) -> Update:
        return super().finish(accumulator.inner)

    def finish_round(self, accumulator: Counted, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        update, memory = super().finish_round(accumulator.inner, memory, rng.stream(key, "inner"))
        deviation = self.multiplier * self.norm / jnp.maximum(accumulator.clients, 1)
        noise = rng.normal_like(rng.stream(key, "noise"), update)
        return tree.add(update, tree.scale(noise, deviation)), memory
