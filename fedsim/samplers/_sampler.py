"""The base classes of the samplers in this package."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import Arrivals, Cohort, FederatedData
from fedsim.samplers._checked import checked_cohort
from fedsim.samplers._observation import Observation
from fedsim.samplers._protocol import Sampler

W = TypeVar("W", bound="WrappedSampler")


class SeededSampler:
    """Base class of samplers whose ``_draw(round)`` returns positions in the population.

    Args:
      data: the population.
      clients: the number of slots of every cohort: the exact or the largest number of clients per round.
      seed: the run's seed, or its root key.

    Raises:
      ValueError: ``clients`` is not positive, or larger than the population; a round is outside [0, 2**31).
    """

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        checks.whole(1, clients=clients, remedy="give the number of clients per round")
        if clients > data.num_clients:
            raise ValueError(
                f"A cohort of clients={clients} is larger than the population of {data.num_clients}. "
                f"Give at most clients={data.num_clients}."
            )
        self.data, self.clients, self.key = data, int(clients), rng.root(seed)
        self._words = np.asarray(rng.words(rng.stream(self.key, "sampling")))

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a round."""
        round = operator.index(round)
        if not 0 <= round < 2**31:
            raise ValueError(f"Expected 0 <= round < 2**31, got round={round}: rounds count from 0.")
        chosen = self._draw(round)
        slots = max(self.clients, len(chosen))
        return Cohort(self.data, chosen, round, self.key, slots=slots, arrivals=self._arrivals(round, chosen))

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """Returns the cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _draw(self, round: int) -> np.ndarray:
        """Returns the positions of a round's clients, ``[n]``, without duplicates."""
        raise NotImplementedError

    def _arrivals(self, round: int, chosen: np.ndarray) -> Arrivals | None:
        """Returns the factors of a round's clients in the aggregate; None for 1."""
        return None

    def _generator(self, round: int) -> np.random.Generator:
        """Returns the random generator of a round."""
        return rng.generator(self._words, round)


class WrappedSampler:
    """Base class of samplers that pass the cohorts of another sampler through ``_transform(cohort)``.

    Args:
      sampler: the sampler that chooses the cohorts.

    >>> import dataclasses, fedsim
    >>> class HalfWork(WrappedSampler):
    ...     def _transform(self, cohort):
    ...         return dataclasses.replace(cohort, work=np.full(len(cohort), 0.5))
    >>> data = FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[2, 2])
    >>> HalfWork(fedsim.UniformSampler(data, clients=2, seed=0)).cohort(0).work.tolist()
    [0.5, 0.5]
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.data = sampler, sampler.data

    @property
    def clients(self) -> int:
        """The number of slots of every cohort."""
        return getattr(self.sampler, "clients", 0) or checked_cohort(self.sampler, 0).slots

    @property
    def key(self) -> jax.Array:
        """The run's root key."""
        return checked_cohort(self.sampler, 0).key

    @property
    def observes(self) -> Sequence[str]:
        """What the sampler inside observes, see `fedsim.samplers.SteeredSampler`."""
        return getattr(self.sampler, "observes", ())

    @property
    def observations(self) -> Sequence[Observation]:
        """What the sampler inside has observed."""
        return getattr(self.sampler, "observations", ())

    def observe(self: W, observation: Observation) -> W:
        """Returns the same around a sampler that has observed one more round."""
        after, inner = copy.copy(self), self.sampler
        after.sampler = inner.observe(observation)  # type: ignore[attr-defined]
        return after

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a round."""
        return self._transform(checked_cohort(self.sampler, operator.index(round)))

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """Returns the cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _transform(self, cohort: Cohort) -> Cohort:
        """Returns the transformed cohort."""
        raise NotImplementedError
