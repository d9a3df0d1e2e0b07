"""`Collusion`: attackers who know what the honest clients sent, and agree on what to send themselves."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.aggregators import Aggregator, Noted, Wrapper, with_notes_of
from fedsim.attacks._attack import Attack, Update


class Honest(NamedTuple):
    """What colluding attackers know of the round.

    Attributes:
      mean: of the honest clients' updates, each counting once.
      deviation: the standard deviation of every coordinate among them (with n in the denominator).
      clients: how many they are, ``float32 []``.
      attackers: how many attack, ``float32 []``.
    """

    mean: Update
    deviation: Update
    clients: jax.Array
    attackers: jax.Array


@dataclasses.dataclass(frozen=True)
class Collusion(Attack):
    """An attack of all attackers together: subclasses write `collude`.

    What the honest clients sent is known as it arrived (clipped, compressed). What the attackers' own local work gave is thrown
    away, all but its weight and the size of its message. Their common update is sent as others are, by the aggregator's `send`,
    only that they keep no memory of it (a residual, say).

    Raises:
      ValueError: before the first round, updates with a leaf that is not a float, of which there is no mean. (Of notes beside
        an update there is one, whatever they are.)

    >>> class Copy(Collusion):
    ...     def collude(self, honest): return honest.mean
    >>> Copy().surround(Wrapper(), jnp.array([True, False])).attack
    Copy()
    """

    def collude(self, honest: Honest) -> Update:
        """What each attacker sends."""
        raise NotImplementedError(f"{type(self).__name__} must define collude(honest).")

    def surround(self, aggregator: Aggregator, attackers: jax.Array) -> Aggregator:
        return Overheard(self, attackers, inner=aggregator)


class Moments(NamedTuple):
    """Number, mean and sum of squared distances to the mean of updates so far."""

    clients: jax.Array
    mean: Update
    squares: Update

    def merge(self, other: Moments) -> Moments:
        """Of both together (T. Chan, G. Golub, R. LeVeque 1979), which loses nothing where the mean is large."""
        clients = self.clients + other.clients
        share = other.clients / jnp.maximum(clients, 1)
        away = tree.subtract(other.mean, self.mean)
        mean = tree.add(self.mean, tree.scale(away, share))
        between = tree.scale(jax.tree.map(jnp.square, away), self.clients * share)
        return Moments(clients, mean, tree.add(tree.add(self.squares, other.squares), between))


class Heard(NamedTuple):
    """The honest clients' fold, their moments, and the attackers' weights, ``float32 [slots]``."""

    inner: Any
    moments: Moments
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Overheard(Wrapper):
    """Folds honest updates and listens; in the end, folds what the attackers agreed on, once for each of them."""

    attack: Collusion
    attackers: jax.Array

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        without_notes = with_notes_of(Noted((), ()), update)
        for path, leaf in jax.tree_util.tree_leaves_with_path(without_notes):
            if not tree.is_float(leaf):
                raise ValueError(
                    f"{type(self.attack).__name__} needs means of all that clients send, and cannot attack what {self.inner} "
                    f"folds: there, update{jax.tree_util.keystr(path)} is {leaf.dtype}, a count, or as in HypCluster and IFCA "
                    "the number of a cluster. Choose an attack of each client for itself, which leaves that as it is: "
                    "SignFlip, GaussianNoise, LabelFlip or PixelBackdoor."
                )

    def zero(self, update: Update, slots: int) -> Heard:
        # Notes may be counts or flags, of which there is a mean, too.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype if tree.is_float(x) else jnp.float32), update)
        return Heard(super().zero(update, slots), Moments(jnp.float32(0), zeros, zeros), jnp.zeros(slots, jnp.float32))

    def accumulate(self, accumulator: Heard, update: Update, weight: jax.Array, slot: jax.Array) -> Heard:
        attacks = self.attackers[slot]
        honest = jnp.where(attacks, 0, weight)
        mean = jax.tree.map(lambda x, mean: x.astype(mean.dtype), update, accumulator.moments.mean)
        one = Moments((honest != 0).astype(jnp.float32), mean, jax.tree.map(jnp.zeros_like, mean))
        return Heard(
            super().accumulate(accumulator.inner, update, honest, slot),
            accumulator.moments.merge(one),
            accumulator.weights.at[slot].add(weight - honest),
        )

    def merge(self, a: Heard, b: Heard) -> Heard:
        return Heard(super().merge(a.inner, b.inner), a.moments.merge(b.moments), a.weights + b.weights)

    def merge_stacked(self, accumulators: Heard) -> Heard:
        return Heard(super().merge_stacked(accumulators.inner), *_heard(accumulators.moments, accumulators.weights))

    def merge_devices(self, accumulator: Heard, axis: str) -> Heard:
        heard = _heard(*jax.lax.all_gather((accumulator.moments, accumulator.weights), axis))
        return Heard(super().merge_devices(accumulator.inner, axis), *heard)

    def finish(self, accumulator: Heard) -> Update:
        return super().finish(accumulator.inner)

    def conclude(self, accumulator: Heard, memory: Any, key: jax.Array) -> tuple[Update, Any]:
        clients, mean, squares = accumulator.moments
        deviation = jax.tree.map(lambda x: jnp.sqrt(x / jnp.maximum(clients, 1).astype(x.dtype)), squares)
        weights = accumulator.weights
        attackers = jnp.sum(weights != 0, dtype=jnp.float32)
        update = with_notes_of(mean, self.attack.collude(Honest(mean, deviation, clients, attackers)))

        def attack(slot: jax.Array, fold: Any) -> Any:
            own = jax.random.fold_in(rng.stream(key, "collusion"), slot)
            arrived = self.inner.send(update, memory, self.inner.client_memory(update), own).update
            # As of others, nothing that is not finite reaches the aggregator.
            finite = jnp.isfinite(tree.squared_norm(arrived))
            arrived = tree.select(finite, arrived, jax.tree.map(jnp.zeros_like, arrived))
            return self.inner.accumulate(fold, arrived, jnp.where(finite, weights[slot], 0), slot)

        def each(slot: jax.Array, fold: Any) -> Any:
            return jax.lax.cond(weights[slot] != 0, attack, lambda _, fold: fold, slot, fold)

        return super().conclude(jax.lax.fori_loop(0, len(weights), each, accumulator.inner), memory, key)


def _heard(moments: Moments, weights: jax.Array) -> tuple[Moments, jax.Array]:
    """What was heard in several places, stacked along a new first axis, as one."""
    first, rest = (jax.tree.map(lambda x, s=s: x[s], moments) for s in (0, slice(1, None)))
    return jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)[0], jnp.sum(weights, axis=0)
