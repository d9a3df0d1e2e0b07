"""Sign flip.

L. Li, W. Xu, T. Chen, G. B. Giannakis, Q. Ling, "RSA: Byzantine-robust stochastic aggregation methods for distributed learning
from heterogeneous datasets", AAAI 2019: https://arxiv.org/abs/1811.03761. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.attacks._attack import Attack, Update, on_inexact


@dataclasses.dataclass(frozen=True)
class SignFlip(Attack):
    """Attackers send -scale times their update. Integers and booleans do not change.

    Attributes:
      scale: positive.

    Raises:
      ValueError: ``scale`` is not positive and finite.

    >>> SignFlip(scale=2.0).corrupt(jax.numpy.ones(2), jax.random.key(0)).tolist()
    [-2.0, -2.0]
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        return on_inexact(update, lambda leaf: leaf * jnp.asarray(-self.scale, leaf.dtype))
