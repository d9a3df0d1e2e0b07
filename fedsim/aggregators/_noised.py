"""Gaussian noise on the aggregate.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially private recurrent language models", ICLR 2018, algorithm
1: https://arxiv.org/abs/1710.06963; against backdoors Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you really backdoor
federated learning?", 2019: https://arxiv.org/abs/1911.07963. ``multiplier`` is z, ``norm`` is S. Deviation: n is the number of
clients whose update counts in the round, and not the expected one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.aggregators._aggregator import Accumulator, Memory, Update, Wrapper


class Counted(NamedTuple):
    """A fold, and of how many, ``float32 []``."""

    inner: Accumulator
    clients: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Noised(Wrapper):
    """Adds noise to the aggregate: to every coordinate a normal number of standard deviation multiplier * norm / n.

    With n clients counting, that is the Gaussian mechanism for a uniform mean of updates no longer than ``norm``:
    ``Noised(1.0, norm=0.5, inner=Clipped(0.5))`` with ``weighting="uniform"``. It is noise, and not a privacy accountant: what
    privacy it buys nobody here adds up, and of other weights or another aggregate nothing is claimed at all.

    Attributes:
      multiplier: z >= 0, the noise in units of what one client can change.
      norm: S > 0, the longest update: what `Clipped` has.
      inner: see `Wrapper`.

    Raises:
      ValueError: a number out of its range.

    >>> noised = Noised(0.5, norm=2.0)
    >>> fold = noised.accumulate(noised.zero(jnp.zeros(10_000), slots=1), jnp.zeros(10_000), jnp.float32(1), 0)
    >>> round(float(jnp.std(noised.conclude(fold, (), jax.random.key(0))[0])), 1)
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

    def conclude(self, accumulator: Counted, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        update, memory = super().conclude(accumulator.inner, memory, rng.stream(key, "inner"))
        deviation = self.multiplier * self.norm / jnp.maximum(accumulator.clients, 1)
        leaves, structure = jax.tree.flatten(update)
        keys = jax.random.split(rng.stream(key, "noise"), len(leaves))
        noised = [
            x + deviation.astype(x.dtype) * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, noised), memory
