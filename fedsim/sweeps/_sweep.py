"""`sweep`: runs of a configuration with several values of some numbers and several seeds, each in its own run folder."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from fedsim import distributed, rng
from fedsim.configuration import Experiment, How, RunConfig, Settings, build_members, python_numbers
from fedsim.durable_files import replace_text, writing
from fedsim.experiment import read_sweep
from fedsim.experiment.driving import (
    Interruption,
    LossMonitor,
    Run,
    RunFolder,
    arguments_of,
    code_change,
    code_of,
    imported_modules,
    resume_command,
    sweep_file,
    write_signed,
)
from fedsim.samplers import checked_cohort
from fedsim.sweeps._grid import listed_seeds, listed_settings, named
from fedsim.sweeps._lockstep import run_groups
from fedsim.sweeps._result import SweepMember, SweepResult, csv_of, with_result
from fedsim.sweeps._ways import Job, chosen_way, ways

# Pairs of some varied values, and the fields that differ with them; see `sweep`.
Differing: TypeAlias = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
# The values of each varied field, of which all combinations run, or the settings themselves.
Varied: TypeAlias = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


def sweep(
    config: RunConfig,
    settings: Settings,
    varied: Varied,
    seeds: int | Sequence[int] = 1,
    how: How | None = None,
    table: bool | None = None,
    differing: Differing = (),
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
      varied: fields of `RunConfig` and hyperparameters of the algorithm, with the values to try, of which all combinations run;
        or a sequence of settings, such as those of `drawn_settings`.
      seeds: the seeds; a number n means n seeds from ``config.seed`` on.
      how: ``"vmap"`` runs as many members side by side on each device as its memory allows, ``"devices"`` one member at a time
        on each device, and ``"sequential"`` one member at a time on all devices; see `fedsim.population`. None is what the
        folder's ``sweep.json`` has recorded, and in a new folder ``"devices"`` on a CPU and ``"vmap"`` otherwise. Members that
        cannot run in this way run sequentially, and a warning gives the reason.
      table: whether to print the table on stdout; None prints it if ``settings.progress`` is true.
      differing: pairs of some varied values, such as ``{"algorithm": "fedprox"}``, and the fields of `RunConfig` that members
        with these values have instead of those of ``config``, such as ``{"hyperparameters": {"mu": 0.1}}``.

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
    if any("seed" in names for names in ([varied] if isinstance(varied, Mapping) else varied)):
        raise ValueError("Expected seeds in seeds, got seed in varied: pass seeds=[...].")
    folder = Path(settings.folder)
    continued = f"To continue the sweep: {resume_command(folder)}"
    members = members_of(folder, config, varied, chosen_seeds, differing)
    experiments = build_members([own for _, own in members], settings)
    for (member, _), experiment in zip(members, experiments, strict=True):
        with named(member.name):
            experiment.algorithm.check(experiment.sampler.data)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as locked:
        distributed.in_first(lambda: locked.enter_context(RunFolder(folder).lock()))
        imported = {id(module): module for _, own in members for module in imported_modules(own)}
        code = code_of(*(experiment[:2] for experiment in experiments), *imported.values())
        new = {"config": dataclasses.asdict(config), "varied": _plain(varied), "seeds": chosen_seeds}
        new |= {"differing": [list(map(python_numbers, pair)) for pair in differing]} if differing else {}
        distributed.check_alike({"sweep": json.loads(json.dumps(new)), "code": dict(code)}, "configuration")
        way = distributed.from_first(
            distributed.in_first(lambda: _initialize(folder, new, settings, how, code)) or "sequential"
        )
        groups = ways(_jobs(members, experiments, settings), way, alike=False)
        with Interruption() as interruption, distributed.losses_named(lambda: continued):
            failed = run_groups(groups, settings.progress, interruption)
        finished = [
            with_result(member, LossMonitor.of(experiment.algorithm))
            for (member, _), experiment, is_finished in zip(members, experiments, _are_finished(members), strict=True)
            if is_finished
        ]
        stopped = interruption.signal if len(finished) + len(failed) < len(members) else None
        result = SweepResult(
            members=finished, folder=folder, interrupted=stopped, varied=_plain(varied) if isinstance(varied, Mapping) else None
        )
        distributed.in_first(lambda: _write_tables(result))
    failures = f"{len(failed)} of {len(members)} runs failed. {folder / 'table.txt'} has the {len(finished)} that finished."
    failures = "\n  ".join([failures, *failed.values()])
    if failed and not stopped:
        raise FloatingPointError(failures)
    if not distributed.is_first():
        pass  # Process 0 says the same.
    elif stopped:
        if failed:
            print(failures, file=sys.stderr)
        print(f"The sweep ended after {len(finished)} of {len(members)} runs.", file=sys.stderr)
        print(continued, file=sys.stderr)
    elif settings.progress if table is None else table:
        print(
            f"{len(members)} runs of {config.rounds} rounds: the last evaluation, mean ± standard deviation over seeds\n\n"
            f"{result.table()}\n\nwall time  {time.perf_counter() - began:.1f} s\nwritten    {folder}/\n"
            f"             {sweep_file(folder).name}, members.csv, table.txt\n"
            f"             {len(members)} run folders: {members[0][0].folder.name}/, ..."
        )
    return result


def members_of(
    folder: str | Path,
    config: RunConfig,
    varied: Varied,
    seeds: Sequence[int],
    differing: Differing = (),
) -> list[tuple[SweepMember, RunConfig]]:
    """Returns the members of a sweep, each with its own configuration.

    >>> [(member, own)] = members_of("s", RunConfig(), {"clip": [0.5]}, [3])
    >>> member.name, own.clip, own.seed
    ('clip=0.5,seed=3', 0.5, 3)
    """
    fields = {field.name for field in dataclasses.fields(RunConfig)} - {"hyperparameters"}
    members = []
    for setting, seed in itertools.product(map(python_numbers, listed_settings(varied)), seeds):
        member = SweepMember(setting=setting, seed=seed, folder=Path(folder))
        member = dataclasses.replace(member, folder=member.folder / _file_name(member.name))
        chosen = [values for names, values in differing if names.items() <= setting.items()]
        own_config = dataclasses.replace(config, **{name: value for values in chosen for name, value in values.items()})
        general = {name: value for name, value in setting.items() if name in fields}
        own = {**own_config.hyperparameters, **{name: value for name, value in setting.items() if name not in fields}}
        with named(member.name):
            members.append((member, dataclasses.replace(own_config, **general, seed=seed, hyperparameters=own)))
    names = collections.Counter(member.folder for member, _ in members)
    return [
        (member if names[member.folder] == 1 else dataclasses.replace(member, folder=_hashed(member)), own)
        for member, own in members
    ]


def _write_tables(result: SweepResult) -> None:
    replace_text(result.folder / "members.csv", csv_of(result))
    replace_text(result.folder / "table.txt", result.table() + "\n")


def _plain(varied: Varied) -> Any:
    """Returns what JSON can hold."""
    if isinstance(varied, Mapping):
        return {name: list(map(python_numbers, values)) for name, values in varied.items()}
    return list(map(python_numbers, varied))


def _file_name(name: str) -> str:
    """Returns a name of a folder: texts without what file systems do not allow, and with a hash if they are long.

    >>> _file_name("algorithm=fedavg,seed=0"), _file_name("dataset=mnist(partition='iid'),seed=0")
    ('algorithm=fedavg,seed=0', 'dataset=mnist(partition=iid),seed=0')
    """
    short = re.sub(r"[^\w.,=()+-]+", "", re.sub(r"[^,=]*[/\\]", "", name))
    return short if len(short) <= 150 else f"{short[:130]}-{_hash(name)}"


def _hashed(member: SweepMember) -> Path:
    """Returns another folder for a member whose name differs from that of another one in what folders' names lack."""
    return member.folder.with_name(f"{member.folder.name[:130]}-{_hash(member.name)}")


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _initialize(folder: Path, content: Mapping[str, Any], settings: Settings, how: How | None, code: Mapping[str, str]) -> How:
    """Writes ``sweep.json``, or checks that an existing one is of the same sweep. Returns how the members run."""
    new = json.loads(json.dumps(content))
    stored = read_sweep(folder)
    if stored is None and RunFolder(folder).config.exists():
        raise ValueError(f"The folder {folder} holds a run and not a sweep: choose another folder.")
    if stored is not None:
        others = ("varied", "seeds", "differing")
        entries = [sweep["config"] | {name: sweep.get(name) for name in others} for sweep in (new, stored)]
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


