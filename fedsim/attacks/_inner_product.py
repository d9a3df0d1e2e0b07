"""Inner-product manipulation.

C. Xie, O. Koyejo, I. Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019:
https://arxiv.org/abs/1903.03936. ``epsilon`` is the paper's ε. There are no deviations.
"""

from __future__ import annotations

import dataclasses

from fedsim import checks, tree
from fedsim.attacks._attack import Update
from fedsim.attacks._collusion import Collusion, HonestStatistics


@dataclasses.dataclass(frozen=True)
class InnerProduct(Collusion):
    """All attackers send -epsilon times the mean of the honest updates.

    With a small ``epsilon`` their updates are close to the honest ones, but can still reverse the direction of the aggregate.

    Attributes:
      epsilon: positive.

    Raises:
      ValueError: ``epsilon`` is not positive and finite.

    >>> import jax.numpy as jnp
    >>> one = jnp.float32(1)
    >>> InnerProduct(epsilon=0.5).collude(HonestStatistics(jnp.array([1.0, -2.0]), jnp.zeros(2), one, one)).tolist()
    [-0.5, 1.0]
    """

    epsilon: float = 0.5

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)

    def collude(self, honest: HonestStatistics) -> Update:
        return tree.scale(honest.mean, -self.epsilon)
