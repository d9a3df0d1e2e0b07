"""Gaussian noise.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NeurIPS 2017: https://arxiv.org/abs/1703.02757, where attackers send Gaussian vectors of standard deviation 200.
Extension: with ``added``, the vector is added to the attacker's update.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.attacks._attack import Attack, Update


@dataclasses.dataclass(frozen=True)
class GaussianNoise(Attack):
    """Attackers send Gaussian noise instead of their update. Integers and booleans do not change.

    Attributes:
      deviation: standard deviation of the noise, positive; of a complex number, that of both parts together.
      added: whether the noise is added to the update instead.

    Raises:
      ValueError: ``deviation`` is not positive and finite.

    >>> noise = GaussianNoise(deviation=3.0).corrupt(jnp.zeros(10_000), jax.random.key(0))
    >>> round(float(jnp.std(noise)))
    3
    """

    deviation: float = 200.0
    added: bool = False

    def __post_init__(self) -> None:
        checks.positive(deviation=self.deviation)
        checks.truth(added=self.added)

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        leaves, structure = jax.tree.flatten(update)

        def noise(key: jax.Array, leaf: jax.Array) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return leaf
            draw = jnp.asarray(self.deviation, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
            return leaf + draw if self.added else draw

        return jax.tree.unflatten(structure, map(noise, jax.random.split(key, len(leaves)), leaves))
