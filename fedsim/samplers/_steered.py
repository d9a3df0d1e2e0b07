"""`SteeredSampler`: the base class of samplers whose cohorts depend on values of earlier rounds."""

from __future__ import annotations

import copy
import operator
from typing import Any, ClassVar, TypeGuard, TypeVar

import jax
import numpy as np

from fedsim import rng
from fedsim.data import Cohort, FederatedData
from fedsim.samplers._observation import Observation
from fedsim.samplers._sampler import SeededSampler

S = TypeVar("S", bound="SteeredSampler")


class SteeredSampler(SeededSampler):
    """Base class of samplers that see values of their clients, such as losses, before they choose the next cohort.

    The cohort of round r is a function of the root key and of the observations of rounds 0 to r - 1. A sampler is a value:
    `observe` returns another one that knows one more round, and changes nothing. `fedsim.experiment.run` waits for every round,
    lets the sampler observe it, and writes the observation into the round's line of ``metrics.jsonl``, as ``observed``. A run
    that continues reads them there, so it has the cohorts of an uninterrupted one. It sends one round at a time to the devices,
    which then wait for the host between rounds.

    A subclass names what it ``observes``, and defines `begin`, `learn` and `choose`.

    Args:
      data: the population.
      clients: the number of slots of every cohort.
      seed: the run's seed, or its root key.

    Attributes:
      observes: names of the entries of ``RoundInfo.clients`` that it sees. There is ``update_norm`` if the algorithm has
        ``update_norms=True``.
      observations: those of the rounds that it knows, the first one first.

    Guarantees:
      - Equal observations give equal cohorts. Values that differ in their last bits, as those of different numbers of devices
        may, can change a cohort only if they change a comparison or a random draw.

    Raises:
      ValueError: see `fedsim.UniformSampler`; the cohort of a round whose earlier rounds were not observed.

    >>> class SmallestLoss(SteeredSampler):
    ...     observes = ("loss",)
    ...     def begin(self): return np.zeros(self.data.num_clients)
    ...     def learn(self, memory, round, observation):
    ...         memory[observation.clients] = observation.values["loss"]
    ...         return memory
    ...     def choose(self, round, memory, draw): return np.argsort(memory)[: self.clients]
    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 1, 1])
    >>> sampler = SmallestLoss(data, clients=1, seed=0)
    >>> later = sampler.observe(Observation(np.array([0]), {"loss": np.array([0.5])}))
    >>> sampler.cohort(0).client_ids, later.cohort(1).client_ids
    (['0'], ['1'])
    >>> sampler.cohort(1)
    Traceback (most recent call last):
    ...
    ValueError: The cohort of round 1 depends on values of the rounds before, and SmallestLoss has observed 0 rounds: run it \
with fedsim.experiment.run, or give it each round's values, sampler = sampler.observe(Observation.of(cohort, info, \
sampler.observes)).
    """

    observes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, data: FederatedData, *, clients: int, seed: int | jax.Array) -> None:
        super().__init__(data, clients=clients, seed=seed)
        self.observations: tuple[Observation, ...] = ()
        self._choice_words = np.asarray(rng.words(rng.stream(self.key, "steered sampling")))
        self._known: tuple[int, Any] = 0, None  # what was learned from so many observations, computed only once

    def begin(self) -> Any:
        """Returns the memory before the first round, a pytree of arrays."""
        raise NotImplementedError

    def learn(self, memory: Any, round: int, observation: Observation) -> Any:
        """Returns the memory after a round; it may change ``memory``, which is a copy."""
        raise NotImplementedError

    def choose(self, round: int, memory: Any, draw: np.random.Generator) -> np.ndarray:
        """Returns the positions of a round's clients, ``[n]``, without duplicates.

        Args:
          round: the round.
          memory: what was learned from the rounds before; it must not be changed.
          draw: the random generator of the round.
        """
        raise NotImplementedError

    def observe(self: S, observation: Observation) -> S:
        """Returns the sampler after one more round."""
        after: Any = copy.copy(self)
        after.observations = (*after.observations, observation)
        return after

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a round, at most the one after the last round that was observed."""
        known = len(self.observations)
        if known < operator.index(round) < 2**31:
            raise not_observed(self, round, known)
        return super().cohort(round)

    def memory(self, round: int) -> Any:
        """Returns what was learned from the rounds before ``round``."""
        # An earlier round than the known one, as in a replay, is learned from the beginning.
        start, memory = self._known if 0 < self._known[0] <= round else (0, self.begin())
        if start < round:
            memory = copy.deepcopy(memory)
            for number in range(start, round):
                memory = self.learn(memory, number, self.observations[number])
            self._known = round, memory
        return memory

    def _draw(self, round: int) -> np.ndarray:
        return self.choose(round, self.memory(round), rng.generator(self._choice_words, round))


def not_observed(sampler: Any, round: int, known: int) -> ValueError:
    """Returns the error that says that a sampler cannot have the cohort of a round, because it knows only ``known`` rounds.

    >>> not_observed(None, round=2, known=1)  # doctest: +ELLIPSIS
    ValueError("The cohort of round 2 depends on values of the rounds before, and NoneType has observed 1 rounds: ...
    """
    return ValueError(
        f"The cohort of round {round} depends on values of the rounds before, and {type(sampler).__name__} has observed "
        f"{known} rounds: run it with fedsim.experiment.run, or give it each round's values, sampler = "
        "sampler.observe(Observation.of(cohort, info, sampler.observes))."
    )


def is_steered(sampler: Any) -> TypeGuard[SteeredSampler]:
    """Returns whether a sampler's cohorts depend on values of earlier rounds.

    >>> from fedsim.samplers import PowerOfChoice, UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 1, 1])
    >>> is_steered(UniformSampler(data, clients=1, seed=0)), is_steered(PowerOfChoice(data, clients=1, candidates=2, seed=0))
    (False, True)
    """
    return bool(getattr(sampler, "observes", ()))
