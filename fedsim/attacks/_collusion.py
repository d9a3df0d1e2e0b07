"""`Collusion`: base class of attacks in which all attackers send one update, computed from the honest clients' updates."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.aggregators import Aggregator, StackAggregator, Wrapper, accumulation_dtype, widened, with_aux_of, with_empty_aux
from fedsim.attacks._attack import Attack, Update


class HonestStatistics(NamedTuple):
    """Statistics of the honest clients' updates in a round, which colluding attackers know.

    Attributes:
      mean: the unweighted mean of the honest updates.
      deviation: the standard deviation of every coordinate over the honest updates (with n in the denominator).
      clients: number of honest clients, ``float32 []``.
      attackers: number of attackers, ``float32 []``.
      updates: all updates, leaves ``[slots, ...]``; () unless the attack has ``needs_updates``.
      is_honest: which of ``updates`` are of honest clients, ``bool [slots]``; () without them. All others do not count.
    """

    mean: Update
    deviation: Update
    clients: jax.Array
    attackers: jax.Array
    updates: Update = ()
    is_honest: Any = ()

    @classmethod
    def of(cls, updates: Update, is_honest: jax.Array) -> HonestStatistics:
        """Returns the statistics of updates, leaves ``[n, ...]``, where all that are not honest are of attackers.

        >>> HonestStatistics.of(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])).mean.item()
        2.0
        """
        clients = jnp.sum(is_honest, dtype=jnp.float32)
        wide = widened(updates)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(tree.per_row(is_honest, x), x, 0), axis=0) / jnp.maximum(clients, 1).astype(x.dtype)

        means = jax.tree.map(mean, wide)
        variances = jax.tree.map(lambda x, centre: mean(jnp.square(x - centre[None])), wide, means)
        deviation = jax.tree.map(tree.root, variances)
        return cls(means, deviation, clients, len(is_honest) - clients, wide, is_honest)


@dataclasses.dataclass(frozen=True)
class Collusion(Attack):
    """Base class of attacks in which all attackers send the same update. Subclasses define `collude`.

    The attackers know statistics of the honest updates as the server receives them (after clipping and compression). The
    results of their own training are discarded, except for the weight and the size of the message. Their update is sent with
    the aggregator's `send`, like other updates, but they keep no memory of it (for example no residual). In a round without
    honest updates, the statistics are zeros, of which attackers can make no harmful update: cohorts should have honest clients.

    Attributes:
      needs_updates: whether `collude` reads all updates, which are then stored.

    Raises:
      ValueError: before the first round, if updates have leaves that are not floats. (The auxiliary data of
        `fedsim.aggregators.WithAux` may have any dtype.)

    >>> class Copy(Collusion):
    ...     def collude(self, honest): return honest.mean
    >>> Copy().wrap_aggregator(Wrapper(), jnp.array([True, False])).attack
    Copy()
    """

    needs_updates: ClassVar[bool] = False

    def collude(self, honest: HonestStatistics) -> Update:
        """Returns the update that every attacker sends."""
        raise NotImplementedError(f"{type(self).__name__} must define collude(honest).")

    def corrupt_all(self, values: Update, attackers: jax.Array, key: jax.Array) -> Update:
        honest = HonestStatistics.of(values, ~attackers)
        sent = jax.tree.map(lambda x, own: x.astype(own.dtype), self.collude(honest), values)
        return jax.vmap(tree.select, (0, None, 0))(attackers, sent, values)

    def wrap_aggregator(self, aggregator: Aggregator, attackers: jax.Array) -> Aggregator:
        return _CollusionWrapper(self, attackers, inner=aggregator)


class Moments(NamedTuple):
    """Number of updates, their mean, the sum of squared differences from it, and for each leaf a 0 of the dtype that is sent.

    The mean and the squares are at least ``float32``.
    """

    clients: jax.Array
    mean: Update
    squares: Update
    like: Update

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both sets of updates together.

        The formula of T. Chan, G. Golub, R. LeVeque (1979) is accurate also if the mean is large.
        """
        clients = self.clients + other.clients
        share = other.clients / jnp.maximum(clients, 1)
        difference = tree.subtract(other.mean, self.mean)
        mean = tree.add(self.mean, tree.scale(difference, share))
        between = tree.scale(jax.tree.map(jnp.square, difference), self.clients * share)
        return Moments(clients, mean, tree.add(tree.add(self.squares, other.squares), between), self.like)


class _Accumulator(NamedTuple):
    """The accumulator of the honest updates, their moments, and the attackers' weights, ``float32 [slots]``.

    If the attack needs them, also the honest updates themselves, else ().
    """

    inner: Any
    moments: Moments
    weights: jax.Array
    updates: Any


