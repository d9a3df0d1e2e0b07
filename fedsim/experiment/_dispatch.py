"""Dispatches: rounds that are sent to the devices together, how many they are, and the order in which a driver handles them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from fedsim import distributed
from fedsim.algorithm import Algorithm
from fedsim.data import Cohort
from fedsim.execution import runs_with
from fedsim.samplers import Sampler, checked_cohort

# Two dispatches are on the device at a time, so the run reacts to Ctrl-C within about twice this time.
_SECONDS_PER_DISPATCH = 0.4
_MAX_ROUNDS = 32

State = Any
_Sent = TypeVar("_Sent")


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
        # The shortest of the last four, because an evaluation may run beside the others.
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


class DispatchedRounds(NamedTuple):
    """Rounds that were sent to the devices, whose results may not be computed yet.

    Attributes:
      cohorts: one per round.
      state: the state after the last of them; None if nothing needs it, see `Rounds.needs_state`.
      infos: the infos of the rounds, stacked, leaves ``[rounds, ...]``, on the devices or on the host.

    >>> from fedsim import FederatedData
    >>> data = FederatedData.from_arrays({"x": [1.0, 2.0]}, sizes=[1, 1])
    >>> DispatchedRounds([Cohort.of(data, ["0"], round=4, seed=0)], state=(), infos=()).stop
    5
    """

    cohorts: Sequence[Cohort]
    state: State
    infos: Any

    @property
    def stop(self) -> int:
        """The number of finished rounds after the last of these."""
        return self.cohorts[-1].round + 1


class Rounds:
    """The rounds of a run that come next, and the state before them. A subclass says what becomes of the results.

    A driver sends rounds to the devices, by `dispatch` or beside those of other runs, and gives the results to `finish`.

    Args:
      algorithm: the algorithm.
      sampler: has the cohorts.
      first: the cohort of the first round.
      rounds: the number of rounds.
      lengths: chooses the number of rounds of the next dispatch.

    Attributes:
      position: the number of rounds that are finished or dispatched.
      state: the state after ``position`` rounds.

    >>> import jax, fedsim, optax
    >>> data, model = fedsim.datasets.load("digits").train, fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedSGD(model=model, server_optimizer=optax.sgd(0.1))
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> run = Rounds(algorithm, sampler, first=sampler.cohort(0), rounds=3, lengths=DispatchLength(2, [3]))
    >>> run.state = algorithm.init(jax.random.key(0))
    >>> len(run.dispatch().cohorts), len(run.dispatch().cohorts), run.position, run.needs_state(3)
    (2, 1, 3, True)
    """

    def __init__(self, algorithm: Algorithm, sampler: Sampler, *, first: Cohort, rounds: int, lengths: DispatchLength) -> None:
        self.algorithm, self.sampler, self.first, self.rounds, self.lengths = algorithm, sampler, first, rounds, lengths
        self.position, self.state = 0, None

    def next_cohorts(self, length: int) -> list[Cohort]:
        """Returns the cohorts of the next rounds, at most ``length``, that can run in one dispatch."""
        return cohorts(self.sampler, self.position, length, self.first)

    def wait_for_others(self) -> None:
        """Waits for the rounds that are running if several processes share them, before what all processes do together.

        A CPU cannot run two programs with collectives at a time.
        """
        if jax.process_count() > 1:
            jax.block_until_ready(self.state)

    def dispatch(self) -> DispatchedRounds:
        """Sends the next rounds to the devices of the algorithm's execution."""
        self.wait_for_others()
        # The time of rounds is not the same in all processes.
        together = self.next_cohorts(distributed.from_first(self.lengths.next(self.position)))
        self.state, infos = self.algorithm.apply_rounds(self.state, together, max_rounds=self.lengths.limit)
        dispatch = DispatchedRounds(self.algorithm.execution.took_part(together), self.state, infos)
        self.position = dispatch.stop
        return dispatch

    @property
    def waits(self) -> bool:
        """Whether the next rounds depend on results that are not finished, so that they cannot be dispatched yet."""
        return False

    def needs_state(self, stop: int) -> bool:
        """Returns whether `finish` needs the state after round ``stop``, the last round of a dispatch."""
        return stop == self.rounds

    def finish(self, dispatch: DispatchedRounds, seconds: float, *, members: int = 1) -> None:
        """Takes the results of a dispatch.

        Args:
          dispatch: the oldest dispatch that is not finished, with infos on the host.
          seconds: the wall time of its rounds.
          members: the number of runs whose rounds were computed in this time.
        """
        raise NotImplementedError

    def save(self, dispatch: DispatchedRounds) -> None:
        """Writes a checkpoint of the state after a dispatch that is finished, unless there is one."""

    def write_errors(self) -> contextlib.AbstractContextManager[None]:
        """Adds to an error about a file of the run how to continue the run."""
        return contextlib.nullcontext()

    def draw(self) -> None:
        """Writes the clients' results of the last evaluation and the run's pictures into its folder, if there is one."""

    def close(self) -> None:
        """Unlocks the folder."""


def pipelined(dispatch: Callable[[], _Sent | None], finish: Callable[[_Sent], object]) -> _Sent | None:
    """Finishes each dispatch while the next one runs. If one cannot be sent, the one before it is finished.

    Args:
      dispatch: sends the next rounds to the devices; returns None if there are none, or if the results of the last ones have
        to be known first. It is then called again.
      finish: waits for a dispatch, and takes its results.

    Returns:
      The last dispatch; None if there was none.

    >>> left = [3, 2, 1]
    >>> pipelined(lambda: print("sends", left[-1]) or left.pop() if left else None, lambda sent: print("finishes", sent))
    sends 1
    sends 2
    finishes 1
    sends 3
    finishes 2
    finishes 3
    3
    """
    last = unfinished = None
    while True:
        try:
            sent = dispatch()
        except Exception:
            if unfinished is not None:
                finish(unfinished)
            raise
        if unfinished is not None:
            finish(unfinished)
        elif sent is None:
            return last
        unfinished, last = sent, last if sent is None else sent
