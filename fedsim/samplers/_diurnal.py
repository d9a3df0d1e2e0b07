"""Clients that are there at some hours and not at others.

Blocks: H. Eichner, T. Koren, H. B. McMahan, N. Srebro, K. Talwar, "Semi-cyclic stochastic gradient descent", ICML 2019:
https://arxiv.org/abs/1904.10120: a day has m blocks, each with clients of its own. Cosine: a smooth day and night, as C. Zhu,
Z. Xu, M. Chen, J. Konečný, A. Hard, T. Goldstein, "Diurnal or nocturnal? Federated learning of multi-branch networks from
periodically shifting distributions", ICLR 2022, mix two populations; here every client has an hour of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler


class DiurnalSampler(SeededSampler):
    """A uniform cohort of the clients that are available, which changes with the time of day.

    Round r is at time t = (r mod period) / period of the day, and a client of phase p is available

    - with probability (1 + cos(2π(t - p))) / 2, drawn anew every round: surely at its own hour, never half a day later; or
    - with ``blocks=m``: exactly while t is in the same of the day's m equal parts as p.

    Args:
      data: the population.
      clients: cohort size; smaller where fewer are available.
      seed: the run's seed, or its root key.
      period: rounds in a day.
      blocks: parts of the day; None: availability rises and falls as a cosine.
      phases: ``[population]``, each client's hour as a part of the day in [0, 1), by its time zone or its labels, say;
        default: drawn uniformly.

    Guarantees:
      - Nobody takes part in a round in which it is not available; all who are, are equally likely.
      - Cost: O(clients / share of the population that is available); at most O(population).

    Raises:
      ValueError: ``period`` or ``blocks`` not positive, more blocks than rounds in a day, phases out of [0, 1) or not one
        per client; ``clients`` is not positive, or larger than the population.

    >>> data = FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> sampler = DiurnalSampler(data, clients=2, seed=0, period=4, blocks=2, phases=[0.1, 0.4, 0.6, 0.9])
    >>> [sorted(cohort.client_ids) for cohort in sampler.rounds(5)]
    [['0', '1'], ['0', '1'], ['2', '3'], ['2', '3'], ['0', '1']]
    """

    def __init__(
        self,
        data: FederatedData,
        *,
        clients: int,
        seed: int | jax.Array,
        period: int = 24,
        blocks: int | None = None,
        phases: Any = None,
    ) -> None:
        super().__init__(data, clients=clients, seed=seed)
        checks.whole(1, period=period, remedy="the number of rounds in a day")
        checks.whole(1, period, or_none=True, blocks=blocks, remedy=f"of a day of period={period}; None is a cosine")
        self.period, self.blocks = int(period), None if blocks is None else int(blocks)
        if phases is None:
            words = np.asarray(rng.words(rng.stream(self.key, "phases")))
            phases = np.random.Generator(np.random.Philox(key=words.astype(np.uint64))).random(data.num_clients)
        self.phases = np.asarray(phases, np.float64)
        if self.phases.shape != (data.num_clients,):
            raise ValueError(f"Expected one phase for each of {data.num_clients} clients, got shape {list(self.phases.shape)}.")
        if not np.all((self.phases >= 0) & (self.phases < 1)):
            raise ValueError("Expected phases in [0, 1), parts of the day: divide hours by 24.")

    def availability(self, round: int, clients: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The probability of each client (or of these) to be available in a round, ``float64 [n]``."""
        now = round % self.period
        if self.blocks is None:
            return (1 + np.cos(2 * np.pi * (now / self.period - self.phases[clients]))) / 2
        # An hour is a fraction that was rounded: 29 / 100 times 100 is a little less than 29, and means the 29th part.
        part = np.minimum(np.floor(self.phases[clients] * self.blocks * (1 + 1e-15)), self.blocks - 1)
        return (part == now * self.blocks // self.period).astype(np.float64)

    def _draw(self, round: int) -> np.ndarray:
        population, draw = self.data.num_clients, self._generator(round)
        chosen = np.zeros(0, np.int32)
        # Down the round's own order of the population, in steps that double, until enough are there.
        start, step = 0, 2 * self.clients
        while len(chosen) < self.clients and start < population:
            index = np.arange(start, min(start + step, population), dtype=np.int32)
            asked = rng.permute(self._words, round, population, index, np)
            there = draw.random(len(asked)) < self.availability(round, asked)
            chosen = np.concatenate([chosen, asked[there]])
            start, step = start + step, 2 * step
        return chosen[: self.clients]
