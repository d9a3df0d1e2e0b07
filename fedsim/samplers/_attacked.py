"""Cohorts some of whose clients attack."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import Cohort
from fedsim.samplers._sampler import ChangedSampler, Sampler

if TYPE_CHECKING:
    from fedsim.attacks import Attack


class Attacked(ChangedSampler):
    """The cohorts of another sampler, with attackers among them.

    Args:
      sampler: who takes part.
      attack: what attackers do.
      fraction: the part of the population that are attackers, the same ones in every round; so some cohorts hold more of them
        than others, and most a number that is not quite this part.
      every_round: they are drawn anew from every cohort instead: exactly this part of it, rounded to a whole number.
      attackers: names of the attackers, instead of ``fraction``.
      seed: draws the attackers, and nothing else.

    Attributes:
      data, clients, key: as the sampler's.

    Guarantees:
      - The same clients with the same keys as without an attack.
      - Who attacks is a function of the seed, and of the round with ``every_round``.

    Raises:
      ValueError: ``fraction`` out of [0, 1]; ``attackers`` with ``every_round``; data that this attack cannot do anything with.
      KeyError: a name that the population lacks.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(10)}, sizes=[1] * 10)
    >>> sampler = fedsim.UniformSampler(data, clients=5, seed=0)
    >>> attacked = Attacked(sampler, fedsim.attacks.SignFlip(), fraction=0.2, seed=0, every_round=True)
    >>> [int(cohort.attackers.sum()) for cohort in attacked.rounds(4)]
    [1, 1, 1, 1]
    """

    def __init__(
        self,
        sampler: Sampler,
        attack: Attack,
        *,
        seed: int | jax.Array,
        fraction: float = 0.2,
        every_round: bool = False,
        attackers: Sequence[str] | None = None,
    ) -> None:
        checks.number(least=0, most=1, fraction=fraction, remedy="the part of the clients that attack")
        checks.truth(every_round=every_round)
        if attackers is not None and every_round:
            raise ValueError(
                "Expected attackers or every_round, not both: attackers that have names are the same in every round."
            )
        super().__init__(sampler)
        attack.check(self.data)
        self.attack, self.fraction, self.every_round = attack, fraction, every_round
        self._named = None if attackers is None else np.array([self.data.index(name) for name in attackers], np.int32)
        self._words = np.asarray(rng.words(rng.stream(rng.root(seed), "attackers")))

    def _change(self, cohort: Cohort) -> Cohort:
        if cohort.attack is not None:
            raise ValueError(f"The cohorts are under attack already, by {cohort.attack}: a cohort has one attack.")
        return dataclasses.replace(cohort, attack=self.attack, attackers=self._attackers(cohort))

    def _attackers(self, cohort: Cohort) -> np.ndarray:
        if self._named is not None:
            return np.isin(cohort.clients, self._named)
        # A keyed permutation of the population, or of the cohort: its first so many are attackers, and no others are looked at.
        among, who, epoch = self.data.num_clients, cohort.clients, 0
        if self.every_round:
            among, who, epoch = len(cohort), np.arange(len(cohort), dtype=np.int32), cohort.round
        return rng.permute(self._words, epoch, among, who, np) < math.floor(self.fraction * among + 0.5)
