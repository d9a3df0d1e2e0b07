"""Members of a population or a sweep run: group by group, a group in waves of members that run at the same time.

A wave is run in dispatches, each of equally many rounds of every member. Members that run one after another are waves of one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fedsim import distributed
from fedsim.configuration import How
from fedsim.data import Cohort
from fedsim.execution import Member, Wave, release
from fedsim.experiment.driving import DispatchedRounds, Interruption, Rounds, Stopwatch, pipelined, warnings_above
from fedsim.rounds import RoundPlan
from fedsim.samplers import is_steered
from fedsim.sweeps._grid import named
from fedsim.sweeps._ways import Job, side_by_side

Plans = dict[Any, RoundPlan]
Failed = dict[Job, str]  # The messages of errors: an error itself would keep the states in memory.


def run_groups(groups: Sequence[tuple[How, Sequence[Job]]], progress: bool, interruption: Interruption | None = None) -> Failed:
    """Runs all members that are not finished, as many at a time as the devices run, or those until a signal.

    Args:
      groups: members that share programs and data, and how they run, see `ways`.
      progress: whether to show a progress bar.
      interruption: has the signal after which no more rounds are dispatched. None: a signal has its usual effect, and a
        member with an update that is not finite is an error.

    Returns:
      The members that were left out after an update that was not finite, because ``nonfinite`` is ``"raise"``, and the message
      of each, which contains its name.

    Raises:
      ValueError: the rounds cannot be compiled.
      FloatingPointError: an update is not finite, ``nonfinite`` is ``"raise"``, and there is no ``interruption``.
      OSError: a file cannot be written. What was computed for the other members is written, as after a signal.
    """
    jobs, failed = [job for _, group in groups for job in group], Failed()
    counted = {job: job.rounds if job.is_finished else 0 for job in jobs}
    total, initial = sum(job.rounds for job in jobs), sum(counted.values())
    shows = progress and len(jobs) > 0 and distributed.is_first()

    def advance(job: Job, position: int) -> None:
        new = max(0, position - counted[job])  # Rounds run again after a device ran out of memory.
        bar.update(new)
        counted[job] += new

    def run(together: Sequence[Job], on_device: int, plans: Plans | None) -> None:
        if not (interruption and interruption.received()):
            _release_others(jobs, together)
            bar.set_description(together[0].name + (f" and {len(together) - 1} more" if len(together) > 1 else ""))
            failed.update(_run_wave(together, on_device, plans, advance, interruption))

    with (
        tqdm(total=total, initial=initial, unit="round", disable=not shows, dynamic_ncols=True) as bar,
        warnings_above(bar),
    ):
        for how, group in groups:
            # Members that end at the same time leave no device without work.
            waiting = sorted((job for job in group if not job.is_finished), key=lambda job: job.rounds)
            if how == "sequential":
                for job in waiting:
                    run([job], 1, None)
            else:
                _run_in_turns(functools.partial(run, plans={}), waiting, side_by_side(how, group))
    return failed


def _run_in_turns(run: Callable[[Sequence[Job], int], None], jobs: Sequence[Job], on_device: int) -> None:
    """Runs as many members at a time as the devices run; half as many, with a warning, after a device ran out of memory."""
    start = 0
    while start < len(jobs):
        together = jobs[start : start + on_device * jobs[0].execution.mesh().size]
        try:
            run(together, on_device)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or on_device == 1:
                raise
            warnings.warn(
                f"The device ran out of memory with {on_device} members side by side, so they run again with {on_device // 2}.",
                stacklevel=4,
            )
            on_device //= 2
        else:
            start += len(together)


def _release_others(jobs: Sequence[Job], next: Sequence[Job]) -> None:
    """Frees the devices of the data that some members have used and the next ones do not use: all of it may not fit."""
    used = {id(data) for job in next for data in job.data}
    for data in itertools.chain.from_iterable(job.data for job in jobs):
        if id(data) not in used:
            release(data)


def _run_wave(
    jobs: Sequence[Job],
    on_device: int,
    plans: Plans | None,
    advance: Callable[[Job, int], object],
    interruption: Interruption | None,
) -> Failed:
    """Runs members at the same time, or a single one without ``plans``, until the last round of each or a signal."""
    runs: dict[Job, Rounds] = {}
    with contextlib.ExitStack() as stack:
        for job in jobs:
            with named(job.name):
                runs[job] = job.start()
            stack.callback(runs[job].close)
            advance(job, runs[job].position)
        unfinished = {job: run for job, run in runs.items() if run.position < run.rounds}
        wave = _wave(unfinished, on_device, plans) if unfinished and plans is not None else None
        failed = _Lockstep(unfinished, wave, advance, interruption).run()
    others = [run for job, run in runs.items() if job not in failed]
    for run in others:
        run.draw()
    stopped = [run.position for run in others if run.position < run.rounds]
    if interruption and interruption.signal and stopped and distributed.is_first():
        rounds = f"round {stopped[0]}" if len(set(stopped)) == 1 else f"rounds {min(stopped)} to {max(stopped)}"
        print(f"\n{interruption.signal.name}: stopped {len(stopped)} run(s) after {rounds}.", file=sys.stderr)
    return failed


def _wave(runs: Mapping[Job, Rounds], on_device: int, plans: Plans) -> Wave:
    """Moves the states of members to the devices, where they run at the same time."""
    first = next(iter(runs))
    # The cohorts of a steered sampler depend on the member's own values.
    plans_of = {job: object() if is_steered(run.sampler) else id(run.sampler) for job, run in runs.items()}
    members = [Member(run.algorithm, run.state, run.first, plans_of[job]) for job, run in runs.items()]
    for run in runs.values():
        run.state = None
    length = max(run.lengths.limit for run in runs.values())
    return Wave(members, first.execution, side_by_side=on_device, widest=first.widest, length=length, plans=plans)


class _Sent(NamedTuple):
    """Rounds of several members that were sent to the devices.

    Attributes:
      cohorts: those of each member; none of one that has no rounds left.
      infos: waits for the rounds, and returns the infos of each member on the host.
      states: returns the state of each member after its rounds. They are copied from the devices only if it is called.
    """

    cohorts: Sequence[Sequence[Cohort]]
    infos: Callable[[], Sequence[Any]]
    states: Callable[[], Sequence[Any]]


class _Lockstep:
    """Members whose dispatches have equally many rounds of each of them.

    A member with an update that is not finite is left out from then on, if ``nonfinite`` is ``"raise"``. After any other error,
    which may concern all members, no more rounds are dispatched.

    Args:
      runs: the members' rounds.
      wave: their states. None: there is a single member, whose rounds its algorithm's execution runs.
      advance: called with a member and the number of its finished rounds.
      interruption: see `run_groups`.
    """

    def __init__(
        self,
        runs: Mapping[Job, Rounds],
        wave: Wave | None,
        advance: Callable[[Job, int], object],
        interruption: Interruption | None,
    ) -> None:
        self._runs, self._wave, self._advance, self._interruption = runs, wave, advance, interruption
        self._failed, self._errors = Failed(), dict[Job, Exception]()
        self._finished: _Sent | None = None  # the last one
        self._watch = Stopwatch()

    def run(self) -> Failed:
        """Runs all rounds, or those until a signal, and writes checkpoints."""
        try:
            pipelined(self._dispatch, self._finish)
        except FloatingPointError as error:  # The execution of a single member raises it when rounds are dispatched.
            if self._wave is not None:  # JAX raises it with jax_debug_nans, and does not say for which member.
                self._save()
                raise
            (job,) = self._runs
            self._record(job, error)
        except Exception:
            self._save()
            raise
        self._save()
        if self._errors:
            raise next(iter(self._errors.values()))
        return self._failed

    def _dispatch(self) -> _Sent | None:
        """Sends the next rounds of all members that have rounds left."""
        for run in self._runs.values():
            run.wait_for_others()
        left = {job: run for job, run in self._runs.items() if run.position < run.rounds and job not in self._failed}
        # All wait for one that waits: rounds without clients would change what its state has of earlier rounds.
        if any(run.waits for run in left.values()):
            return None
        if not left or self._errors or (self._interruption and self._interruption.received()):
            return None
        self._finished = None  # Its states need not stay on the devices.
        self._watch.start()
        if self._wave is None:
            ((job, run),) = left.items()
            with named(job.name), run.write_errors():
                alone = run.dispatch()
            self._watch.follow(alone.infos)
            return _Sent([alone.cohorts], lambda: [jax.device_get(alone.infos)], lambda: [alone.state])
        length = min(run.lengths.next(run.position) for run in left.values())
        cohorts = [run.next_cohorts(length) if job in left else [] for job, run in self._runs.items()]
        length = min(len(own) for own in cohorts if own)
        cohorts = [own[:length] for own in cohorts]
        infos = self._wave.run(cohorts)
        self._watch.follow(infos)
        for run in left.values():
            run.position += length
        read_infos = functools.partial(self._wave.read_infos, infos, length)
        return _Sent(cohorts, read_infos, functools.cache(functools.partial(self._wave.read_states, self._wave.states)))

    def _finish(self, sent: _Sent) -> None:
        """Waits for a dispatch, and gives each member its results while the next dispatch runs."""
        infos, members = sent.infos(), sum(map(bool, sent.cohorts))
        seconds = self._watch.lap(max(own[-1].round + 1 for own in sent.cohorts if own))
        for i, job, run in self._members_of(sent):
            with self._recorded(job):
                stop = sent.cohorts[i][-1].round + 1
                state = sent.states()[i] if run.needs_state(stop) else None
                run.finish(DispatchedRounds(sent.cohorts[i], state, infos[i]), seconds, members=members)
                self._advance(job, stop)
        self._finished = sent

    def _save(self) -> None:
        """Writes checkpoints of the last dispatch that is finished."""
        if sent := self._finished:
            for i, job, run in self._members_of(sent):
                with self._recorded(job):
                    run.save(DispatchedRounds(sent.cohorts[i], sent.states()[i], infos=()))

    def _members_of(self, sent: _Sent) -> Iterator[tuple[int, Job, Rounds]]:
        """Yields the members of a dispatch, without those that failed."""
        for i, (job, run) in enumerate(self._runs.items()):
            if sent.cohorts[i] and job not in self._failed and job not in self._errors:
                yield i, job, run

    @contextlib.contextmanager
    def _recorded(self, job: Job) -> Iterator[None]:
        """Records an error of a member instead of raising it."""
        try:
            with named(job.name), self._runs[job].write_errors():
                yield
        except Exception as error:
            self._record(job, error)

    def _record(self, job: Job, error: Exception) -> None:
        if isinstance(error, FloatingPointError) and self._interruption:
            self._failed[job] = str(error)
        else:
            self._errors.setdefault(job, error)
