"""`sweep`: runs of a configuration with several values of some numbers and several seeds, each in its own run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fedsim import rng
from fedsim.configuration import Experiment, How, RunConfig, Settings, build_members
from fedsim.data import Cohort, FederatedData
from fedsim.durable_files import replace_text, writing
from fedsim.execution import KnownPlans, in_turns, release, traced_rounds
from fedsim.experiment import read_sweep, run_experiment
from fedsim.experiment.driving import (
    Callback,
    Interruption,
    Line,
    LossMonitor,
    Run,
    RunFolder,
    arguments_of,
    code_change,
    code_of,
    imported_modules,
    resume_command,
    sweep_file,
    warnings_above,
    write_signed,
)
from fedsim.samplers import checked_cohort
from fedsim.sweeps._grid import listed_seeds, listed_settings
from fedsim.sweeps._lockstep import named, run_in_lockstep
from fedsim.sweeps._population import chosen_way, side_by_side, why_alone
from fedsim.sweeps._result import SweepMember, SweepResult, csv_of, with_result

_Failed = dict[str, str]  # the messages of errors, by the names of members


class _Job(NamedTuple):
    """A member with its own configuration, its objects, and the settings with its own folder."""

    member: SweepMember
    config: RunConfig
    experiment: Experiment
    settings: Settings

    def is_finished(self) -> bool:
        """Returns whether the folder has all that a finished run has."""
        return RunFolder(self.member.folder).is_finished(self.config)

    def first(self) -> Cohort:
        """Returns the first cohort."""
        return checked_cohort(self.experiment.sampler, 0)

    def data(self) -> list[FederatedData]:
        """Returns the data that the run places on devices."""
        return [self.first().data, self.experiment.test_data]

    def initial_shapes(self) -> Any:
        """Returns the shapes of the initial state."""
        return jax.eval_shape(self.experiment.algorithm.init, rng.stream(self.first().key, "init"))


def sweep(
    config: RunConfig,
    settings: Settings,
    varied: Mapping[str, Sequence[Any]],
    seeds: int | Sequence[int] = 1,
    how: How | None = None,
    table: bool | None = None,
) -> SweepResult:
    """Runs a configuration with all combinations of some values and with several seeds.

    Every run has a folder with the same content as that of a separate run. Its numbers are the same up to the order of sums,
    and bit for bit with ``how="sequential"``, or ``how="devices"`` and a single device. The runs share model and data unless
    the varied values determine these, and compiled programs unless they determine shapes or the code. Runs with different seeds
    have different data if the dataset is drawn with the seed (``digits``, and not ``digits(seed=0)``). Runs that share programs
    and data run at the same time, as the members of a `fedsim.population`, unless they are fewer than the devices that one run
    uses: then they run one after another on all devices. If the folder holds this sweep already, finished runs are left as they
    are, and interrupted runs continue.

    The folder also has ``sweep.json`` (what is run), ``table.txt`` (the table of `SweepResult.table`) and ``members.csv`` (the
    last evaluation of every run). ``seconds`` in the metrics of runs that ran at the same time is the time of their rounds
    divided by the number of these runs.

    Args:
      config: the configuration.
      settings: the settings of all runs; ``folder`` is the folder of the sweep.
      varied: fields of `RunConfig` and hyperparameters of the algorithm, with the values to try.
      seeds: the seeds; a number n means n seeds from ``config.seed`` on.
      how: ``"vmap"`` runs as many members side by side on each device as its memory allows, ``"devices"`` one member at a time
        on each device, and ``"sequential"`` one member at a time on all devices; see `fedsim.population`. None is what the
        folder's ``sweep.json`` has recorded, and in a new folder ``"devices"`` on a CPU and ``"vmap"`` otherwise. Members that
        cannot run in this way run sequentially, and a warning gives the reason.
      table: whether to print the table on stdout; None prints it if ``settings.progress`` is true.

    Raises:
      ValueError: a configuration is not valid (the message names its values), or the folder holds something else.
      FloatingPointError: updates were not finite and ``config.nonfinite`` is ``"raise"``. The message names the members. It is
        raised after the other members have finished and the table is written. When the sweep continues, the members that
        failed are tried again.

    >>> import tempfile
    >>> config = RunConfig(model="digits_logistic", rounds=2, clients=2)
    >>> folder = Path(tempfile.mkdtemp()) / "sweep"
    >>> result = sweep(config, Settings(folder=str(folder), progress=False), {"client_learning_rate": [0.05, 0.1]})
    >>> [member.name for member in result.members]
    ['client_learning_rate=0.05,seed=0', 'client_learning_rate=0.1,seed=0']
    >>> sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != ".lock")
    ['members.csv', 'sweep.json', 'table.txt']
    """
    began = time.perf_counter()
    if settings.folder is None:
        raise ValueError("Expected settings with a folder, got folder=None: give the folder of the sweep.")
    chosen_seeds = listed_seeds(seeds, config.seed)
    chosen_way(how)  # raises ValueError for an unknown way
    if "seed" in varied:
        raise ValueError("Expected seeds in seeds, got seed in varied: pass seeds=[...].")
    folder = Path(settings.folder)
    members = members_of(folder, config, varied, chosen_seeds)
    jobs = [
        _Job(member, own, experiment, dataclasses.replace(settings, folder=str(member.folder)))
        for (member, own), experiment in zip(members, build_members([own for _, own in members], settings), strict=True)
    ]
    for job in jobs:
        with named(job.member.name):
            job.experiment.algorithm.check(job.experiment.sampler.data)
    with _locked(folder):
        code = code_of(*(job.experiment[:2] for job in jobs), *imported_modules(config))
        how = _initialize(folder, config, settings, varied, chosen_seeds, how, code)
        finished, failed, stopped = _run_all(jobs, how, settings.progress)
        result = SweepResult(members=finished, folder=folder, interrupted=stopped, varied=varied)
        replace_text(folder / "members.csv", csv_of(result))
        replace_text(folder / "table.txt", result.table() + "\n")
    failures = f"{len(failed)} of {len(members)} runs failed. {folder / 'table.txt'} has the {len(finished)} that finished."
    failures = "\n  ".join([failures, *failed.values()])
    if stopped:
        if failed:
            print(failures, file=sys.stderr)
        print(f"The sweep ended after {len(finished)} of {len(members)} runs.", file=sys.stderr)
        print(f"To continue the sweep: {resume_command(folder)}", file=sys.stderr)
    elif failed:
        raise FloatingPointError(failures)
    elif settings.progress if table is None else table:
        print(
            f"{len(members)} runs of {config.rounds} rounds: the last evaluation, mean ± standard deviation over seeds\n\n"
            f"{result.table()}\n\nwall time  {time.perf_counter() - began:.1f} s\nwritten    {folder}/\n"
            f"             {sweep_file(folder).name}, members.csv, table.txt\n"
            f"             {len(members)} run folders: {members[0][0].name}/, ..."
        )
    return result


def members_of(
    folder: str | Path, config: RunConfig, varied: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[tuple[SweepMember, RunConfig]]:
    """Returns the members of a sweep, each with its own configuration.

    >>> [(member, own)] = members_of("s", RunConfig(), {"clip": [0.5]}, [3])
    >>> member.name, own.clip, own.seed
    ('clip=0.5,seed=3', 0.5, 3)
    """
    members = [
        SweepMember(setting=setting, seed=seed, folder=Path(folder))
        for setting, seed in itertools.product(listed_settings(varied), seeds)
    ]
    members = [dataclasses.replace(member, folder=member.folder / member.name) for member in members]
    return [(member, _config_of(config, member)) for member in members]


def _config_of(config: RunConfig, member: SweepMember) -> RunConfig:
    """Returns the configuration of a member, which is that of a separate run."""
    fields = {field.name for field in dataclasses.fields(RunConfig)} - {"hyperparameters"}
    general = {name: value for name, value in member.setting.items() if name in fields}
    own = {name: value for name, value in member.setting.items() if name not in fields}
    with named(member.name):
        return dataclasses.replace(config, **general, seed=member.seed, hyperparameters={**config.hyperparameters, **own})


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).lock():
        yield


def _initialize(
    folder: Path, config: RunConfig, settings: Settings, varied: Mapping[str, Sequence[Any]], seeds: Sequence[int],
    how: How | None, code: Mapping[str, str],
) -> How:  # fmt: skip
    """Writes ``sweep.json``, or checks that an existing one is of the same sweep. Returns how the members run."""
    new = json.loads(json.dumps({"config": dataclasses.asdict(config), "varied": dict(varied), "seeds": seeds}))
    stored = read_sweep(folder)
    if stored is None and RunFolder(folder).config.exists():
        raise ValueError(f"The folder {folder} holds a run and not a sweep: choose another folder.")
    if stored is not None:
        entries = [{**sweep["config"], "varied": sweep["varied"], "seeds": sweep["seeds"]} for sweep in (new, stored)]
        if differences := [name for name in entries[0] if entries[0][name] != entries[1].get(name)]:
            lines = [f"  {name}: {entries[0][name]} now, {entries[1].get(name)} in the folder" for name in differences]
            raise ValueError(
                f"The folder {folder} holds another sweep:\n"
                + "\n".join(lines)
                + "\nChoose another folder, or repeat its options."
            )
        if changed := code_change(folder, stored, code):
            raise ValueError(f"{changed} Restore it, or start a new sweep in another folder.")
    # A sweep continues as it began, so that it ends with the same bits.
    how = chosen_way(how or (stored or {}).get("how"))
    content = {**new, "how": how, "settings": dataclasses.asdict(settings), "code": dict(code)}
    write_signed(sweep_file(folder), content)
    return how


def _run_all(jobs: Sequence[_Job], how: How, progress: bool) -> tuple[list[SweepMember], _Failed, signal.Signals | None]:
    """Returns the finished members, the errors of those that failed, and the signal that ended the sweep."""
    failed: _Failed = {}
    stopped = None
    with tqdm(total=sum(job.config.rounds for job in jobs), unit="round", disable=not progress, dynamic_ncols=True) as bar:
        unfinished = [job for job in jobs if not job.is_finished()]
        bar.update(bar.total - sum(job.config.rounds for job in unfinished))
        if unfinished:
            for way, group in _groups(jobs, how):
                _release_others(jobs, group)
                run = _run_one_after_another if way == "sequential" else _run_at_the_same_time
                of_group, stopped = run(group, way, bar)
                failed |= of_group
                if stopped:
                    break
    finished = [with_result(job.member, LossMonitor.of(job.experiment.algorithm)) for job in jobs if job.is_finished()]
    return finished, failed, stopped if len(finished) + len(failed) < len(jobs) else None


def _groups(jobs: Sequence[_Job], how: How) -> list[tuple[How, list[_Job]]]:
    """Divides the jobs into those that share programs and data, and says how each group runs.

    The groups contain finished jobs, too, so that the others run as they did when the sweep began.
    """
    if how == "sequential":
        return [(how, list(jobs))]
    groups: dict[Any, list[_Job]] = {}
    reasons: list[str] = []
    for job in jobs:
        algorithm, first = job.experiment.algorithm, job.first()
        with named(job.member.name):
            like = job.initial_shapes()
            if reason := why_alone(algorithm, like, first):
                reasons.append(reason)
            key = None if reason else (traced_rounds(algorithm, like, first.data)[0], first.slots, first.attack, id(first.data))
        groups.setdefault(key, []).append(job)
    for reason in dict.fromkeys(reasons):
        warnings.warn(
            f"{reasons.count(reason)} of {len(jobs)} runs run one after another (how='sequential'), because {reason}.",
            stacklevel=4,
        )
    return [("sequential" if key is None or _leave_devices_idle(group) else how, group) for key, group in groups.items()]


def _leave_devices_idle(jobs: Sequence[_Job]) -> bool:
    """Returns whether jobs that run at the same time would use fewer devices than one of them that runs on all devices."""
    mesh = jobs[0].experiment.algorithm.execution.mesh()  # type: ignore[attr-defined]
    return len(jobs) < max(2, min(mesh.size, jobs[0].first().slots))


def _release_others(jobs: Sequence[_Job], next: Sequence[_Job]) -> None:
    """Frees the devices of the data that some jobs have used and the next ones do not use: all of it may not fit."""
    used = {id(data) for job in next for data in job.data()}
    for data in itertools.chain.from_iterable(job.data() for job in jobs):
        if id(data) not in used:
            release(data)


def _run_one_after_another(jobs: Sequence[_Job], how: How, bar: tqdm[Any]) -> tuple[_Failed, signal.Signals | None]:
    """Runs each job on all devices; returns the errors of those that failed, and the signal that ended the last one."""
    failed: _Failed = {}
    for job in jobs:
        bar.set_description(job.member.name)
        if not job.is_finished():
            _release_others(jobs, [job])
            options: dict[str, Any] = {"progress": False, "callbacks": [_counting(bar)]}
            try:
                with named(job.member.name):
                    result = run_experiment(job.experiment, job.config, job.settings, **options)
            except FloatingPointError as error:
                failed[job.member.name] = str(error)
                continue
            if result.interrupted:
                return failed, result.interrupted
    return failed, None


def _run_at_the_same_time(jobs: Sequence[_Job], how: How, bar: tqdm[Any]) -> tuple[_Failed, signal.Signals | None]:
    """Runs as many jobs at a time as the devices run; returns errors and signal as `_run_one_after_another` does."""
    algorithm, first = jobs[0].experiment.algorithm, jobs[0].first()
    on_device = side_by_side(how, len(jobs), algorithm, jobs[0].initial_shapes(), first.data)
    num_devices = algorithm.execution.mesh().size  # type: ignore[attr-defined]
    # Runs that end at the same time leave no device without work.
    waiting = sorted([job for job in jobs if not job.is_finished()], key=lambda job: job.config.rounds)
    plans, counting = KnownPlans(), {job.member.name: _counting(bar) for job in waiting}
    with Interruption() as interruption, warnings_above(bar):

        def run(together: Sequence[_Job], on_device: int) -> _Failed:
            if interruption.signal:
                return {}
            bar.set_description(together[0].member.name + (f" and {len(together) - 1} more" if len(together) > 1 else ""))
            return _run_wave(together, on_device, plans, counting, interruption)

        waves = in_turns(run, waiting, on_device, num_devices)
    return dict(itertools.chain.from_iterable(failed.items() for failed in waves)), interruption.signal


def _run_wave(
    jobs: Sequence[_Job], on_device: int, plans: KnownPlans, counting: Mapping[str, Callback], interruption: Interruption
) -> _Failed:
    """Runs jobs at the same time, until the last round of each or a signal; returns the errors of those that failed."""
    runs: dict[str, Run] = {}
    with contextlib.ExitStack() as stack:
        for job in jobs:
            algorithm, sampler, _ = job.experiment
            with named(job.member.name):
                arguments = arguments_of(job.experiment, job.config, job.settings)
                run = Run(algorithm, sampler, evaluate=None, callbacks=[counting[job.member.name]], **arguments)
            stack.callback(run.close)
            runs[job.member.name] = run
        failed = run_in_lockstep(runs, side_by_side=on_device, plans=plans, interruption=interruption)
    others = [run for name, run in runs.items() if name not in failed]
    for run in others:
        run.draw()
    stopped = [run.position for run in others if run.position < run.rounds]
    if interruption.signal and stopped:
        rounds = f"round {stopped[0]}" if len(set(stopped)) == 1 else f"rounds {min(stopped)} to {max(stopped)}"
        print(f"\n{interruption.signal.name}: stopped {len(stopped)} run(s) after {rounds}.", file=sys.stderr)
    return failed


def _counting(bar: tqdm[Any]) -> Callback:
    """Returns a callback of one run that counts its rounds once, also those of earlier processes, in the progress bar."""
    counted = 0

    def count(line: Line, state: Any) -> None:
        nonlocal counted
        new = max(0, line["round"] - counted)  # Rounds run again after a device ran out of memory.
        bar.update(new)
        counted += new

    return count
