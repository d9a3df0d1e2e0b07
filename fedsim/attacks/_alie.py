"""A little is enough.

M. Baruch, G. Baruch, Y. Goldberg, "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019:
https://arxiv.org/abs/1902.06156. ``z`` is its z. Deviations: the attackers know the honest clients' mean and deviation,
which in the paper they estimate from their own honest updates; where they are a majority, or too few to reach half of the
others, z is held in [0, 3].
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.attacks._attack import Update
from fedsim.attacks._collusion import Collusion, Honest


@dataclasses.dataclass(frozen=True)
class ALittleIsEnough(Collusion):
    """All attackers send mean - z * deviation of the honest updates: away from the mean, and yet among the honest ones.

    With n clients, m of them attackers, s = floor(n / 2 + 1) - m honest ones have to be farther out than the attackers for
    these to be the majority's side: z is the normal quantile of (n - m - s) / (n - m). With a fifth of attackers that is 0 in a
    cohort of 10 and 0.25 in one of 50: give ``z`` for more harm, and more risk of being found out.

    Attributes:
      z: how many deviations away, > 0; None: the quantile.

    Raises:
      ValueError: ``z`` is not positive and finite.

    >>> honest = Honest(jnp.array([1.0]), jnp.array([2.0]), jnp.float32(26), jnp.float32(24))
    >>> [round(float(attack.collude(honest)[0]), 2) for attack in (ALittleIsEnough(z=1.5), ALittleIsEnough())]
    [-2.0, -1.85]
    """

    z: float | None = None

    def __post_init__(self) -> None:
        checks.positive(or_none=True, z=self.z, remedy="None chooses by the cohort")

    def collude(self, honest: Honest) -> Update:
        if self.z is None:
            n, m = honest.clients + honest.attackers, honest.attackers
            supporters = jnp.floor(n / 2 + 1) - m
            share = (n - m - supporters) / jnp.maximum(n - m, 1)
            z = jnp.clip(jax.scipy.special.ndtri(jnp.clip(share, 0, 1)), 0, 3)
        else:
            z = jnp.float32(self.z)
        return tree.subtract(honest.mean, tree.scale(honest.deviation, z))
