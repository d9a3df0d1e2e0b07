"""Clients that do not get done.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, section 5.2 (systems heterogeneity): https://arxiv.org/abs/1812.06127. In a round of E epochs a fixed share of clients
manages only x of them, x uniform in [1, E). FedProx takes what they have; FedAvg drops them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fedsim import checks, rng
from fedsim.data import Cohort
from fedsim.samplers._sampler import ChangedSampler, Sampler


class Stragglers(ChangedSampler):
    """Another sampler's cohorts, of which some clients do less work than they were asked for, or are left out.

    Who straggles and by how much is a function of the seed and the round alone: the same for every algorithm and every learning
    rate, as the paper asks for, and the same clients with ``drop`` and without.

    Args:
      sampler: who takes part.
      fraction: the part of each cohort that straggles, rounded to whole clients.
      epochs: E, as the algorithm's ``Batches(epochs=E)``: stragglers manage 1 to E - 1 of them.
      drop: leave stragglers out. Cohorts keep their slots, so no program is compiled anew.

    Attributes:
      data, clients, key: the sampler's.

    Guarantees:
      - Nothing else about a cohort changes, attackers among it included; who has less work already does that share of it.
      - Cost: O(clients) a round, beside the sampler's.

    Raises:
      ValueError: ``fraction`` is not in [0, 1], or ``epochs`` is below 2, in which nobody can do less.

    >>> from fedsim import FederatedData, UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> everybody = UniformSampler(data, clients=4, seed=0)
    >>> [(cohort.work * 20).tolist() for cohort in Stragglers(everybody, fraction=0.5, epochs=20).rounds(2)]
    [[14.0, 20.0, 1.0, 20.0], [20.0, 6.0, 20.0, 15.0]]
    >>> [(len(cohort), cohort.slots) for cohort in Stragglers(everybody, fraction=0.5, epochs=20, drop=True).rounds(2)]
    [(2, 4), (2, 4)]
    """

    def __init__(self, sampler: Sampler, *, fraction: float = 0.5, epochs: int, drop: bool = False) -> None:
        checks.number(least=0, most=1, fraction=fraction, remedy="the part of a cohort that straggles")
        checks.whole(2, epochs=epochs, remedy="of a single epoch nobody can do less")
        checks.truth(drop=drop)
        super().__init__(sampler)
        self.fraction, self.epochs, self.drop = float(fraction), epochs, drop
        self._words = np.asarray(rng.words(rng.stream(self.key, "stragglers")))

    def _change(self, cohort: Cohort) -> Cohort:
        draw = np.random.Generator(np.random.Philox(key=self._words.astype(np.uint64), counter=[0, 0, 0, cohort.round]))
        late = draw.permutation(len(cohort))[: int(np.rint(self.fraction * len(cohort)))]
        work = np.ones(len(cohort), np.float32)
        work[late] = draw.integers(1, self.epochs, len(late)) / self.epochs
        stays = work == 1 if self.drop else np.ones(len(cohort), bool)
        if cohort.work is not None:
            work = work * cohort.work
        attackers = None if cohort.attackers is None else cohort.attackers[stays]
        return dataclasses.replace(cohort, clients=cohort.clients[stays], work=work[stays], attackers=attackers)
