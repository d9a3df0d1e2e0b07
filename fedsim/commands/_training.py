"""What `fedsim run` and `fedsim resume` have in common: the devices, and a run or a sweep on them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import fedsim
from fedsim import experiment
from fedsim.experiment import RunConfig, Settings, run_experiment
from fedsim.sweeps import sweep


def use_devices(count: int | None = None) -> None:
    """Makes JAX use this number of devices, by default all cores of a CPU, unless JAX has started already."""
    with warnings.catch_warnings():
        # If JAX has started already, the caller has chosen its devices.
        warnings.simplefilter("ignore", UserWarning)
        fedsim.use_all_cores(count)


def train(
    config: RunConfig, settings: Settings, varied: Mapping[str, Sequence[Any]], seeds: int | Sequence[int] | None,
    how: experiment.How | None, processes: Mapping[str, Any],
) -> int:  # fmt: skip
    """Trains a run, or a sweep if options have several values or there are several seeds; returns the exit status."""
    if any(value is not None and value is not False for value in processes.values()):
        if varied or seeds:
            raise ValueError("Expected a single run in several processes, got several values or seeds: start one run for each.")
        settings = _shared(settings, **processes)
    else:
        use_devices(settings.num_devices)
    result: Any
    if varied or seeds:
        result = sweep(config, settings, varied, seeds or 1, how, table=True)
    else:
        built = experiment.build(config, settings)
        result = run_experiment(built, config, settings, progress=settings.progress, table=True)
    return 128 + result.interrupted if result.interrupted else 0


def _shared(settings: Settings, *, distributed: bool, num_processes: int | None, **given: Any) -> Settings:
    """Connects this process with the others; returns the settings, with the folder of process 0."""
    count = settings.num_devices
    if count is not None and num_processes is not None and count % num_processes:
        raise ValueError(
            f"Expected the same number of devices in each of {num_processes} processes, got {count} devices: use a multiple of "
            f"{num_processes}."
        )
    use_devices(None if count is None else count // (num_processes or 1))
    fedsim.distributed.initialize(num_processes=num_processes, **given)
    if not fedsim.distributed.is_first():
        warnings.simplefilter("ignore")  # Process 0 says the same.
    return dataclasses.replace(settings, folder=fedsim.distributed.from_first(settings.folder))
