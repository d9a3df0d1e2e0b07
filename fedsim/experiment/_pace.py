"""How many rounds to hand to the device at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fedsim.data import Cohort
from fedsim.execution import runs_with
from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort

# Two dispatches are under way at a time, so Ctrl-C is answered within about twice this.
_SECONDS_PER_DISPATCH = 0.4
_MOST_ROUNDS = 32


class Pace:
    """Chooses the length of each dispatch: many rounds if they are short, up to a limit that stays the same for the run.

    Any number up to ``limit`` runs the same compiled program, so the choice affects time alone.

    Args:
      fixed: always this many rounds; None: go by time.
      boundaries: multiples of these round numbers end a dispatch (evaluations, checkpoints, the end).

    >>> pace = Pace(None, boundaries=[10, 25])
    >>> pace.limit, pace.length(0)
    (10, 1)
    >>> for _ in range(2): pace.measured(rounds=1, seconds=0.001)
    >>> pace.length(2), pace.length(24)
    (8, 1)
    """

    def __init__(self, fixed: int | None, boundaries: list[int]) -> None:
        self.limit = min(fixed or _MOST_ROUNDS, *boundaries)
        self._fixed, self._boundaries = fixed, boundaries
        self._first = True
        self._recent: deque[float] = deque(maxlen=4)

    def length(self, start: int) -> int:
        """Rounds of the dispatch that begins after round ``start``."""
        # The least of the last few: now and then a dispatch also waits for an evaluation.
        by_time = max(1, int(_SECONDS_PER_DISPATCH / max(min(self._recent), 1e-9))) if self._recent else 1
        to_boundary = min(boundary - start % boundary for boundary in self._boundaries)
        return min(self._fixed or by_time, self.limit, to_boundary)

    def measured(self, rounds: int, seconds: float) -> None:
        """Takes note of how long a dispatch took; the first one compiles and says nothing."""
        if not self._first:
            self._recent.append(seconds / rounds)
        self._first = False


def cohorts(sampler: Sampler, start: int, length: int, first: Cohort) -> list[Cohort]:
    """Returns the next cohorts that can run together: at most ``length``, with the same number of slots and the same attack.

    ``first`` is the first cohort of the run; see `checked_cohort`.
    """
    return list(_alike(checked_cohort(sampler, round, first) for round in range(start, start + length)))


def _alike(candidates: Iterator[Cohort]) -> Iterator[Cohort]:
    yield (first := next(candidates))
    for cohort in candidates:
        if not runs_with(cohort, first):
            return
        yield cohort
