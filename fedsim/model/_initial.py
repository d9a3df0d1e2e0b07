"""Parameters from named arrays: arrays are renamed, compared with the parameters of a model, and converted to their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.model._parts import named
from fedsim.names import did_you_mean

Init = Callable[[jax.Array], Any]


def init_with(init: Init, values: Mapping[str, np.ndarray]) -> Init:
    """Returns an ``init`` that returns these values in place of the parameters with their names.

    >>> init = init_with(lambda key: {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(1)}, {"w": np.ones(2, np.float32)})
    >>> init(jax.random.key(0))["w"].tolist()
    [1.0, 1.0]
    """

    @jax.jit  # The values are arguments and not constants of this program, which draws only what it returns.
    def replaced(key: jax.Array, values: Mapping[str, jax.Array]) -> Any:
        drawn = init(key)
        leaves = [values.get(name, x) for name, x in named(drawn)]
        return _in_order(jax.tree.unflatten(jax.tree.structure(drawn), leaves), drawn)

    # The arrays are copied, because the result may be donated.
    return lambda key: replaced(key, {name: jnp.array(value) for name, value in values.items()})


def _in_order(a: Any, like: Any) -> Any:
    """Returns a pytree whose dicts have the order of those of another one. `fedsim.transfer` reads it, and JAX sorts keys."""
    return {key: _in_order(a[key], value) for key, value in like.items()} if isinstance(like, dict) else a


def renamed(arrays: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns arrays under new names.

    Args:
      arrays: by name.
      names: old and new names, see `fedsim.Model.starting_from`.

    Raises:
      ValueError: see there.

    >>> renamed({"encoder/w": 1, "head/w": 2, "b": 3}, {"encoder/*": "body/*", "head/*": ""})
    {'body/w': 1, 'b': 3}
    >>> renamed({"encoder/w": 1}, {"encodr/*": "body/*"})
    Traceback (most recent call last):
    ...
    ValueError: Expected names to name arrays, got 'encodr/*', which matches none. Did you mean 'encoder/w'? The arrays are \
encoder/w.
    """
    for old, new in names.items():
        if old.count("*") > 1 or (new and new.count("*") != old.count("*")):
            raise ValueError(
                f"Expected old and new names with at most one * in each, got {old}={new}: write encoder/*=body/*, or head/*= "
                "to leave arrays out."
            )
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    unused = dict.fromkeys(names)
    for name, array in arrays.items():
        new = name
        for old, pattern in names.items():
            start, star, end = old.partition("*")
            inside = name.removeprefix(start).removesuffix(end)
            if name == start + inside + end and bool(star) >= bool(inside):
                unused.pop(old, None)
                new = pattern.replace("*", inside)
                break
        if name and not new:  # One array alone has the name "".
            continue
        if new in result:
            raise ValueError(
                f"Expected different new names, got {new!r} for {origin[new]!r} and {name!r}: leave one out with '{name}='."
            )
        result[new], origin[new] = array, name
    for old in unused:
        raise ValueError(
            f"Expected names to name arrays, got {old!r}, which matches none.{did_you_mean(old, arrays)} The arrays are "
            f"{', '.join(arrays)}."
        )
    return result


def fitted(arrays: Mapping[str, Any], whole: Any, *, partly: bool) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Returns the arrays that a model has parameters for, in the dtypes of these.

    Args:
      arrays: by name.
      whole: the parameters, of arrays or ``jax.ShapeDtypeStruct``.
      partly: whether some parameters may have no array, and some arrays no parameter.

    Returns:
      The arrays; the names of parameters without an array; the names of arrays without a parameter.

    Raises:
      ValueError: see `fedsim.Model.starting_from`.

    >>> whole = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}
    >>> fitted({"w": np.ones(2)}, whole, partly=True)[1:]
    (['b'], [])
    >>> fitted({"w": np.ones(3), "b": np.int32(0), "c": np.ones([])}, whole, partly=False)
    Traceback (most recent call last):
    ...
    ValueError: The arrays do not fit the parameters of the model:
      b: int32 [], the model has float32 []
      w: float64 [3], the model has float32 [2]
      c: float64 [], the model has no such parameter
    Rename arrays (old name = new name), leave them out (old name = nothing), or give partly=True (--init-partly).
    """
    params = dict(named(whole))
    missing, extra = [name for name in params if name not in arrays], [name for name in arrays if name not in params]
    found = {name: np.asarray(arrays[name]) for name in params if name in arrays}
    # A float of any precision is converted; anything else must have the dtype of the parameter.
    wrong = [
        f"{name}: {_form(value)}, the model has {_form(params[name])}"
        for name, value in found.items()
        if value.shape != params[name].shape
        or (value.dtype != params[name].dtype and not (_is_float(value) and _is_float(params[name])))
    ]
    if not partly:
        wrong += [f"{name}: there is none, the model has {_form(params[name])}" for name in missing]
        wrong += [f"{name}: {_form(np.asarray(arrays[name]))}, the model has no such parameter" for name in extra]
    if wrong:
        raise ValueError(
            "The arrays do not fit the parameters of the model:\n  "
            + "\n  ".join(wrong)
            + "\nRename arrays (old name = new name), leave them out (old name = nothing), or give partly=True (--init-partly)."
        )
    if not found:
        raise ValueError(
            f"Expected arrays for parameters of the model, got none of them: the arrays are {', '.join(arrays)}, and the "
            f"parameters are {', '.join(params)}. Give the arrays other names (old name = new name)."
        )
    with np.errstate(over="ignore"):  # It is found below.
        values = {name: value.astype(params[name].dtype) for name, value in found.items()}
    for name, value in values.items():
        if _is_float(value) and not np.isfinite(value).all():
            raise ValueError(
                f"Expected finite parameters, got NaN or an infinity in {name}, whose dtype is {found[name].dtype} in the file "
                f"and {value.dtype} in the model: start from other values."
            )
    return values, missing, extra


def _form(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