def _jobs(members: Sequence[tuple[SweepMember, RunConfig]], experiments: Sequence[Experiment], settings: Settings) -> list[Job]:
    """Returns what is to run: all members, or none if all are finished."""
    finished = _are_finished(members)
    if all(finished):
        return []
    jobs = []
    for (member, own), experiment, is_finished in zip(members, experiments, finished, strict=True):
        with named(member.name):
            first = checked_cohort(experiment.sampler, 0)
            job = Job(
                name=member.name,
                algorithm=experiment.algorithm,
                like=jax.eval_shape(experiment.algorithm.init, rng.stream(first.key, "init")),
                widest=first,
                rounds=own.rounds,
                data=[data for data in (first.data, experiment.test_data, experiment.validation_data) if data is not None],
                start=functools.partial(_start, member, own, experiment, settings),
                is_finished=is_finished,
            )
        jobs.append(job)
    return jobs


def _are_finished(members: Sequence[tuple[SweepMember, RunConfig]]) -> list[bool]:
    """Returns which members have all rounds, as process 0 sees their folders."""
    return distributed.from_first([RunFolder(member.folder).is_finished(own) for member, own in members])


def _start(member: SweepMember, config: RunConfig, experiment: Experiment, settings: Settings) -> Run:
    """Returns the run of a member, which continues what its folder has."""
    arguments = arguments_of(experiment, config, dataclasses.replace(settings, folder=str(member.folder)))
    return Run(experiment.algorithm, experiment.sampler, evaluate=None, callbacks=[], **arguments)
