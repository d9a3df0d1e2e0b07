"""`actual`: what finished rounds have revealed of each client, by the rounds in which it took part.

P. Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", ICML 2021, section 2, for guarantees
that hold for given rounds of a client: https://arxiv.org/abs/2103.00039.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from fedsim.data import Cohort
from fedsim.privacy._guarantee import Guarantee

# As many clients at a time have a dense row per round.
_BLOCK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Actual:
    """What the finished rounds of a run reveal of each client to those who know who took part.

    Whatever the relation of the `Guarantee` is, it holds for a client that sends zeros in all of its rounds, and keeps its
    place: the rounds are given, so no client can be added to them. If a client is replaced by any other, z counts as z / 2.
    Sampling does not hide who took part here, so ε may be larger than that of `Guarantee`; it is smaller for clients that took
    part seldom, and 0 for those that never did.

    Attributes:
      rounds: the number of rounds in which each client took part, ``int64 [population]``.
      sensitivity: the largest change of all sums of the run by each client, in norms, ``float64 [population]``. With
        independent noise it is the square root of ``rounds``.
      guarantee: of the run.

    >>> import fedsim
    >>> guarantee = Guarantee(noise_multiplier=4.0, participation=fedsim.privacy.EveryRound(), delta=0.01)
    >>> found = Actual(rounds=np.array([0, 4]), sensitivity=np.array([0.0, 2.0]), guarantee=guarantee)
    >>> found.epsilon(0.0), round(found.epsilon(), 2)
    (0.0, 0.92)
    """

    rounds: np.ndarray
    sensitivity: np.ndarray
    guarantee: Guarantee

    def epsilon(self, quantile: float = 1.0) -> float:
        """Returns ε of a client: of the one with the largest sensitivity, or of another quantile of the clients."""
        return self.guarantee.epsilon_if_seen(float(np.quantile(self.sensitivity, quantile, method="higher")))

    def text(self) -> str:
        """Returns the numbers of rounds and ε of the client whose rounds reveal most, and of the median, as a sentence."""
        order = np.argsort(self.sensitivity, kind="stable")
        middle, most = self.rounds[order[len(order) // 2]], self.rounds[order[-1]]
        return (
            f"If it is known who took part: ε = {self.epsilon():.3g} for the client whose rounds reveal most (it has {most}), "
            f"and {self.epsilon(0.5):.3g} for the median ({middle}), each beside a client that sends zeros."
        )


def actual(guarantee: Guarantee, cohorts: Iterable[Cohort]) -> Actual:
    """Returns what rounds have revealed of each client, from those who took part.

    Clients who were dropped, such as stragglers, do not count. Who takes part must not depend on what clients send; samplers
    for which it does have no `Guarantee`.

    Args:
      guarantee: of the run.
      cohorts: of the finished rounds, in their order, from round 0.

    Raises:
      ValueError: there are no cohorts, or more than rounds of the guarantee's matrix.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(5)}, sizes=[1] * 5)
    >>> sampler = fedsim.samplers.CyclicSampler(data, clients=2, seed=0)
    >>> guarantee = Guarantee(noise_multiplier=2.0, participation=fedsim.privacy.participation_of(sampler), delta=0.1)
    >>> found = actual(guarantee, sampler.rounds(6))
    >>> found.rounds.tolist(), found.sensitivity.round(2).tolist()
    ([2, 2, 2, 2, 2], [1.41, 1.41, 1.41, 1.41, 1.41])
    >>> print(found.text())  # doctest: +NORMALIZE_WHITESPACE
    If it is known who took part: ε = 0.607 for the client whose rounds reveal most (it has 2), and 0.607 for the median (2),
    each beside a client that sends zeros.
    """
    from scipy import sparse

    cohorts = list(cohorts)
    if not cohorts:
        raise ValueError("Expected one cohort or more, got none: no round has finished, so nothing was revealed.")
    clients = np.concatenate([cohort.clients for cohort in cohorts])
    counts = np.bincount(clients, minlength=cohorts[0].data.num_clients)
    sensitivity = np.sqrt(counts)
    if guarantee.matrix is not None:
        guarantee.epsilon(len(cohorts))  # Raises if the matrix has fewer rounds.
        matrix = guarantee.matrix.dense(len(cohorts))
        rounds = np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts])
        part = sparse.csc_array((np.ones(len(clients)), (rounds, clients)), shape=(len(cohorts), len(counts)))
        seen = np.flatnonzero(counts)
        for start in range(0, len(seen), _BLOCK):
            block = seen[start : start + _BLOCK]
            sensitivity[block] = np.linalg.norm(matrix @ part[:, block].toarray(), axis=0)
    return Actual(rounds=counts, sensitivity=sensitivity, guarantee=guarantee)
