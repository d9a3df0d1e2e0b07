"""What programs run on: every core of a CPU made a JAX device, and all devices of a mesh side by side."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from fedsim import checks

# XLA ends the process where a CPU device waits for another in an all-reduce for 40 seconds, as one does whose last client is
# long, or which gets no time on a busy machine.
_PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}

_GPUS = {"gpu", "cuda", "rocm"}  # what `jax.Device.platform` calls them, or may
_IN_ONE_ORDER = "xla_gpu_deterministic_ops"


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


def compiled(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donated: int | None = None
) -> Callable[..., Any]:
    """``function``, compiled, on all devices of a mesh side by side; of its ``donated`` argument the memory is used again.

    On a GPU XLA times several forms of a product and takes the fastest, and lets some sums add up in the order in which
    threads come. So no seed would repeat a run: of a CNN, accuracies differed in the third digit from the first round on. What
    it takes here adds up in one order, whoever compiles, unless ``XLA_FLAGS`` say something of that themselves. On an H200,
    with jax 0.11.2 (a7e55b7, 2026-11-26), that takes 1.1 to 1.3 of the time of a dense model's rounds, and 1.33 of a CNN's.
    """
    # check_vma asks that replicated outputs be proven so; the loops' bounds differ by device, which it cannot follow.
    function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if mesh.devices.flat[0].platform not in _GPUS or _IN_ONE_ORDER in os.environ.get("XLA_FLAGS", ""):
        return jax.jit(function, donate_argnums=donated)
    return jax.jit(function, donate_argnums=donated, compiler_options={_IN_ONE_ORDER: True})
