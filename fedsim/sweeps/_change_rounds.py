"""`change_rounds`: another number of rounds for a run or a sweep in a folder, with the result of one that began with them."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from fedsim import checks
from fedsim.configuration import Settings
from fedsim.experiment import read_config, read_sweep
from fedsim.experiment.driving import RunFolder, check_rounds, rewrite, stored_run, sweep_file
from fedsim.sweeps._grid import named
from fedsim.sweeps._sweep import members_of


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

    >>> change_rounds("no such folder", 20, Settings())
    Traceback (most recent call last):
    ...
    ValueError: There is no run in no such folder: cannot read no such folder/config.json (FileNotFoundError).
    """
    checks.whole(1, rounds=rounds)
    sweep = read_sweep(folder)
    stored = sweep or read_config(folder)
    config, _ = stored_run(folder, stored)
    of_sweep = (sweep["varied"], sweep["seeds"], sweep.get("differing", ())) if sweep else None
    members = members_of(folder, config, *of_sweep) if of_sweep else [(None, config)]
    if sweep and len({own.rounds for _, own in members}) > 1:
        raise ValueError(f"The runs of {folder} differ in their rounds: continue one of them with --rounds {rounds}.")
    with contextlib.ExitStack() as locks:
        changed = []
        for member, own in members:
            paths = RunFolder(member.folder if member else Path(folder))
            with named(member.name) if member else contextlib.nullcontext():
                if paths.config.exists():
                    locks.enter_context(paths.lock())
                    changed.append((paths.config, read_config(paths.path)))
                    check_rounds(paths, own, dataclasses.replace(own, rounds=rounds), settings)
        if sweep:  # It comes last: until then, the same command changes what it has not changed yet.
            locks.enter_context(RunFolder(Path(folder)).lock())
            changed.append((sweep_file(folder), sweep))
        for path, content in changed:
            new = {**content, "config": {**content["config"], "rounds": rounds}}
            # What somebody else wrote gets no signature here: only its sweep may have been checked.
            rewrite(path, new, content)
