"""`Collusion`: base class of attacks in which all attackers send one update, computed from the honest clients' updates."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.aggregators import Aggregator, WithAux, Wrapper, accumulation_dtype, with_aux_of
from fedsim.attacks._attack import Attack, Update


class HonestStatistics(NamedTuple):
    """Statistics of the honest clients' updates in a round, which colluding attackers know.

    Attributes:
      mean: the unweighted mean of the honest updates.
      deviation: the standard deviation of every coordinate over the honest updates (with n in the denominator).
      clients: number of honest clients, ``float32 []``.
      attackers: number of attackers, ``float32 []``.
    """

    mean: Update
    deviation: Update
    clients: jax.Array
    attackers: jax.Array


@dataclasses.dataclass(frozen=True)
class Collusion(Attack):
    """Base class of attacks in which all attackers send the same update. Subclasses define `collude`.

    The attackers know statistics of the honest updates as the server receives them (after clipping and compression). The
    results of their own training are discarded, except for the weight and the size of the message. Their update is sent with
    the aggregator's `send`, like other updates, but they keep no memory of it (for example no residual).

    Raises:
      ValueError: before the first round, if updates have leaves that are not floats. (The auxiliary data of
        `fedsim.aggregators.WithAux` may have any dtype.)

    >>> class Copy(Collusion):
    ...     def collude(self, honest): return honest.mean
    >>> Copy().wrap_aggregator(Wrapper(), jnp.array([True, False])).attack
    Copy()
    """

    def collude(self, honest: HonestStatistics) -> Update:
        """Returns the update that every attacker sends."""
        raise NotImplementedError(f"{type(self).__name__} must define collude(honest).")

    def corrupt_all(self, values: Update, attackers: jax.Array, key: jax.Array) -> Update:
        clients = jnp.sum(~attackers, dtype=jnp.float32)
        wide = jax.tree.map(lambda x: x.astype(accumulation_dtype(x.dtype)), values)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(tree.per_row(attackers, x), 0, x), axis=0) / jnp.maximum(clients, 1).astype(x.dtype)

        means = jax.tree.map(mean, wide)
        variances = jax.tree.map(lambda x, centre: mean(jnp.square(x - centre[None])), wide, means)
        honest = HonestStatistics(means, jax.tree.map(jnp.sqrt, variances), clients, len(attackers) - clients)
        sent = jax.tree.map(lambda x, own: x.astype(own.dtype), self.collude(honest), values)
        return jax.vmap(tree.select, (0, None, 0))(attackers, sent, values)

    def wrap_aggregator(self, aggregator: Aggregator, attackers: jax.Array) -> Aggregator:
        return _CollusionWrapper(self, attackers, inner=aggregator)


class Moments(NamedTuple):
    """Number of updates, their mean, and the sum of squared differences from the mean."""

    clients: jax.Array
    mean: Update
    squares: Update

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both sets of updates together.

        The formula of T. Chan, G. Golub, R. LeVeque (1979) is accurate also if the mean is large.
        """
        clients = self.clients + other.clients
        share = other.clients / jnp.maximum(clients, 1)
        difference = tree.subtract(other.mean, self.mean)
        mean = tree.add(self.mean, tree.scale(difference, share))
        between = tree.scale(jax.tree.map(jnp.square, difference), self.clients * share)
        return Moments(clients, mean, tree.add(tree.add(self.squares, other.squares), between))


