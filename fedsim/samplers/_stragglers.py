"""Stragglers: clients that do not complete their local work.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, section 5.2 (systems heterogeneity): https://arxiv.org/abs/1812.06127. In a round of E epochs, a fixed fraction of the
clients completes only x epochs, where x is uniform on {1, ..., E - 1}. FedProx aggregates these partial updates; FedAvg drops
them.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from fedsim import checks, rng
from fedsim.data import Cohort
from fedsim.samplers._protocol import Sampler
from fedsim.samplers._sampler import WrappedSampler


class Stragglers(WrappedSampler):
    """Lets some clients in the cohorts of another sampler do only a part of their local steps, or drops these clients.

    The set of stragglers and their work are a function of the seed and the round alone. They are the same for every algorithm
    and every learning rate, as in the paper, and the same with and without ``drop``.

    Args:
      sampler: the sampler that chooses the cohorts.
      fraction: the fraction of each cohort that straggles, rounded to whole clients; a warning says if that is nobody.
      epochs: E, the same number as in the algorithm's ``Batches(epochs=E)``. Stragglers complete 1 to E - 1 epochs.
      drop: whether to remove the stragglers from the cohort. The number of slots stays the same, so nothing is compiled again.

    Attributes:
      data, clients, key: those of ``sampler``.

    Guarantees:
      - Nothing else in the cohort changes, attackers included. If a client's ``work`` is below 1 already, the two are
        multiplied.
      - Cost: O(clients) per round, in addition to that of ``sampler``.

    Raises:
      ValueError: ``fraction`` is outside [0, 1], or ``epochs`` is below 2; or, when a cohort is drawn, the sampler has a clock.

    >>> from fedsim import FederatedData, UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> uniform = UniformSampler(data, clients=4, seed=0)
    >>> [(cohort.work * 20).tolist() for cohort in Stragglers(uniform, fraction=0.5, epochs=20).rounds(2)]
    [[14.0, 20.0, 1.0, 20.0], [20.0, 6.0, 20.0, 15.0]]
    >>> [(len(cohort), cohort.slots) for cohort in Stragglers(uniform, fraction=0.5, epochs=20, drop=True).rounds(2)]
    [(2, 4), (2, 4)]
    """

    def __init__(self, sampler: Sampler, *, fraction: float = 0.5, epochs: int, drop: bool = False) -> None:
        checks.number(least=0, most=1, fraction=fraction, remedy="it is the fraction of a cohort that straggles")
        checks.whole(2, epochs=epochs, remedy="stragglers complete fewer epochs than this, but at least one")
        checks.truth(drop=drop)
        super().__init__(sampler)
        self.fraction, self.epochs, self.drop = float(fraction), epochs, drop
        size = getattr(sampler, "clients", 0)
        if fraction and size and not np.rint(fraction * size):
            warnings.warn(
                f"Nobody straggles: fraction={fraction} of a cohort of {size} clients is rounded to 0. Give fraction > "
                f"{0.5 / size:.3g}, or larger cohorts.",
                stacklevel=2,
            )
        self._words = np.asarray(rng.words(rng.stream(self.key, "stragglers")))

    def _transform(self, cohort: Cohort) -> Cohort:
        if "simulated_seconds" in cohort.measures:
            raise ValueError(
                f"Expected a sampler without a clock in Stragglers, got {type(self.sampler).__name__}, whose times are those "
                "of all steps: leave stragglers out and let some clients need more seconds per step (--step-seconds), or give "
                "fedsim.experiment.simulate a sampler with stragglers."
            )
        draw = rng.generator(self._words, cohort.round)
        stragglers = draw.permutation(len(cohort))[: int(np.rint(self.fraction * len(cohort)))]
        work = np.ones(len(cohort), np.float32)
        work[stragglers] = draw.integers(1, self.epochs, len(stragglers)) / self.epochs
        kept = work == 1 if self.drop else np.ones(len(cohort), bool)
        if cohort.work is not None:
            work = work * cohort.work
        attackers = None if cohort.attackers is None else cohort.attackers[kept]
        arrivals = cohort.arrivals and type(cohort.arrivals)(*(values[kept] for values in cohort.arrivals))
        rows = None if cohort.rows is None else cohort.rows[kept]
        return dataclasses.replace(
            cohort, clients=cohort.clients[kept], work=work[kept], attackers=attackers, arrivals=arrivals, rows=rows
        )
