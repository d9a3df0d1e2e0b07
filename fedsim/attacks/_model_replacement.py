"""Model replacement.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, "How to backdoor federated learning", AISTATS 2020, equation 3:
https://arxiv.org/abs/1807.00459. The paper's γ = n / η is ``clients / server_learning_rate``, because here the mean divides by
the number of clients of the round, and not by that of the population. Deviations: several attackers divide the factor among
themselves. The loss of attackers has no term for evading anomaly detection (the paper's constrain-and-scale).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.attacks._attack import Attack, Update, on_inexact
from fedsim.data import Batch, FederatedData


@dataclasses.dataclass(frozen=True)
class ModelReplacement(Attack):
    """Attackers train on the examples of ``inner``, and scale their update so much that the mean becomes their model.

    The new model is then the attackers' model plus what the other clients add, which is little when training has converged. It
    is exact for the mean with ``weighting="uniform"``. By name, as in a configuration, it is
    ``"model_replacement(inner='label_flip(num_classes=10)')"``; without ``clients``, both numbers are then those of a round, as
    many attackers as there are on average.

    Attributes:
      inner: the attack on the examples: `PixelBackdoor` or `LabelFlip`.
      clients: the number of clients of a cohort, positive.
      server_learning_rate: that of a server with SGD, positive.
      attackers: the number of attackers of a cohort, from 1 to ``clients``.

    Raises:
      ValueError: an attribute is out of its range, or ``inner`` is an attack of colluding clients.

    >>> from fedsim.attacks import LabelFlip
    >>> replacement = ModelReplacement(LabelFlip(10), clients=20, server_learning_rate=0.5)
    >>> replacement.corrupt(jnp.array([0.1, -0.2]), jax.random.key(0)).tolist()
    [4.0, -8.0]
    """

    inner: Attack
    clients: int
    server_learning_rate: float = 1.0
    attackers: int = 1

    def __post_init__(self) -> None:
        checks.instance(Attack, "PixelBackdoor(target=0)", inner=self.inner)
        checks.whole(1, clients=self.clients, remedy="the number of clients of a cohort")
        checks.positive(server_learning_rate=self.server_learning_rate)
        checks.whole(1, self.clients, attackers=self.attackers)
        if type(self.inner).wrap_aggregator is not Attack.wrap_aggregator:
            raise ValueError(
                f"Expected an attack on examples, got inner={self.inner}, whose attackers send no updates of their own: use "
                "PixelBackdoor or LabelFlip."
            )

    def check(self, data: FederatedData) -> None:
        self.inner.check(data)

    def poison(self, batch: Batch) -> dict[str, jax.Array]:
        return self.inner.poison(batch)

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        factor = self.clients / self.server_learning_rate / self.attackers
        return on_inexact(self.inner.corrupt(update, key), lambda leaf: leaf * jnp.asarray(factor, leaf.dtype))
