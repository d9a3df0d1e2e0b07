"""The statistics of a model's metrics: their shapes, checked, and their sums over examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.metrics import Mean, Sparse, per_example
from fedsim.metrics._statistics import is_sparse
from fedsim.model import Model, Params

Statistics = dict[str, Any]

# Any number of examples has the same trailing shapes. This one is a prime that is not the size of another axis by chance.
_NUM_EXAMPLES = 7919


def statistics(model: Model, params: Params, examples: Mapping[str, jax.Array]) -> Statistics:
    """Returns each metric's statistic of a batch, whose leaves have the leading axis ``[n]`` or are `Sparse`."""
    outputs = model.apply_for_eval(params, examples)
    found = {name: metric(examples, outputs) for name, metric in model.metrics.items()}
    return {name: per_example(value) if _is_array(value) else value for name, value in found.items()}


def sum_forms(model: Model, params: Params, columns: Mapping[str, Any]) -> Statistics:
    """Returns the shapes and dtypes of the statistics' sums over examples, from a trace of the model without computing it.

    Args:
      model: has ``apply_for_eval`` and ``metrics``.
      params: the parameters, or their shapes.
      columns: the examples' features, ``[any, ...]``, or their shapes.

    Raises:
      ValueError: a metric does not return an array ``[n]`` or a statistic with one entry per example.
    """
    examples = {name: jax.ShapeDtypeStruct((_NUM_EXAMPLES, *x.shape[1:]), x.dtype) for name, x in columns.items()}
    outputs = jax.eval_shape(model.apply_for_eval, params, examples)
    forms = {}
    for name, metric in model.metrics.items():
        form = jax.eval_shape(metric, examples, outputs)
        _check(name, form)
        form = jax.eval_shape(per_example, form) if _is_array(form) else form
        forms[name] = jax.tree.map(_sum_form, form, is_leaf=is_sparse)
    return forms


def add_by_client(sums: Any, statistic: Any, mask: jax.Array, client: jax.Array) -> Any:
    """Adds the statistic of a batch to the sums of the examples' clients.

    Args:
      sums: the sums, leaves ``[clients, ...]``, where those of `Sparse` leaves are flat: ``[clients, size]``.
      statistic: leaves ``[n, ...]`` or `Sparse`.
      mask: which examples count, ``bool [n]``.
      client: each example's client, ``int32 [n]``.
    """

    def add(leaf: Any, total: jax.Array) -> jax.Array:
        if is_sparse(leaf):
            return total.at[client[:, None], leaf.index].add(_masked(leaf.values, mask))
        return total.at[client].add(_masked(leaf, mask))

    return jax.tree.map(add, statistic, sums, is_leaf=is_sparse)


def add_batch(sums: Any, statistic: Any, mask: jax.Array) -> Any:
    """Adds the statistic of a batch to the sums ``[...]`` of one client."""

    def add(leaf: Any, total: jax.Array) -> jax.Array:
        if is_sparse(leaf):
            return total.reshape(-1).at[leaf.index].add(_masked(leaf.values, mask)).reshape(total.shape)
        return total + jnp.sum(_masked(leaf, mask), axis=0)

    return jax.tree.map(add, statistic, sums, is_leaf=is_sparse)


def flat_zeros(forms: Any, clients: int) -> Any:
    """Returns zero sums of all clients for `add_by_client`."""
    return jax.tree.map(lambda form: jnp.zeros((clients, *_flat(form.shape)), form.dtype), forms)


def in_shape(forms: Any, sums: Any) -> Any:
    """Returns the sums of `add_by_client` in their shapes, leaves ``[clients, ...]``."""
    return jax.tree.map(lambda form, total: total.reshape(len(total), *form.shape), forms, sums)


def wide(dtype: Any) -> Any:
    """Returns the dtype in which the host adds sums of this dtype."""
    return np.float32 if np.issubdtype(dtype, np.floating) else np.int64


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (int(np.prod(shape)),) if shape else ()


def _masked(values: Any, mask: jax.Array) -> jax.Array:
    """Returns the values, in ``float32`` or ``int32``, and 0 for examples that do not count, whatever their values are."""
    values = jnp.asarray(values)
    return jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values.astype(_accumulator(values.dtype)), 0)


def _accumulator(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _sum_form(leaf: Any) -> jax.ShapeDtypeStruct:
    if is_sparse(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, _accumulator(leaf.values.dtype))
    return jax.ShapeDtypeStruct(leaf.shape[1:], _accumulator(leaf.dtype))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _check(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless a metric's value has one entry per example. Its leaves are shapes."""
    if _is_array(value):
        if value.shape != (_NUM_EXAMPLES,):
            raise ValueError(
                f"Metric {name!r} returned an array of shape {_text(value.shape)}, where n is the number of examples. "
                f"Expected is shape [n], one number per example. {_remedy(value.shape)}"
            )
        return
    # Not hasattr(value, "weight"): a property cannot be computed from shapes.
    has_weight = hasattr(type(value), "weight") or "weight" in getattr(value, "__dict__", ())
    if not has_weight or not callable(getattr(value, "result", None)):
        raise ValueError(
            f"Metric {name!r} returned a {type(value).__name__}. Expected is an array [n] with one number per example, or a "
            "statistic such as fedsim.metrics.Mean(total, weight)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_sparse):
        field = f"{type(value).__name__}{jax.tree_util.keystr(path)}"
        if is_sparse(leaf):
            if not leaf.index.shape == leaf.values.shape == (_NUM_EXAMPLES, *leaf.index.shape[1:2]):
                raise ValueError(
                    f"Metric {name!r} returned {field} with index {_text(leaf.index.shape)} and values "
                    f"{_text(leaf.values.shape)}. Expected is shape [n, m] for both. Construct it by fedsim.metrics.Sparse.of."
                )
        elif leaf.shape[:1] != (_NUM_EXAMPLES,) or leaf.shape[1:] == (1,):
            raise ValueError(
                f"Metric {name!r} returned {field} of shape {_text(leaf.shape)}, where n is the number of examples. "
                f"Expected is shape [n], one number per example. {_remedy(leaf.shape)}"
            )
    if isinstance(value, Mean) and _form(value.total) != _form(value.weight):
        raise ValueError(
            f"Metric {name!r} returned a Mean with total {_text(_form(value.total))} and weight {_text(_form(value.weight))}. "
            "Expected are equal shapes. Use fedsim.metrics.per_example(values) for equal weights."
        )


def _form(leaf: Any) -> tuple[int, ...]:
    return (_NUM_EXAMPLES, *leaf.shape) if isinstance(leaf, Sparse) else tuple(leaf.shape)


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('n' if size == _NUM_EXAMPLES else str(size) for size in shape)}]"


def _remedy(shape: tuple[int, ...]) -> str:
    if shape == ():
        return "Return the value of every example and leave the mean over examples to the evaluation."
    if shape[:1] != (_NUM_EXAMPLES,):
        return "Return one value for every example, in the order of the examples."
    if shape[1:] == (1,):
        return "Drop the last axis, for example by values[:, 0]."
    return "Sum or average over the other axes, or return a fedsim.metrics.Mean with leaves [n, ...] for a result per entry."
