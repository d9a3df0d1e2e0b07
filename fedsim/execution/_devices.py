"""Making every core of a CPU a JAX device."""

from __future__ import annotations

import os
import warnings

import jax

from fedsim import checks


def use_all_cores(devices: int | None = None) -> None:
    """Makes every CPU core a JAX device, so that `Pmap` trains one client per core. Call it before JAX is first used.

    Without effect where JAX uses a GPU or TPU. The command line calls it by itself.

    Args:
      devices: how many devices, default the number of cores this process may use.

    Raises:
      ValueError: ``devices`` is not positive.

    >>> use_all_cores(0)
    Traceback (most recent call last):
    ...
    ValueError: Expected devices >= 1, got devices=0: give a positive whole number.
    """
    if devices is None:
        devices = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks.whole(1, devices=devices)
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() != devices:
            warnings.warn(
                f"JAX had already started with {jax.local_device_count()} device(s), so use_all_cores has no effect: "
                "call it before anything else touches JAX.",
                stacklevel=2,
            )
