"""Runs of a sweep that share programs, several at the same time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedsim.data import Cohort
from fedsim.execution import KnownPlans, Member, Wave
from fedsim.experiment.driving import DispatchedRounds, Interruption, Run, Stopwatch


def run_in_lockstep(
    runs: Mapping[str, Run], *, side_by_side: int, plans: KnownPlans, interruption: Interruption
) -> dict[str, str]:
    """Runs all rounds of some runs, or those until a signal. Every dispatch has equally many rounds of each of them.

    A run with an update that is not finite is left out from then on, if ``nonfinite`` is ``"raise"``. After any other error,
    which may concern all runs, what was computed for the other runs is written, as after a signal.

    Args:
      runs: by name. Their algorithms share programs, and they may have finished different numbers of rounds.
      side_by_side: how many of them run side by side on a device. There are at most as many on all devices.
      plans: the plans that these runs share with others.
      interruption: has the signal after which no more rounds are dispatched.

    Returns:
      The messages of the errors of the runs that were left out, by name. They contain the name.

    Raises:
      ValueError: the rounds cannot be compiled.
      OSError: a file cannot be written.
    """
    unfinished = {name: run for name, run in runs.items() if run.position < run.rounds}
    if not unfinished:
        return {}
    lockstep = _Lockstep(unfinished, side_by_side, plans)
    last: _Sent | None = None
    while not interruption.signal and lockstep.left():
        try:
            sent = lockstep.dispatch()
        except Exception:
            lockstep.end(last)
            raise
        previous, last = last, sent
        if previous:
            lockstep.finish(previous)
    lockstep.end(last)
    return lockstep.failed


class _Sent(NamedTuple):
    """A dispatch of several runs: the cohorts of each one's rounds, and the states and infos of all on the devices."""

    cohorts: Sequence[Sequence[Cohort]]
    states: Any
    infos: Any


class _Lockstep:
    """Dispatches rounds of several runs, and writes the results of each run; see `run_in_lockstep`.

    Attributes:
      failed: the messages of the errors of runs that are left out, by name. An error itself would keep the states in memory.
    """

    def __init__(self, runs: Mapping[str, Run], side_by_side: int, plans: KnownPlans) -> None:
        self.failed: dict[str, str] = {}
        self._errors: dict[str, Exception] = {}
        self._runs, self._finished = runs, dict[str, DispatchedRounds]()
        members = [Member(run.algorithm, run.state, run.sampler.cohort, id(run.sampler)) for run in runs.values()]
        execution: Any = members[0].algorithm.execution  # type: ignore[attr-defined]
        widest = max((run.first for run in runs.values()), key=lambda cohort: cohort.slots)
        length = max(run.lengths.limit for run in runs.values())
        self._wave = Wave(members, execution, side_by_side=side_by_side, widest=widest, length=length, plans=plans)
        self._watch = Stopwatch()

    def left(self) -> list[Run]:
        """Returns the runs with rounds left, without those that failed; none after an error that may concern all."""
        return [
            run
            for name, run in self._runs.items()
            if run.position < run.rounds and name not in self.failed and not self._errors
        ]

    def dispatch(self) -> _Sent:
        """Sends the next rounds of the runs that are left to the devices. The others wait."""
        left = self.left()
        length = min(run.lengths.next(run.position) for run in left)
        cohorts = [run.next_cohorts(length) if run in left else [] for run in self._runs.values()]
        length = min(len(own) for own in cohorts if own)
        cohorts = [own[:length] for own in cohorts]
        infos = self._wave.run([range(own[0].round, own[0].round + length) if own else range(0) for own in cohorts])
        for run in left:
            run.position += length
        return _Sent(cohorts, self._wave.states, infos)

    def finish(self, sent: _Sent) -> None:
        """Waits for a dispatch, then evaluates and writes the results of each run while the next dispatch runs."""
        infos = self._wave.read_infos(sent.infos, max(map(len, sent.cohorts)))
        stop = max(own[-1].round + 1 for own in sent.cohorts if own)
        seconds, states = self._watch.lap(stop), self._wave.read_states(sent.states)
        members = sum(map(bool, sent.cohorts))
        for i, (name, run) in enumerate(self._runs.items()):
            if sent.cohorts[i] and name not in self.failed and name not in self._errors:
                state, info = jax.tree.map(lambda x, i=i: x[i, ...], (states, infos))
                with self._recorded(name):
                    dispatch = DispatchedRounds(sent.cohorts[i], state, info)
                    run.state = state
                    run.finish(dispatch, seconds, members=members)
                    self._finished[name] = dispatch

    def end(self, last: _Sent | None) -> None:
        """Finishes the last dispatch, writes checkpoints, and raises the first error that may concern all runs."""
        if last:
            self.finish(last)
        for name, dispatch in self._finished.items():
            with self._recorded(name):
                self._runs[name].save(dispatch)
        for error in self._errors.values():
            raise error

    @contextlib.contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        """Records an error of a run instead of raising it."""
        try:
            with named(name), self._runs[name].write_errors():
                yield
        except FloatingPointError as error:
            self.failed[name] = str(error)
        except Exception as error:
            self._errors.setdefault(name, error)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Adds the name of a run to warnings, and to the messages of ``ValueError`` and ``FloatingPointError``.

    >>> with named("seed=1"):
    ...     raise ValueError("no data")
    Traceback (most recent call last):
    ...
    ValueError: seed=1: no data
    """
    # With this context, Python forgets which warnings it has shown, so that an equal one of another run is shown, too.
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_with_name(message: Any, *arguments: Any, **keywords: Any) -> None:
            show(f"{name}: {message}", *arguments, **keywords)

        warnings.showwarning = show_with_name
        try:
            yield
        except (ValueError, FloatingPointError) as error:
            kind = ValueError if isinstance(error, ValueError) else FloatingPointError
            raise kind(f"{name}: {error}") from error
        finally:
            warnings.showwarning = show
