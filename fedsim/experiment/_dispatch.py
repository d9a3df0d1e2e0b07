"""The number of rounds that are sent to the device in one dispatch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fedsim.data import Cohort
from fedsim.execution import runs_with
from fedsim.samplers import Sampler, checked_cohort

# Two dispatches are on the device at a time, so the run reacts to Ctrl-C within about twice this time.
_SECONDS_PER_DISPATCH = 0.4
_MAX_ROUNDS = 32


class DispatchLength:
    """Chooses the number of rounds of each dispatch: more rounds if they are short, up to a limit that is fixed for the run.

    All lengths up to ``limit`` use the same compiled program, so the choice affects only the time.

    Args:
      fixed: the length of every dispatch; None chooses it by the time that rounds take.
      boundaries: a dispatch ends at the multiples of these numbers of rounds (evaluations, checkpoints, the last round).

    >>> lengths = DispatchLength(None, boundaries=[10, 25])
    >>> lengths.limit, lengths.next(0)
    (10, 1)
    >>> for _ in range(2): lengths.record(rounds=1, seconds=0.001)
    >>> lengths.next(2), lengths.next(24)
    (8, 1)
    """

    def __init__(self, fixed: int | None, boundaries: list[int]) -> None:
        self.limit = min(fixed or _MAX_ROUNDS, *boundaries)
        self._fixed, self._boundaries = fixed, boundaries
        self._first = True
        self._recent: deque[float] = deque(maxlen=4)

    def next(self, start: int) -> int:
        """Returns the number of rounds of the dispatch that begins after round ``start``."""
        # The shortest of the last four, because some dispatches also wait for an evaluation.
        by_time = max(1, int(_SECONDS_PER_DISPATCH / max(min(self._recent), 1e-9))) if self._recent else 1
        to_boundary = min(boundary - start % boundary for boundary in self._boundaries)
        return min(self._fixed or by_time, self.limit, to_boundary)

    def record(self, rounds: int, seconds: float) -> None:
        """Records how long a dispatch took. The first one is ignored, because it includes compilation."""
        if not self._first:
            self._recent.append(seconds / rounds)
        self._first = False


def cohorts(sampler: Sampler, start: int, length: int, first: Cohort) -> list[Cohort]:
    """Returns the next cohorts that can run together: at most ``length``, with the same number of slots and the same attack.

    ``first`` is the first cohort of the run; see `checked_cohort`.

    >>> from fedsim import FederatedData, UniformSampler
    >>> sampler = UniformSampler(FederatedData.from_arrays({"x": [1.0, 2.0, 3.0]}, sizes=[1] * 3), clients=2, seed=0)
    >>> [cohort.round for cohort in cohorts(sampler, start=5, length=3, first=sampler.cohort(0))]
    [5, 6, 7]
    """
    return list(_compatible(checked_cohort(sampler, round, first) for round in range(start, start + length)))


def _compatible(candidates: Iterator[Cohort]) -> Iterator[Cohort]:
    yield (first := next(candidates))
    for cohort in candidates:
        if not runs_with(cohort, first):
            return
        yield cohort
