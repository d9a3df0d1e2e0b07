"""``fedsim run``: trains and evaluates, and writes metrics, checkpoints and a picture to a run folder."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

from fedsim import datasets, distributed
from fedsim.commands._configuration import configured
from fedsim.commands._listing import print_task
from fedsim.commands._options import PROCESSES
from fedsim.commands._training import connected, train
from fedsim.experiment import RunConfig, Settings
from fedsim.names import parse_call
from fedsim.pinned_files import unpinned
from fedsim.sweeps import Differing


def main(arguments: list[str]) -> int:
    """Runs ``fedsim run`` with these arguments and returns the exit status."""
    about = (
        "Train, evaluate, and write metrics, checkpoints and a picture to a run folder. For example: fedsim run --dataset "
        "digits --algorithm scaffold --rounds 50."
    )
    config, settings, varied, seeds, how, processes, differing, _ = configured(arguments, "fedsim run", about, PROCESSES)
    settings = with_folder(config, settings, differing, is_sweep=bool(varied or seeds))
    settings = connected(settings, processes)
    is_single = "dataset" not in (differing[0][0] if differing else ())
    if settings.progress and is_single and datasets.is_file(config.dataset) and distributed.is_first():
        print_task(datasets.describe(config.drawn_dataset))
    return train(config, settings, varied, seeds, how, differing)


def with_folder(config: RunConfig, settings: Settings, differing: Differing = (), *, is_sweep: bool = False) -> Settings:
    """Returns the settings with a new run folder, whose name says what is trained and when it began."""
    if settings.folder is not None:
        return settings
    several = {name: {names[name] for names, _ in differing if name in names} for name in ("dataset", "algorithm")}
    parts = [f"{len(values)}-{name}s" if values else _short(getattr(config, name)) for name, values in several.items()]
    name = "-".join([*parts, *(["sweep"] if is_sweep else []), time.strftime("%Y%m%d-%H%M%S")])
    folders = (Path("runs") / f"{name}{suffix}" for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
    return dataclasses.replace(settings, folder=str(next(folder for folder in folders if not folder.exists())))


def _short(text: str) -> str:
    """Returns the name of a dataset or an algorithm without its options, of a file without its folder."""
    name = parse_call(text)[0].rpartition(":")[2].lower()
    return unpinned(name).stem if datasets.is_file(text) else name