_STACK = StackAggregator()


@dataclasses.dataclass(frozen=True, eq=False)
class _CollusionWrapper(Wrapper):
    """Aggregates honest updates and computes their moments. In the end, adds the attackers' update once for each attacker."""

    attack: Collusion
    attackers: jax.Array

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        if str(jax.tree.structure(jax.eval_shape(self._send, update))) != str(jax.tree.structure(update)):
            raise ValueError(
                f"{type(self.attack).__name__} computes updates of attackers, but {self.inner} receives more than updates: use "
                "an attack without collusion, such as SignFlip or LabelFlip, or another aggregator."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(with_empty_aux(update)):
            if not tree.is_float(leaf):
                raise ValueError(
                    f"{type(self.attack).__name__} needs updates of floats, because it computes their mean, got "
                    f"update{jax.tree_util.keystr(path)} of {leaf.dtype}, aggregated by {self.inner} (a count, or in "
                    "HypCluster and IFCA the number of a cluster). Use an attack without collusion: SignFlip, GaussianNoise, "
                    "LabelFlip or PixelBackdoor."
                )

    def _send(self, update: Update) -> Update:
        """Returns an update as the server receives it from a client without a memory, for its form."""
        key = rng.root(0)
        return self.inner.send(update, self.inner.init(update), self.inner.client_memory(update), key).update

    def zero(self, update: Update, slots: int) -> _Accumulator:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), update)
        # Auxiliary data may be integers or booleans. Their mean is a float.
        like = jax.tree.map(lambda x: jnp.zeros((), x.dtype if tree.is_float(x) else jnp.float32), update)
        weights = jnp.zeros(slots, jnp.float32)
        updates = _STACK.zero(with_empty_aux(update), slots) if self.attack.needs_updates else ()
        return _Accumulator(super().zero(update, slots), Moments(jnp.float32(0), zeros, zeros, like), weights, updates)

    def accumulate(self, accumulator: _Accumulator, update: Update, weight: jax.Array, slot: jax.Array) -> _Accumulator:
        honest = jnp.where(self.attackers[slot], 0, weight)
        mean = widened(update)
        updates = accumulator.updates
        if self.attack.needs_updates:
            updates = _STACK.accumulate(updates, with_empty_aux(update), honest, slot)
        one = Moments((honest != 0).astype(jnp.float32), mean, jax.tree.map(jnp.zeros_like, mean), accumulator.moments.like)
        return _Accumulator(
            super().accumulate(accumulator.inner, update, honest, slot),
            accumulator.moments.merge(one),
            accumulator.weights.at[slot].add(weight - honest),
            updates,
        )

    def merge(self, a: _Accumulator, b: _Accumulator) -> _Accumulator:
        updates = _STACK.merge(a.updates, b.updates)
        return _Accumulator(super().merge(a.inner, b.inner), a.moments.merge(b.moments), a.weights + b.weights, updates)

    def merge_stacked(self, accumulators: _Accumulator) -> _Accumulator:
        merged = _merge(accumulators.moments, accumulators.weights)
        updates = _STACK.merge_stacked(accumulators.updates)
        return _Accumulator(super().merge_stacked(accumulators.inner), *merged, updates)

    def merge_devices(self, accumulator: _Accumulator, axis: str) -> _Accumulator:
        merged = _merge(*jax.lax.all_gather((accumulator.moments, accumulator.weights), axis))
        updates = _STACK.merge_devices(accumulator.updates, axis)
        return _Accumulator(super().merge_devices(accumulator.inner, axis), *merged, updates)

    def finish(self, accumulator: _Accumulator) -> Update:
        return super().finish(accumulator.inner)

    def finish_round(self, accumulator: _Accumulator, memory: Any, key: jax.Array) -> tuple[Update, Any]:
        clients, mean, squares, like = accumulator.moments
        deviation = jax.tree.map(lambda x: tree.root(x / jnp.maximum(clients, 1).astype(x.dtype)), squares)
        weights = accumulator.weights
        attackers = jnp.sum(weights != 0, dtype=jnp.float32)
        known = HonestStatistics(with_empty_aux(mean), with_empty_aux(deviation), clients, attackers)
        if self.attack.needs_updates:
            updates, honest = _STACK.stacked(accumulator.updates)
            known = known._replace(updates=widened(updates), is_honest=honest != 0)
        update = jax.tree.map(lambda x, own: x.astype(own.dtype), with_aux_of(mean, self.attack.collude(known)), like)

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
