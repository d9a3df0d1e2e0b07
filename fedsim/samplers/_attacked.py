"""Adds attackers to the cohorts of another sampler."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import Cohort
from fedsim.samplers._protocol import Sampler
from fedsim.samplers._sampler import WrappedSampler

if TYPE_CHECKING:
    from fedsim.attacks import Attack


class Attacked(WrappedSampler):
    """Marks some clients in the cohorts of another sampler as attackers.

    Args:
      sampler: the sampler that chooses the cohorts.
      attack: what the attackers do.
      fraction: the fraction of the population that attacks, rounded to a whole number of clients; a warning says if that is 0.
        The attackers are the same clients in every round, so the number of attackers varies between cohorts. Those outside of
        a cohort do nothing in that round; nodes without a server then send their own values.
      every_round: whether to draw the attackers anew in every round, from the round's cohort. The number of attackers is then
        ``fraction`` of the cohort, rounded to a whole number.
      attackers: the ids of the attackers, instead of ``fraction``.
      seed: the seed that draws the attackers; nothing else depends on it.

    Attributes:
      data, clients, key: those of ``sampler``.

    Guarantees:
      - Clients and their keys are the same as without an attack.
      - The set of attackers is a function of the seed, and with ``every_round`` also of the round.

    Raises:
      ValueError: ``fraction`` is outside [0, 1]; ``attackers`` and ``every_round`` are both given; the attack cannot be applied
        to the data.
      KeyError: the population has no client of a given id.

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
        checks.number(least=0, most=1, fraction=fraction, remedy="it is the fraction of clients that attack")
        checks.truth(every_round=every_round)
        if attackers is not None and every_round:
            raise ValueError("Expected attackers or every_round, not both: attackers given by id are the same in every round.")
        super().__init__(sampler)
        attack.check(self.data)
        self.attack, self.fraction, self.every_round = attack, fraction, every_round
        self._named = None if attackers is None else np.array([self.data.index(name) for name in attackers], np.int32)
        self._words = np.asarray(rng.words(rng.stream(rng.root(seed), "attackers")))
        size = getattr(sampler, "clients", 0) if every_round else self.data.num_clients
        if attackers is None and fraction and size and not self._count(size):
            warnings.warn(
                f"Nobody attacks: fraction={fraction} of {size} clients is rounded to 0. Give fraction >= {0.5 / size:.3g}, or "
                "attackers by name.",
                stacklevel=2,
            )

    @property
    def attacker_ids(self) -> list[str] | None:
        """The ids of the attackers, in the order of the population; None if they are drawn anew in every round."""
        if self.every_round:
            return None
        attacks = self._attack(np.arange(self.data.num_clients, dtype=np.int32))
        return [self.data.client_ids[int(client)] for client in np.flatnonzero(attacks)]

    def _transform(self, cohort: Cohort) -> Cohort:
        if cohort.attack is not None:
            raise ValueError(
                f"The cohorts already have the attack {cohort.attack}: use one Attacked sampler, as a cohort has one attack."
            )
        return dataclasses.replace(cohort, attack=self.attack, attackers=self._attackers(cohort))

    def _attackers(self, cohort: Cohort) -> np.ndarray:
        if not self.every_round:
            return self._attack(cohort.clients)
        size = len(cohort)
        return rng.permute(self._words, cohort.round, size, np.arange(size, dtype=np.int32), np) < self._count(size)

    def _attack(self, clients: np.ndarray) -> np.ndarray:
        """Returns whether clients attack in every round."""
        if self._named is not None:
            return np.isin(clients, self._named)
        # The attackers are the first clients of a keyed permutation, so the cost depends on the cohort, not on the population.
        size = self.data.num_clients
        return rng.permute(self._words, 0, size, clients, np) < self._count(size)

    def _count(self, clients: int) -> int:
        return math.floor(self.fraction * clients + 0.5)
