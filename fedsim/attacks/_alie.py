"""A little is enough.

M. Baruch, G. Baruch, Y. Goldberg, "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019:
https://arxiv.org/abs/1902.06156. ``z`` is the paper's z. Deviations: the attackers know the mean and the standard deviation of
the honest updates. In the paper they estimate them from the updates that they would send without the attack. z is clipped to
[0, 3]: to 0 if there are too few attackers, and to 3 if they are a majority.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.attacks._attack import Update
from fedsim.attacks._collusion import Collusion, HonestStatistics


@dataclasses.dataclass(frozen=True)
class ALittleIsEnough(Collusion):
    """All attackers send mean - z * deviation of the honest updates, which is still in the range of the honest updates.

    "deviation" is the standard deviation of each coordinate. By default z is chosen as in the paper. Of n clients, m are
    attackers. If s = floor(n / 2 + 1) - m honest clients are farther from the mean than the attackers, these together are the
    majority. So z is the standard normal quantile of (n - m - s) / (n - m). With a fifth of attackers, z is 0 in a cohort
    of 10 and 0.25 in a cohort of 50. A larger ``z`` does more damage, but is easier to detect.

    Attributes:
      z: number of standard deviations, positive. None uses the quantile.

    Raises:
      ValueError: ``z`` is not positive and finite.

    >>> honest = HonestStatistics(jnp.array([1.0]), jnp.array([2.0]), jnp.float32(26), jnp.float32(24))
    >>> [round(float(attack.collude(honest)[0]), 2) for attack in (ALittleIsEnough(z=1.5), ALittleIsEnough())]
    [-2.0, -1.85]
    """

    z: float | None = None

    def __post_init__(self) -> None:
        checks.positive(or_none=True, z=self.z, remedy="None computes it from the cohort")

    def collude(self, honest: HonestStatistics) -> Update:
        if self.z is None:
            n, m = honest.clients + honest.attackers, honest.attackers
            supporters = jnp.floor(n / 2 + 1) - m
            share = (n - m - supporters) / jnp.maximum(n - m, 1)
            z = jnp.clip(jax.scipy.special.ndtri(jnp.clip(share, 0, 1)), 0, 3)
        else:
            z = jnp.float32(self.z)
        return tree.subtract(honest.mean, tree.scale(honest.deviation, z))
