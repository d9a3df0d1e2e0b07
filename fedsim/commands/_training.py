"""What `fedsim run` and `fedsim resume` have in common: the devices, and a run or a sweep on them."""

from __future__ import annotations

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
    how: experiment.How | None,
) -> int:  # fmt: skip
    """Trains a run, or a sweep if options have several values or there are several seeds; returns the exit status."""
    use_devices(settings.num_devices)
    result: Any
    if varied or seeds:
        result = sweep(config, settings, varied, seeds or 1, how, table=True)
    else:
        built = experiment.build(config, settings)
        result = run_experiment(built, config, settings, progress=settings.progress, table=True)
    return 128 + result.interrupted if result.interrupted else 0
