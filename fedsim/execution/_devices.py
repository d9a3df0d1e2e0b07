"""The devices that programs run on."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import jax
from jax.sharding import Mesh

from fedsim import checks

# By default XLA ends the process if a CPU device waits 40 seconds for another one in an all-reduce. This can happen if the last
# client of a device takes long, or on a busy machine.
_TIMEOUT_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}

# Chips along each axis of the machines that have all chips of a topology; otherwise libtpu assumes machines with 2x2 chips.
_ONE_MACHINE = {
    f"{kind}:{shape}": (*sizes, 1) for kind in ("v5e", "v6e") for shape, sizes in {"1x1": (1, 1), "2x4": (2, 4)}.items()
}

_GPUS = {"gpu", "cuda", "rocm"}  # names of platforms


def use_all_cores(devices: int | None = None) -> None:
    """Makes every CPU core a JAX device, so that `Pmap` trains one client per core. Call it before JAX is first used.

    It has no effect if JAX uses a GPU or TPU. The command line calls it. It also sets ``XLA_FLAGS`` such that CPU devices wait
    for each other for up to an hour; by default XLA ends the process after 40 seconds.

    Args:
      devices: the number of devices; default: the number of cores that this process may use.

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
    timeouts = [f"--{flag}={seconds}" for flag, seconds in _TIMEOUT_FLAGS.items() if flag not in flags]
    if jax.__version_info__ < (0, 13):  # XLA does not start with flags that it does not know.
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *timeouts])
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() != devices:
            warnings.warn(
                f"JAX had already started with {jax.local_device_count()} device(s), so use_all_cores has no effect: "
                "call it before JAX is first used.",
                stacklevel=2,
            )


def is_gpu(mesh: Mesh) -> bool:
    """Returns whether these devices are GPUs.

    >>> is_gpu(Mesh(jax.devices()[:1], ("devices",))) == (jax.default_backend() == "gpu")
    True
    """
    return mesh.devices.flat[0].platform in _GPUS


def first_devices(count: int | None = None) -> tuple[jax.Device, ...]:
    """Returns devices of all processes, equally many of each.

    Args:
      count: how many; None: all.

    Raises:
      ValueError: there are fewer, or the processes cannot have equally many.

    >>> first_devices() == tuple(jax.devices())
    True
    """
    everything, processes = jax.devices(), jax.process_count()
    if count is None:
        return tuple(everything)
    if count > len(everything):
        raise ValueError(
            f"Expected at most {len(everything)} devices, which JAX has, got devices={count}. Use fewer, or on a CPU call "
            f"fedsim.use_all_cores({-(-count // processes)}) before JAX is first used."
        )
    each, rest = divmod(count, processes)
    if rest:
        raise ValueError(
            f"Expected the same number of devices in each of {processes} processes, got devices={count}: use a multiple of "
            f"{processes}."
        )
    return tuple(device for process in range(processes) for device in jax.local_devices(process)[:each])


def described_tpus(topology: str) -> tuple[jax.Device, ...]:
    """Returns descriptions of the chips of a TPU, for which `fedsim.plan` and `Jit.lower` compile rounds without a TPU.

    The compiler is libtpu: the file that the environment variable ``TPU_LIBRARY_PATH`` names; else that in the folder
    ``tpu-compiler`` of the virtual environment, where ``make test-all`` installs it, because JAX looks for a TPU if it finds it
    among the other packages; else one among these.

    Args:
      topology: the generation and the number of chips along each axis, such as ``"v5e:4x8"`` or ``"v5p:4x4x4"``.

    Raises:
      ValueError: there is no libtpu, or it knows no such topology.

    >>> described_tpus("eight")
    Traceback (most recent call last):
    ...
    ValueError: Expected a generation and a shape, got topology='eight': use 'v5e:4x8' or 'v5p:4x4x4', for example.
    """
    from jax.experimental import topologies

    if ":" not in topology:
        raise ValueError(
            f"Expected a generation and a shape, got topology={topology!r}: use 'v5e:4x8' or 'v5p:4x4x4', for example."
        )
    beside = Path(sys.prefix, "tpu-compiler", "libtpu", "libtpu.so")
    if beside.exists():
        os.environ.setdefault("TPU_LIBRARY_PATH", str(beside))
    # Otherwise libtpu looks for a TPU on this machine and for other processes that use it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        machines = {"chips_per_host_bounds": _ONE_MACHINE[topology]} if topology in _ONE_MACHINE else {}
        return tuple(topologies.get_topology_desc(topology, platform="tpu", **machines).devices)
    except RuntimeError as error:  # JAX's own errors are of this class, too.
        raise ValueError(
            f"Expected a topology that libtpu knows, got topology={topology!r} ({error}): install libtpu by "
            f"`pip install --target {beside.parent.parent} libtpu` if it is missing, or use 'v5e:4x8', for example."
        ) from error
