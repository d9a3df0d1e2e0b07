"""What commands that train, or read a run, have in common: devices, options of a stored run, and a run or a sweep."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import fedsim
from fedsim import experiment
from fedsim.commands._options import Option, options_of, parse
from fedsim.experiment import How, RunConfig, Settings, run_experiment
from fedsim.experiment.driving import check_trusted, is_sweep, stored_run
from fedsim.sweeps import Differing, Varied, sweep

SWEEP_MODE = Option(
    "execution (speed only)",
    How | None,
    None,
    "How the runs of a sweep run: devices: one at a time on each device; vmap: side by side; sequential: one at a time on all "
    "devices; default: devices on a CPU, vmap on a GPU or TPU.",
)


def use_devices(count: int | None = None) -> None:
    """Makes JAX use this number of devices, by default all cores of a CPU, unless JAX has started already."""
    with warnings.catch_warnings():
        # If JAX has started already, the caller has chosen its devices.
        warnings.simplefilter("ignore", UserWarning)
        fedsim.use_all_cores(count)


def options_of_stored_run(
    folder: str, arguments: list[str], options: Mapping[str, Option], program: str, about: str
) -> tuple[dict[str, Any], Settings]:
    """Returns the options of a command that reads a run, and how it is executed; the defaults are those of the run.

    Args:
      folder: of the run.
      arguments: those after the folder.
      options: of the command, with ``trust``.
      program, about: for the help.

    Raises:
      SystemExit: after ``--help``, or for wrong options.
      ValueError: there is no run, or its configuration names code and is not trusted.
    """
    stored = {"settings": {}} if is_sweep(folder) else experiment.read_config(folder)
    names = "execution", "devices", "mesh", "lanes", "example_storage", "deterministic"
    speed = {name: option for name, option in options_of(Settings, stored["settings"]).items() if name in names}
    chosen = parse(options | speed, arguments, program, about)  # type: ignore[operator]
    if "hyperparameters" in stored.get("config", {}):
        stored_run(folder, stored)
    if "config" in stored and not chosen["trust"]:
        check_trusted(folder, stored)
    settings = Settings(**{name: chosen.pop(name) for name in speed})
    use_devices(settings.num_devices)
    return chosen, settings


def connected(settings: Settings, processes: Mapping[str, Any]) -> Settings:
    """Makes JAX use the devices of the settings, and those of other processes if there are any.

    Args:
      settings: of the run. Their number of devices is that of all processes together.
      processes: the values of `PROCESSES`.

    Returns:
      The settings, with the folder of process 0.
    """
    count, number = settings.num_devices, processes["num_processes"] or 1
    if count is not None and count % number:
        raise ValueError(
            f"Expected the same number of devices in each of {number} processes, got {count}: use a multiple of {number}."
        )
    use_devices(None if count is None else count // number)
    addresses = {name: value for name, value in processes.items() if name != "distributed"}
    if not processes["distributed"] and set(addresses.values()) == {None}:
        return settings
    fedsim.distributed.initialize(**addresses)
    if not fedsim.distributed.is_first():
        warnings.simplefilter("ignore")  # Process 0 says the same.
    return dataclasses.replace(settings, folder=fedsim.distributed.from_first(settings.folder))


def train(
    config: RunConfig, settings: Settings, varied: Varied,
    seeds: int | Sequence[int] | None, how: experiment.How | None, differing: Differing = (),
) -> int:  # fmt: skip
    """Trains a run, or a sweep if options have several values or there are several seeds; returns the exit status."""
    result: Any
    if varied or seeds:
        result = sweep(config, settings, varied, seeds or 1, how, table=True, differing=differing)
    else:
        built = experiment.build(config, settings)
        result = run_experiment(built, config, settings, progress=settings.progress, table=True)
    return 128 + result.interrupted if result.interrupted else 0
