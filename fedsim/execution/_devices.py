"""Making every core of a CPU a JAX device."""

from __future__ import annotations

import os
import warnings

import jax

from fedsim import checks

# XLA ends the process where a CPU device waits for another in an all-reduce for 40 seconds, as one does whose last client is
# long, or which gets no time on a busy machine.
_PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}


def use_all_cores(devices: int | None = None) -> None:
    """Makes every CPU core a JAX device, so that `Pmap` trains one client per core. Call it before JAX is first used.

    Without effect where JAX uses a GPU or TPU. The command line calls it by itself. Devices then wait for each other for up to
    an hour, and not for 40 seconds, after which XLA would end the process (by ``XLA_FLAGS``, unless it says something of that).

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
    flags = os.environ.get("XLA_FLAGS", "")
    patience = [f"--{flag}={seconds}" for flag, seconds in _PATIENCE.items() if flag not in flags]
    if jax.__version_info__ < (0, 13):  # XLA starts with no flag that it does not know.
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *patience])
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() != devices:
            warnings.warn(
                f"JAX had already started with {jax.local_device_count()} device(s), so use_all_cores has no effect: "
                "call it before anything else touches JAX.",
                stacklevel=2,
            )
