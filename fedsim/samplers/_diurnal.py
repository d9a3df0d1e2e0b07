"""A sampler of clients whose availability depends on the time of day.

Blocks: H. Eichner, T. Koren, H. B. McMahan, N. Srebro, K. Talwar, "Semi-cyclic stochastic gradient descent", ICML 2019,
https://arxiv.org/abs/1904.10120. A day has m blocks, and each block has its own clients. Cosine: a smooth change between day
and night, as in C. Zhu, Z. Xu, M. Chen, J. Konečný, A. Hard, T. Goldstein, "Diurnal or nocturnal? Federated learning of
multi-branch networks from periodically shifting distributions", ICLR 2022. Deviation: the paper mixes two populations; here
every client has its own phase.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler


class DiurnalSampler(SeededSampler):
    """Samples uniformly from the clients that are available, where availability depends on the time of day.

    Round r takes place at time t = (r mod period) / period of the day. A client of phase p is available

    - with probability (1 + cos(2π(t - p))) / 2, drawn anew in every round: always at t = p, and never half a day later; or
    - with ``blocks=m``: exactly while t and p are in the same of the m equal blocks of the day.

    Args:
      data: the population.
      clients: the cohort size. A cohort is smaller if fewer clients are available.
      seed: the run's seed, or its root key.
      period: the number of rounds in a day.
      blocks: the number of blocks in a day; None: availability follows the cosine.
      phases: ``[population]``, each client's time of day in [0, 1), for example from its time zone or its labels. Default:
        drawn uniformly.

    Guarantees:
      - Only available clients take part, and all available clients are equally likely to.
      - Cost: O(clients / available fraction of the population); at most O(population).

    Raises:
      ValueError: ``period`` or ``blocks`` is not positive; there are more blocks than rounds in a day; a phase is outside
        [0, 1), or there is not one phase per client; ``clients`` is not positive, or larger than the population.

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
        checks.whole(
            1, period, or_none=True, blocks=blocks, remedy=f"a day has period={period} rounds; None selects the cosine"
        )
        self.period, self.blocks = int(period), None if blocks is None else int(blocks)
        if phases is None:
            words = np.asarray(rng.words(rng.stream(self.key, "phases")))
            phases = rng.generator(words).random(data.num_clients)
        checks.unmasked(phases=phases)
        self.phases = np.asarray(phases, np.float64)
        if self.phases.shape != (data.num_clients,):
            raise ValueError(
                f"Expected phases of shape [{data.num_clients}], one phase per client, got shape {list(self.phases.shape)}."
            )
        if not np.all((self.phases >= 0) & (self.phases < 1)):
            worst = self.phases[~((self.phases >= 0) & (self.phases < 1))][0]
            raise ValueError(f"Expected phases in [0, 1), as fractions of a day, got {worst}: divide hours by 24.")

    def availability(self, round: int, clients: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns the probability that each of ``clients`` (default: all) is available in a round, ``float64 [n]``."""
        now = round % self.period
        if self.blocks is None:
            return (1 + np.cos(2 * np.pi * (now / self.period - self.phases[clients]))) / 2
        # Phases are rounded fractions: 29 / 100 * 100 is slightly below 29 in floating point, but belongs to block 29.
        block = np.minimum(np.floor(self.phases[clients] * self.blocks * (1 + 1e-15)), self.blocks - 1)
        return (block == now * self.blocks // self.period).astype(np.float64)

    def _draw(self, round: int) -> np.ndarray:
        population, draw = self.data.num_clients, self._generator(round)
        chosen = np.zeros(0, np.int32)
        # Goes through the round's permutation of the population in steps that double, until enough clients are available.
        start, step = 0, 2 * self.clients
        while len(chosen) < self.clients and start < population:
            index = np.arange(start, min(start + step, population), dtype=np.int32)
            candidates = rng.permute(self._words, round, population, index, np)
            available = draw.random(len(candidates)) < self.availability(round, candidates)
            chosen = np.concatenate([chosen, candidates[available]])
            start, step = start + step, 2 * step
        return chosen[: self.clients]
