"""`change_rounds`: another number of rounds for a run or a sweep in a folder, with the result of one that began with them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np

from fedsim import checks
from fedsim.configuration import RunConfig, Settings, algorithm_class, build
from fedsim.durable_files import replace_text
from fedsim.experiment._checkpoint import Checkpoints, Leaves
from fedsim.experiment._folder import RunFolder, lock, read_config, stored_run
from fedsim.experiment._lockstep import named
from fedsim.experiment._sweep import members_of, read_sweep, sweep_file
from fedsim.experiment._trust import is_signed, signed
from fedsim.systems import Schedule, ScheduledSampler


def change_rounds(folder: str | Path, rounds: int, settings: Settings) -> None:
    """Changes the number of rounds in ``config.json`` of a run, or in that of all runs of a sweep and in ``sweep.json``.

    The run can then be continued, and ends with the bits of a run that had this number of rounds from the start.

    Args:
      folder: the folder of the run or the sweep.
      rounds: the new number of rounds.
      settings: how the run is executed.

    Raises:
      ValueError: more rounds are finished; or what the run did in its finished rounds depends on the number of rounds: its
        learning rate, its algorithm or the events of its virtual clock. Then nothing is changed.
    """
    checks.whole(1, rounds=rounds)
    sweep = read_sweep(folder)
    stored = sweep or read_config(folder)
    config, _ = stored_run(folder, stored)
    members = members_of(folder, config, sweep["varied"], sweep["seeds"]) if sweep else [(None, config)]
    if sweep and "rounds" in sweep["varied"]:
        raise ValueError(f"The runs of {folder} differ in their rounds: continue one of them with --rounds {rounds}.")
    with contextlib.ExitStack() as locks:
        changed = []
        for member, own in members:
            paths = RunFolder(member.folder if member else Path(folder))
            with named(member.name) if member else contextlib.nullcontext():
                if paths.config.exists():
                    locks.enter_context(lock(paths.path))
                    changed.append((paths.config, read_config(paths.path)))
                    _check(paths, own, dataclasses.replace(own, rounds=rounds), settings)
        if sweep:  # It comes last: until then, the same command changes what it has not changed yet.
            locks.enter_context(lock(Path(folder)))
            changed.append((sweep_file(folder), sweep))
        for path, content in changed:
            new = {**content, "config": {**content["config"], "rounds": rounds}}
            # What somebody else wrote gets no signature here: only its sweep may have been checked.
            replace_text(path, json.dumps(signed(new) if is_signed(content) else new, indent=2) + "\n")


def _check(paths: RunFolder, old: RunConfig, new: RunConfig, settings: Settings) -> None:
    """Raises ``ValueError`` if the finished rounds of a run would have been others with the new number of rounds."""
    finished = max(Checkpoints(paths.checkpoints).rounds(), default=0)
    if new.rounds < finished:
        raise ValueError(
            f"Expected rounds >= {finished}, the finished rounds of {paths.path}, got rounds={new.rounds}: give at least as "
            "many, or start a new run in another folder."
        )
    if not finished or old.rounds == new.rounds:
        return
    remedy = (
        f"start a new run with {new.rounds} rounds in another folder (fedsim run --from {paths.path} --rounds {new.rounds})"
    )
    if old.client_schedule in ("linear", "cosine"):
        raise ValueError(
            f"client_schedule={old.client_schedule!r} depends on the number of rounds, so the {finished} finished rounds had "
            f"other learning rates than in a run of {new.rounds} rounds: {remedy}."
        )
    if any(field.name == "rounds" for field in dataclasses.fields(algorithm_class(old.algorithm))):
        raise ValueError(
            f"The algorithm {old.algorithm!r} has a field rounds, so its {finished} finished rounds may have depended on it: "
            f"{remedy}."
        )
    if old.clock_options:
        experiments = build(old, settings), build(new, settings)
        if all(isinstance(experiment.sampler, ScheduledSampler) for experiment in experiments):
            some, others = (experiment.sampler.schedule for experiment in experiments)  # type: ignore[attr-defined]
            _check_events(some, others, finished, Checkpoints(paths.checkpoints)._read(finished), remedy)


def _check_events(old: Schedule, new: Schedule, finished: int, saved: Leaves, remedy: str) -> None:
    """Raises ``ValueError`` if the events of the finished rounds differ, or if later ones need models that were not saved."""
    some, others = (
        [column[:finished] for column in schedule.steps]
        + [column[schedule.updates.step < finished] for column in schedule.updates]
        for schedule in (old, new)
    )
    if not all(map(np.array_equal, some, others)):
        raise ValueError(f"The events of the {finished} finished rounds depend on the number of rounds: {remedy}.")
    past = [leaf.reshape(len(leaf), -1).view(np.uint8) for name, leaf in saved.items() if name.startswith(".past")]
    # A run that was continued with more rounds before has zeros in place of the models that it did not save.
    kept = [
        round
        for round in range(max(0, finished - len(past[0])), finished)
        if any(np.any(leaf[round % len(leaf)]) for leaf in past)
    ]
    started = new.updates.version[new.updates.step >= finished]
    missing = set(started[started < finished].tolist()) - set(kept)
    if missing:
        raise ValueError(
            f"With more rounds, a client answers that started from the model after {min(missing)} rounds, which the run "
            f"has not saved: {remedy}."
        )
