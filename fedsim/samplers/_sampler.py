"""What a sampler is, and what those of this room share."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import Cohort, FederatedData


class Sampler(Protocol):
    """Anything that can say who takes part in a round, seekable by the round's number."""

    data: FederatedData

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round."""
        ...


class SeededSampler:
    """A sampler that draws positions in the population by ``_draw(round)``.

    Args:
      data: the population.
      clients: the cohort's slots: how many take part, exactly or at most.
      seed: the run's seed, or its root key.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population; a round out of [0, 2**31).
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        checks.whole(1, clients=clients, remedy="give the number of clients per round")
        if clients > data.num_clients:
            raise ValueError(
                f"A cohort of clients={clients} is larger than the population of {data.num_clients}. "
                f"Ask for at most {data.num_clients}."
            )
        self.data, self.clients, self.key = data, int(clients), rng.root(seed)
        self._words = np.asarray(rng.words(rng.stream(self.key, "sampling")))

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round."""
        round = operator.index(round)
        if not 0 <= round < 2**31:
            raise ValueError(f"Expected 0 <= round < 2**31, got round={round}.")
        chosen = self._draw(round)
        return Cohort(self.data, chosen, round, self.key, slots=max(self.clients, len(chosen)))

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """The cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _draw(self, round: int) -> np.ndarray:
        """Positions of the clients of a round, ``[n]``, no one twice."""
        raise NotImplementedError

    def _generator(self, round: int) -> np.random.Generator:
        """The round's own stream of numbers: Philox counts up from the round, and no two rounds meet."""
        return np.random.Generator(np.random.Philox(key=self._words.astype(np.uint64), counter=[0, 0, 0, round]))


class ChangedSampler:
    """Another sampler's cohorts, each changed by ``_change(cohort)``; for the rest as that sampler.

    Args:
      sampler: who takes part.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.data = sampler, sampler.data

    @property
    def clients(self) -> int:
        """The cohorts' slots."""
        return getattr(self.sampler, "clients", 0) or self.sampler.cohort(0).slots

    @property
    def key(self) -> jax.Array:
        """The run's root key."""
        return self.sampler.cohort(0).key

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round."""
        return self._change(self.sampler.cohort(operator.index(round)))

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """The cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _change(self, cohort: Cohort) -> Cohort:
        """The cohort as it takes part."""
        raise NotImplementedError