class _Accumulator(NamedTuple):
    """The accumulator of the honest updates, their moments, and the attackers' weights, ``float32 [slots]``."""

    inner: Any
    moments: Moments
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _CollusionWrapper(Wrapper):
    """Aggregates honest updates and computes their moments. In the end, adds the attackers' update once for each attacker."""

    attack: Collusion
    attackers: jax.Array

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        without_aux = with_aux_of(WithAux((), ()), update)
        for path, leaf in jax.tree_util.tree_leaves_with_path(without_aux):
            if not tree.is_float(leaf):
                raise ValueError(
                    f"{type(self.attack).__name__} needs updates of floats, because it computes their mean, got "
                    f"update{jax.tree_util.keystr(path)} of {leaf.dtype}, aggregated by {self.inner} (a count, or in "
                    "HypCluster and IFCA the number of a cluster). Use an attack without collusion: SignFlip, GaussianNoise, "
                    "LabelFlip or PixelBackdoor."
                )

    def zero(self, update: Update, slots: int) -> _Accumulator:
        # Auxiliary data may be integers or booleans. Their mean is a float.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype if tree.is_float(x) else jnp.float32), update)
        return _Accumulator(super().zero(update, slots), Moments(jnp.float32(0), zeros, zeros), jnp.zeros(slots, jnp.float32))

    def accumulate(self, accumulator: _Accumulator, update: Update, weight: jax.Array, slot: jax.Array) -> _Accumulator:
        honest = jnp.where(self.attackers[slot], 0, weight)
        mean = jax.tree.map(lambda x, mean: x.astype(mean.dtype), update, accumulator.moments.mean)
        one = Moments((honest != 0).astype(jnp.float32), mean, jax.tree.map(jnp.zeros_like, mean))
        return _Accumulator(
            super().accumulate(accumulator.inner, update, honest, slot),
            accumulator.moments.merge(one),
            accumulator.weights.at[slot].add(weight - honest),
        )

    def merge(self, a: _Accumulator, b: _Accumulator) -> _Accumulator:
        return _Accumulator(super().merge(a.inner, b.inner), a.moments.merge(b.moments), a.weights + b.weights)

    def merge_stacked(self, accumulators: _Accumulator) -> _Accumulator:
        return _Accumulator(super().merge_stacked(accumulators.inner), *_merge(accumulators.moments, accumulators.weights))

    def merge_devices(self, accumulator: _Accumulator, axis: str) -> _Accumulator:
        merged = _merge(*jax.lax.all_gather((accumulator.moments, accumulator.weights), axis))
        return _Accumulator(super().merge_devices(accumulator.inner, axis), *merged)

    def finish(self, accumulator: _Accumulator) -> Update:
        return super().finish(accumulator.inner)

    def finish_round(self, accumulator: _Accumulator, memory: Any, key: jax.Array) -> tuple[Update, Any]:
        clients, mean, squares = accumulator.moments
        deviation = jax.tree.map(lambda x: jnp.sqrt(x / jnp.maximum(clients, 1).astype(x.dtype)), squares)
        weights = accumulator.weights
        attackers = jnp.sum(weights != 0, dtype=jnp.float32)
        update = with_aux_of(mean, self.attack.collude(HonestStatistics(mean, deviation, clients, attackers)))

        def add_attacker(slot: jax.Array, inner: Any) -> Any:
            own = jax.random.fold_in(rng.stream(key, "collusion"), slot)
            received = self.inner.send(update, memory, self.inner.client_memory(update), own).update
            # As for other clients, an update that is not finite must not reach the aggregator.
            finite = jnp.isfinite(tree.squared_norm(received))
            received = tree.select(finite, received, jax.tree.map(jnp.zeros_like, received))
            return self.inner.accumulate(inner, received, jnp.where(finite, weights[slot], 0), slot)

        def add(slot: jax.Array, inner: Any) -> Any:
            return jax.lax.cond(weights[slot] != 0, add_attacker, lambda _, inner: inner, slot, inner)

        return super().finish_round(jax.lax.fori_loop(0, len(weights), add, accumulator.inner), memory, key)


def _merge(moments: Moments, weights: jax.Array) -> tuple[Moments, jax.Array]:
    """Merges moments and attackers' weights that are stacked along a new first axis."""
    first, rest = (jax.tree.map(lambda x, s=s: x[s], moments) for s in (0, slice(1, None)))
    return jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)[0], jnp.sum(weights, axis=0)
