"""`Attack`: base class of attacks. Its methods change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators import Aggregator
from fedsim.data import Batch, FederatedData

Update = Any


def on_inexact(update: Update, change: Callable[[jax.Array], jax.Array]) -> Update:
    """Applies ``change`` to the floats and complex numbers of an update, but not to integers, as the number of a cluster."""
    return jax.tree.map(lambda leaf: change(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, update)


def check_column(attack: Attack, data: FederatedData, feature: str, field: str) -> None:
    """Raises ``ValueError`` if the data lacks the feature that is named by this field of the attack."""
    if feature not in data.columns:
        raise ValueError(
            f"{type(attack).__name__} needs feature {feature!r}, which the data does not have. Set {field} to one of "
            f"{sorted(data.columns)}."
        )


@dataclasses.dataclass(frozen=True)
class Attack:
    """Base class of attacks. Subclass it as ``@dataclasses.dataclass(frozen=True)``, and override the methods that differ.

    Attacks are compared by their fields, which must be hashable. Cohorts with equal attacks share one compiled program. All
    methods except `check` are pure functions of traced arrays. They are called for every client, and their result is used if
    the client is an attacker.

    >>> class Freeloading(Attack):
    ...     def corrupt(self, update, key): return jax.tree.map(jax.numpy.zeros_like, update)
    >>> Freeloading().corrupt(jax.numpy.ones(2), jax.random.key(0)).tolist()
    [0.0, 0.0]
    """

    def check(self, data: FederatedData) -> None:
        """Raises ``ValueError`` before the first round if the attack is not possible on this data."""

    def poison(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the examples on which an attacker trains instead of ``batch.examples``, with the same shapes and dtypes."""
        return batch.examples

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        """Returns what an attacker sends instead of its update.

        The aggregator's `send` is applied to the result, so an attacker's message is also compressed and clipped.

        Args:
          update: the update from the attacker's local training.
          key: a random key for this client and round.
        """
        return update

    def corrupt_all(self, values: Update, attackers: jax.Array, key: jax.Array) -> Update:
        """Returns what nodes without a server send: `corrupt` of the attackers' values, and those of the others.

        The values are what nodes would send, mostly whole models and not updates.

        Args:
          values: what honest nodes send, leaves ``[n, ...]``.
          attackers: ``bool [n]``.
          key: a random key for this message and round.
        """
        corrupted = jax.vmap(self.corrupt)(values, jax.random.split(key, len(attackers)))
        return jax.vmap(tree.select)(attackers, corrupted, values)

    def wrap_aggregator(self, aggregator: Aggregator, attackers: jax.Array) -> Aggregator:
        """Returns the aggregator to use in a cohort with these attackers, ``bool [slots]``. Colluding attacks override it."""
        return aggregator
