"""`Attack`: what an attacker changes, as hooks that leave everything as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.aggregators import Aggregator
from fedsim.data import Batch, FederatedData

Update = Any


def on_floats(update: Update, change: Callable[[jax.Array], jax.Array]) -> Update:
    """``update`` with its floats changed: what else it holds, such as the number of a cluster, is no direction to push in."""
    return jax.tree.map(lambda leaf: change(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, update)


def check_column(attack: Attack, data: FederatedData, feature: str, field: str) -> None:
    """Raises ``ValueError`` unless the data has the feature that this field of the attack names."""
    if feature not in data.columns:
        raise ValueError(
            f"{type(attack).__name__} reads feature {feature!r}, which the data lacks; it has {sorted(data.columns)}: name one "
            f"of these by {field}."
        )


@dataclasses.dataclass(frozen=True)
class Attack:
    """What clients do who mean harm: subclass it as ``@dataclasses.dataclass(frozen=True)``, and override what differs.

    An attack is compared by its fields, which are to be hashable: cohorts of equal attacks share one compiled program. All
    hooks are pure and traced, and called for every client; what they give is taken where a client is an attacker.

    >>> class Freeloading(Attack):
    ...     def corrupt(self, update, key): return jax.tree.map(jax.numpy.zeros_like, update)
    >>> Freeloading().corrupt(jax.numpy.ones(2), jax.random.key(0)).tolist()
    [0.0, 0.0]
    """

    def check(self, data: FederatedData) -> None:
        """Raises ``ValueError``, before the first round, if clients of this population cannot attack so."""

    def poison(self, batch: Batch) -> dict[str, jax.Array]:
        """The examples that an attacker trains on instead of ``batch.examples``, of the same shapes and dtypes."""
        return batch.examples

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        """What an attacker sends instead of its update, which its local work gave; ``key`` is its own of the round.

        The aggregator's `send` comes after it, as for everybody: an attacker's message is compressed and clipped like others'.
        """
        return update

    def surround(self, aggregator: Aggregator, attackers: jax.Array) -> Aggregator:
        """What folds the updates of a cohort of which ``attackers``, ``bool [slots]``, attack: for attacks that look on."""
        return aggregator
