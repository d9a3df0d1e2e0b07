"""`check_rounds`: whether a run may go on with another number of rounds, with the result of one that began with them."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedsim.configuration import RunConfig, Settings, algorithm_class, build
from fedsim.experiment._checkpoint import DEPLOYMENT, Checkpoints, Leaves
from fedsim.experiment._folder import RunFolder
from fedsim.names import parse_call
from fedsim.systems import Schedule, ScheduledSampler


def check_rounds(paths: RunFolder, old: RunConfig, new: RunConfig, settings: Settings) -> None:
    """Raises ``ValueError`` if the finished rounds of a run would have been others with the new number of rounds.

    Args:
      paths: the folder of the run.
      old: its configuration.
      new: the same with another number of rounds.
      settings: how the run is executed.

    >>> from pathlib import Path
    >>> check_rounds(RunFolder(Path("no such folder")), RunConfig(rounds=10), RunConfig(rounds=20), Settings())
    """
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
    if parse_call(old.client_schedule)[0] in ("linear", "cosine"):
        raise ValueError(
            f"client_schedule={old.client_schedule!r} depends on the number of rounds, so the {finished} finished rounds had "
            f"other learning rates than in a run of {new.rounds} rounds: {remedy}."
        )
    if old.dp_epsilon is not None:
        raise ValueError(
            f"dp_epsilon={old.dp_epsilon:g} is that of {old.rounds} rounds, so the {finished} finished rounds had other noise "
            f"than in a run of {new.rounds} rounds: {remedy}. A run with --dp-noise can have any number of rounds."
        )
    if old.noise_kind not in ("independent", "distributed"):
        raise ValueError(
            f"dp_mechanism={old.dp_mechanism!r} correlates the noise of {old.rounds} rounds, so the privacy of {new.rounds} "
            f"rounds is not known: {remedy}."
        )
    if any(field.name == "rounds" for field in dataclasses.fields(algorithm_class(old.algorithm))):
        raise ValueError(
            f"The algorithm {old.algorithm!r} has a field rounds, so its {finished} finished rounds may have depended on it: "
            f"{remedy}."
        )
    if old.clock_options and not (paths.path / DEPLOYMENT).exists():  # The events of a deployment are not known beforehand.
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
