"""Min-sum.

V. Shejwalkar, A. Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for federated
learning", NDSS 2021, equation 6: https://doi.org/10.14722/ndss.2021.24498. Deviations: γ is exact, which the paper's algorithm
1 approximates by repeated halving. For n honest updates u_i with mean m, the sum of the squared distances of a point to them is
n times its squared distance to m, plus a constant. So equation 6 is γ ‖p‖ = max_i ‖u_i - m‖. The attackers know the updates of
the honest clients; in the paper they may also estimate them from those that they would send without the attack.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.attacks._attack import Update
from fedsim.attacks._collusion import Collusion, HonestStatistics
from fedsim.attacks._min_max import DIRECTIONS, differences, perturbation


@dataclasses.dataclass(frozen=True)
class MinSum(Collusion):
    """All attackers send mean + γ p, whose squared distances to the honest updates have at most the largest such sum of these.

    γ is the largest number for which this holds. The attackers are then at most as far from the mean as the most distant honest
    client. They do less damage than in `MinMax`, and are harder to detect. All updates of a cohort are stored.

    Attributes:
      direction: see `MinMax`.

    Raises:
      ValueError: ``direction`` is none of those.

    >>> updates = jnp.array([[3.0], [1.0], [-1.0]])
    >>> MinSum().collude(HonestStatistics.of(updates, is_honest=jnp.ones(3, bool))).tolist()  # mean 1, largest distance 2
    [-1.0]
    """

    needs_updates: ClassVar[bool] = True

    direction: str = "unit"

    def __post_init__(self) -> None:
        checks.one_of(*DIRECTIONS, direction=self.direction)

    def collude(self, honest: HonestStatistics) -> Update:
        gamma = tree.root(jnp.max(jax.vmap(tree.squared_norm)(differences(honest))))
        return tree.add(honest.mean, tree.scale(perturbation(honest, self.direction), gamma))
