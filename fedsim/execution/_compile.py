"""`compiled`: a function compiled for devices. Functions that compile to the same text share one executable."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from fedsim.execution._devices import is_gpu
from fedsim.execution._placement import AXIS, shardings_of
from fedsim.model import WHOLE, Division

_DETERMINISTIC = "xla_gpu_deterministic_ops"
# Settings of JAX that change the program of a function, or how it is run.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
# How the text of a program says that it calls a Python function, as `jax.debug.print` and `jax.pure_callback` do.
_CALLS_OF_PYTHON = ("callback", "stablehlo.send", "stablehlo.recv")
_MOST_EXECUTABLES = 128


def compiled(
    function: Callable[..., Any],
    mesh: Mesh,
    specs: tuple[Any, Any] | None,
    donated: int | None = None,
    deterministic: bool = False,
    division: Division = WHOLE,
) -> CompiledFunction:
    """Compiles a function for all devices of a mesh, when it is first called.

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
      division: how those results are divided that have the name or the shape of a model's parameter.

    Returns:
      A function of the same arguments. Its method ``lower`` lowers it for arguments, without a call.

    >>> import fedsim
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh, share = fedsim.Auto().mesh(), P("devices")  # all devices; each doubles its share of the array
    >>> double = compiled(lambda x: 2 * x, mesh, specs=((share,), share))
    >>> double(jnp.ones(mesh.size)).tolist() == [2.0] * mesh.size, double.num_executables
    (True, 1)
    """
    if specs is None:
        function = _without_shardings(function)
    elif mesh.shape[AXIS] > 1:
        in_specs, out_specs = specs
        # check_vma cannot prove that results are equal on all devices, because the bounds of loops differ between devices.
        # Axes that divide a client's model or batch are left to XLA.
        function = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
        )
    if division.parameters:
        function = _with_shardings(function, mesh, division)
    options = {}
    if deterministic and is_gpu(mesh) and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        options[_DETERMINISTIC] = True
    return CompiledFunction(function, mesh, donated, options)


def settings_of_jax() -> tuple[Any, ...]:
    """Returns the settings of JAX that a trace depends on."""
    return tuple(getattr(jax.config, name, None) for name in _SETTINGS)


class CompiledFunction:
    """A jitted function whose executables are shared with all functions that compile to the same text.

    Tracing a function is the only way to know what it computes: it may read globals, attributes of modules, or the environment.
    So every function is traced, and what is looked up is the executable, by the text that JAX lowers the trace to.

    Args:
      function: a function of pytrees of arrays.
      mesh: the devices.
      donated: see `compiled`.
      options: for the compiler.
    """

    def __init__(self, function: Callable[..., Any], mesh: Mesh, donated: int | None, options: dict[str, bool]) -> None:
        self._jitted = jax.jit(function, donate_argnums=donated, compiler_options=options or None)
        self._options = tuple(mesh.devices.flat), donated, tuple(options.items())
        self._executables: dict[Hashable, Callable[..., Any]] = {}

    @property
    def num_executables(self) -> int:
        """The number of executables that calls have used so far: one for all arguments of equal shapes and places."""
        return len(self._executables)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments of these shapes, see `jax.stages`."""
        return self._jitted.lower(*args)

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if getattr(jax.config, "jax_disable_jit", False):
            return self._jitted(*jax.tree.map(jnp.asarray, args))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._jitted(*args)
        forms = tuple(map(_form, leaves))
        form = structure, forms, settings_of_jax()
        if form not in self._executables:
            self._executables[form] = self._executable(args, forms)
        return self._executables[form](*args)

    def _executable(self, args: Any, forms: tuple[Hashable, ...]) -> Callable[..., Any]:
        traced = self._jitted.trace(*args)
        if len(traced.jaxpr.in_avals) > len(forms):
            # The function reads values of a surrounding trace, of `jax.vmap` for example, of which it is a part.
            return self._jitted
        lowered = traced.lower()
        text = lowered.as_text()
        # The text does not have the Python functions that a program calls, and with the setting it does not have constants.
        calls_python = any(word in text for word in _CALLS_OF_PYTHON)
        if calls_python or getattr(jax.config, "jax_use_simplified_jaxpr_constants", True):
            return lowered.compile()
        digest = hashlib.sha256(text.encode()).digest()
        # The text has no arguments that are not used, but the executable checks the forms of all.
        return _shared((digest, lowered.in_tree, lowered.out_tree, forms, self._options), lowered)


_executables: collections.OrderedDict[Hashable, jax.stages.Compiled] = collections.OrderedDict()


def _shared(key: Hashable, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Returns the executable of a lowered function, compiled now unless one with this key is known."""
    if key not in _executables:
        _executables[key] = lowered.compile()
        if len(_executables) > _MOST_EXECUTABLES:
            _executables.popitem(last=False)
    _executables.move_to_end(key)
    return _executables[key]


def _form(leaf: Any) -> Hashable:
    """Returns what an executable depends on in an argument: shape, dtype and place, and not the value."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def _with_shardings(function: Callable[..., Any], mesh: Mesh, division: Division) -> Callable[..., Any]:
    """Returns the function with results that are divided as ``division`` says, for the next call gets them."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        results = function(*args)
        return jax.lax.with_sharding_constraint(results, shardings_of(results, mesh, division=division))

    return run


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
