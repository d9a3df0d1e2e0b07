"""Oort: clients that are useful and fast, with some exploration.

F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: efficient federated learning via guided participant selection", OSDI
2021: https://arxiv.org/abs/2010.06081, section 4 and algorithm 1. The utility of client i in round R is

    U(i) = |B_i| sqrt(mean of loss²) + sqrt(0.1 log R / L(i)),    times (T / t_i)^alpha if t_i > T,

where L(i) is the round in which it last took part, t_i its duration and T the preferred duration of a round. (1 - epsilon) of
a cohort are drawn by utility among the clients whose utility is at least c = 95 % of that of the last one that would be taken
by rank; the others have never taken part, and are drawn with probabilities proportional to their speeds. epsilon begins at
0.9 and is multiplied by 0.98 in each round until it is 0.2. The statistical utility is clipped at its 95 % quantile.

Deviations: The square root of the mean of squared losses is replaced by the mean loss, which clients report and which is at
most that. T is given or the median of the clients' durations, which are measured on a virtual clock, and not adapted (the
pacer). A client is never excluded for taking part often. If too few clients have not taken part, or have, the cohort is filled
with the others. Clients whose utility is 0 or less, which negative losses give, are drawn with equal, tiny probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.samplers._observation import Observation
from fedsim.samplers._steered import SteeredSampler
from fedsim.samplers._weighted import successive

_CUT_OFF, _QUANTILE = 0.95, 0.95


class _Seen(NamedTuple):
    """What is known of each client.

    ``loss``, its last mean loss; ``last``, the round from 1 in which it last took part, 0 for never; ``seconds``, its last
    duration, NaN if it is not known.
    """

    loss: np.ndarray
    last: np.ndarray
    seconds: np.ndarray


class Oort(SteeredSampler):
    """Selects clients with large losses on many examples, prefers fast ones, and explores others (Lai et al. 2021).

    Args:
      data: the population.
      clients: the cohort size.
      seed: the run's seed, or its root key.
      exploration: epsilon in the first round, the fraction of a cohort that has never taken part.
      exploration_decay: its factor per round.
      exploration_least: its smallest value.
      seconds: ``[population]``, the time that each client needs for a round, larger than 0; None: it is measured on a virtual
        clock, and all clients are equally fast without one.
      deadline: T, the preferred duration of a round in seconds; None: the median of the clients' times, as far as known.
      alpha: the exponent of the penalty for slower clients.

    Attributes:
      observes: ``("loss",)``.

    Guarantees:
      - A cohort has exactly ``clients`` distinct clients with examples.
      - Cost: O(population log(population)) per round.

    Raises:
      ValueError: a fraction is outside [0, 1], a time is not positive, or there are fewer clients with examples than
        ``clients``; see `SteeredSampler`.

    >>> data = FederatedData.from_arrays({"x": np.zeros(6)}, sizes=[1, 1, 4])
    >>> sampler = Oort(data, clients=1, seed=0, exploration=0)
    >>> for client, loss in enumerate([0.5, 0.5, 0.5]):
    ...     sampler = sampler.observe(Observation(np.array([client]), {"loss": np.array([loss])}))
    >>> sampler.cohort(3).client_ids  # with the most examples
    ['2']
    """

    observes = ("loss",)

    def __init__(
        self,
        data: FederatedData,
        *,
        clients: int,
        seed: int | jax.Array,
        exploration: float = 0.9,
        exploration_decay: float = 0.98,
        exploration_least: float = 0.2,
        seconds: Any = None,
        deadline: float | None = None,
        alpha: float = 2.0,
    ) -> None:
        super().__init__(data, clients=clients, seed=seed)
        checks.number(least=0, most=1, exploration=exploration, remedy="it is the fraction of a cohort that is new")
        checks.number(least=0, most=1, exploration_decay=exploration_decay, exploration_least=exploration_least)
        checks.number(least=0, alpha=alpha, remedy="0 does not penalize slow clients")
        checks.positive(or_none=True, deadline=deadline, remedy="give seconds")
        times = np.full(data.num_clients, np.nan) if seconds is None else np.asarray(seconds, np.float64)
        if times.shape != (data.num_clients,) or (seconds is not None and not np.all((times > 0) & np.isfinite(times))):
            raise ValueError(
                f"Expected seconds to be a finite number above 0 for each of {data.num_clients} clients, got {times}: give the "
                "time that each client needs for a round."
            )
        self._has_examples = np.asarray(data.sizes) > 0
        if (most := int(self._has_examples.sum())) < clients:
            raise ValueError(f"Expected clients <= {most}, the clients with examples, got clients={clients}: give fewer.")
        self.exploration, self.exploration_decay = float(exploration), float(exploration_decay)
        self.exploration_least = float(exploration_least)
        self.seconds, self.alpha = times, float(alpha)
        self.deadline = deadline

    def begin(self) -> _Seen:
        """Returns what is known before the first round: nothing."""
        return _Seen(np.zeros(self.data.num_clients), np.zeros(self.data.num_clients, np.int64), self.seconds.copy())

    def learn(self, memory: _Seen, round: int, observation: Observation) -> _Seen:
        """Replaces the losses of a round's clients; one that was not reported is 0."""
        memory.loss[observation.clients] = np.nan_to_num(observation.values["loss"], nan=0.0)
        memory.last[observation.clients] = round + 1
        memory.seconds[observation.clients] = observation.values.get("seconds", memory.seconds[observation.clients])
        return memory

    def choose(self, round: int, memory: _Seen, draw: np.random.Generator) -> np.ndarray:
        """Returns clients by utility, and others that have never taken part."""
        epsilon = max(self.exploration_least, self.exploration * self.exploration_decay**round)
        known = np.flatnonzero((memory.last > 0) & self._has_examples)
        unknown = np.flatnonzero((memory.last == 0) & self._has_examples)
        exploit = max(self.clients - _nearest(epsilon * self.clients), self.clients - len(unknown))
        exploit = min(exploit, len(known))
        seconds = _filled(memory.seconds)
        speeds = 1 / seconds[unknown]
        explored = unknown[successive(draw, speeds, self.clients - exploit)]
        if not exploit:
            return explored
        utility = self.utility(round, memory)[known]
        last = np.sort(utility)[-exploit]
        least = min(_CUT_OFF * last, last)
        high = np.flatnonzero(utility >= least)
        # A utility of 0, of a client without a loss, still has a positive probability, so that the cohort is full.
        weights = np.maximum(utility[high], np.finfo(np.float64).tiny)
        return np.concatenate([known[high[successive(draw, weights, exploit)]], explored])

    def utility(self, round: int, memory: _Seen) -> np.ndarray:
        """Returns the utility of each client in a round, ``float64 [population]``; that of one that never took part is 0."""
        known = memory.last > 0
        statistical = self.data.sizes * memory.loss
        if known.any():
            statistical = np.minimum(statistical, np.quantile(statistical[known], _QUANTILE))
        recency = np.sqrt(0.1 * np.log(round + 1) / np.maximum(memory.last, 1))
        seconds = _filled(memory.seconds)
        deadline = np.median(seconds) if self.deadline is None else self.deadline
        penalty = np.where(seconds > deadline, (deadline / seconds) ** self.alpha, 1.0)
        return np.where(known, (statistical + recency) * penalty, 0.0)


def _filled(seconds: np.ndarray) -> np.ndarray:
    """Returns durations, with the median of those that are known for the others; a duration of 0 counts as very short."""
    known = seconds[np.isfinite(seconds)]
    return np.maximum(np.where(np.isfinite(seconds), seconds, np.median(known) if len(known) else 1.0), 1e-9)


def _nearest(number: float) -> int:
    """Returns the nearest whole number."""
    return int(np.floor(number + 0.5))
