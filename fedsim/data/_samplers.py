"""Samplers: which clients take part in round r, as a function of the seed and r alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np

from fedsim import rng
from fedsim.data._cohort import Cohort
from fedsim.data._federated_data import FederatedData


class Sampler(Protocol):
    """Anything that can say who takes part in a round, seekable by the round's number."""

    data: FederatedData

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round."""
        ...


class UniformSampler:
    """The same number of distinct clients every round, uniformly at random, independent between rounds.

    Args:
      data: the population.
      clients: cohort size.
      seed: the run's seed, or its root key.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> sampler = UniformSampler(data, clients=3, seed=0)
    >>> [cohort.round for cohort in sampler.rounds(4, start=2)]
    [2, 3]
    >>> sampler.cohort(7).client_ids == sampler.cohort(7).client_ids
    True
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        clients = operator.index(clients)
        if clients < 1:
            raise ValueError(f"Expected clients >= 1, got clients={clients}: give the number of clients per round.")
        if clients > data.num_clients:
            raise ValueError(
                f"A cohort of clients={clients} is larger than the population of {data.num_clients}. "
                f"Ask for at most {data.num_clients}."
            )
        self.data, self.clients, self.key = data, clients, rng.root(seed)
        self._words = np.asarray(rng.words(rng.stream(self.key, "sampling")))

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round: the first entries of that round's permutation of the population."""
        chosen = rng.permute(self._words, round, self.data.num_clients, np.arange(self.clients, dtype=np.int32), np)
        return Cohort(self.data, chosen, round, self.key)

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """The cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))
