"""``fedsim run``: trains and evaluates, and writes metrics, checkpoints and a picture to a run folder."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from fedsim.commands._configuration import configured
from fedsim.commands._options import PROCESSES
from fedsim.commands._training import connected, train
from fedsim.names import parse_call


def main(arguments: list[str]) -> int:
    """Runs ``fedsim run`` with these arguments and returns the exit status."""
    about = "Train, evaluate, and write metrics, checkpoints and a picture to a run folder."
    config, settings, varied, seeds, how, processes = configured(arguments, "fedsim run", about, PROCESSES)
    if settings.folder is None:
        parts = [parse_call(part)[0].rpartition(":")[2].lower() for part in (config.dataset, config.algorithm)]
        name = "-".join([*parts, *(["sweep"] if varied or seeds else []), time.strftime("%Y%m%d-%H%M%S")])
        settings = dataclasses.replace(settings, folder=str(Path("runs") / name))
    return train(config, connected(settings, processes), varied, seeds, how)
