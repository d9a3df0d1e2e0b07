"""The devices that programs run on, and how programs are compiled for them."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from fedsim import checks

# By default XLA ends the process if a CPU device waits 40 seconds for another one in an all-reduce. This can happen if the last
# client of a device takes long, or on a busy machine.
_TIMEOUT_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}

_GPUS = {"gpu", "cuda", "rocm"}  # names of platforms
_DETERMINISTIC = "xla_gpu_deterministic_ops"


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


def compiled(
    function: Callable[..., Any],
    mesh: Mesh,
    specs: tuple[Any, Any] | None,
    donated: int | None = None,
    deterministic: bool = False,
) -> Callable[..., Any]:
    """Compiles a function for all devices of a mesh.

    On a GPU, XLA times several implementations of a product and uses the fastest, and some sums depend on the order in which
    threads finish. So runs with the same seed differ unless the program is compiled as ``deterministic``. On an H100 with jax
    0.11.2 (2026-11-26) a round of a CNN then takes 1.3 to 1.5 times as long, so it is an option. On a CPU or a TPU, runs with
    the same seed are always equal.

    Args:
      function: the function to compile.
      mesh: the devices.
      specs: how arguments and results are divided over the devices, each of which runs the function on its share, see
        `jax.shard_map`; None if the function gets whole arrays.
      donated: the index of an argument whose memory may be reused.
      deterministic: for a GPU; ``XLA_FLAGS`` take precedence if they set this.
    """
    if specs is None:
        function = _without_shardings(function)
    elif mesh.size > 1:
        in_specs, out_specs = specs
        # check_vma cannot prove that results are equal on all devices, because the bounds of loops differ between devices.
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if not deterministic or not is_gpu(mesh) or _DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
        return jax.jit(function, donate_argnums=donated)
    return jax.jit(function, donate_argnums=donated, compiler_options={_DETERMINISTIC: True})


def _without_shardings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, traced as if its arguments were on no particular devices.

    Otherwise the types of traced values name the mesh, and JAX (0.10 to 0.12) refuses to index such a value inside a
    `jax.shard_map` that closes over it.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)), args)
        jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
        return jax.tree.unflatten(jax.tree.structure(results), jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))

    return run


def is_gpu(mesh: Mesh) -> bool:
    """Returns whether these devices are GPUs.

    >>> is_gpu(Mesh(jax.devices()[:1], ("devices",))) == (jax.default_backend() == "gpu")
    True
    """
    return mesh.devices.flat[0].platform in _GPUS
