"""The statistics of a model's metrics: their shapes, checked, and their sums over examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import distributed
from fedsim.metrics import Mean, Metric, Sparse, is_sparse, per_example
from fedsim.model import Model, Params
from fedsim.tree import compensated_add

Statistics = dict[str, Any]

BLOCK = 256  # the number of examples whose sums are added to those of the clients at a time
_GROUP = 16

# Any number of examples has the same trailing shapes. This one is a prime that is not the size of another axis by chance.
_NUM_EXAMPLES = 7919


def statistics(model: Model, params: Params, examples: Mapping[str, jax.Array]) -> Statistics:
    """Returns each metric's statistic of a batch, whose leaves have the leading axis ``[n]`` or are `Sparse`."""
    outputs = model.apply_for_eval(params, examples)
    return {name: _statistic(model, metric, examples, outputs) for name, metric in model.metrics.items()}


def _statistic(model: Model, metric: Metric, examples: Mapping[str, jax.Array], outputs: Any) -> Any:
    """Returns the statistic of a metric that may return an array. If it computes the model's loss, lower values are better."""
    value = _as_statistic(metric(examples, outputs))
    if isinstance(value, Mean) and value.better is None and _computes_loss(model, metric, examples, outputs):
        return Mean(*value, better="lower")
    return value


def _as_statistic(value: Any) -> Any:
    return per_example(value) if _is_array(value) else value


def _computes_loss(model: Model, metric: Metric, examples: Mapping[str, jax.Array], outputs: Any) -> bool:
    """Returns whether a metric is the mean of the model's loss, whatever its name: both are the same program."""

    def program(values: Callable[..., Any]) -> str:
        return str(jax.make_jaxpr(lambda *arguments: tuple(_as_statistic(values(*arguments))))(examples, outputs))

    try:
        return program(metric) == program(model.loss)
    except Exception:  # A loss may need other outputs, those of training, and fail for these in any way.
        return False


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
        form = jax.eval_shape(functools.partial(_statistic, model, metric), examples, outputs)
        forms[name] = jax.tree.map(_sum_form, form, is_leaf=is_sparse)
    return forms


def add_by_client(sums: Any, statistic: Any, mask: jax.Array, rank: jax.Array) -> Any:
    """Adds the statistic of a batch to the sums of the examples' clients.

    Args:
      sums: those of `flat_zeros`.
      statistic: leaves ``[n, ...]`` or `Sparse`.
      mask: which examples count, ``bool [n]``.
      rank: each example's client, ``int32 [n]``, as its position among those with examples. The examples that count are in the
        order of the clients, without gaps, so the clients of a block are adjacent rows of the sums.
    """
    blocks = -(-len(mask) // BLOCK)
    if blocks == 1:
        return _add_block(sums, statistic, mask, rank)

    def divided(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, blocks * BLOCK - len(x)), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(blocks, BLOCK, *x.shape[1:])

    every = jax.tree.map(divided, (statistic, mask, rank))
    return jax.lax.scan(lambda sums, block: (_add_block(sums, *block), None), sums, every)[0]


def _add_block(sums: Any, statistic: Any, mask: jax.Array, rank: jax.Array) -> Any:
    rows = len(mask)
    row, place = jnp.arange(rows, dtype=jnp.int32), jnp.clip(rank - rank[0], 0, rows - 1)

    def add(leaf: Any, total: jax.Array) -> jax.Array:
        values = _masked(leaf.values if is_sparse(leaf) else leaf, mask)
        if not _is_float(total):
            if is_sparse(leaf):
                return total.at[rank[:, None], leaf.index].add(values)
            return total.at[rank].add(values.reshape(rows, *total.shape[1:]))
        if is_sparse(leaf):
            of_block = jnp.zeros((rows, *total.shape[2:]), total.dtype).at[place[:, None], leaf.index].add(values)
        else:  # Sums of few examples are added to each client's sum of the block, so that rounding errors do not add up.
            groups = -(-rows // _GROUP)
            parts = jnp.zeros((rows * groups, *values.shape[1:]), total.dtype).at[place * groups + row // _GROUP].add(values)
            of_block = jnp.sum(parts.reshape(rows, groups, *total.shape[2:]), axis=1)
        before = jax.lax.dynamic_slice_in_dim(total, rank[0], rows, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total, _add_to_pair(before, of_block), rank[0], axis=1)

    return jax.tree.map(add, statistic, sums, is_leaf=is_sparse)


def add_batch(sums: Any, statistic: Any, mask: jax.Array) -> Any:
    """Adds the statistic of a batch to the sums of one client, which are those of `zeros`."""

    def add(leaf: Any, total: jax.Array) -> jax.Array:
        shape = total.shape[1:] if _is_float(total) else total.shape
        if is_sparse(leaf):
            none = jnp.zeros(int(np.prod(shape)), total.dtype)
            of_batch = none.at[leaf.index].add(_masked(leaf.values, mask)).reshape(shape)
        else:
            of_batch = _pairwise_sum(_masked(leaf, mask))
        return _add_to_pair(total, of_batch) if _is_float(total) else total + of_batch

    return jax.tree.map(add, statistic, sums, is_leaf=is_sparse)


def _add_to_pair(pair: jax.Array, term: jax.Array) -> jax.Array:
    """Adds ``float32 [...]`` to a sum and what its rounding lost, ``float32 [2, ...]``."""
    return jnp.stack(compensated_add(pair[0], pair[1], term))


def _pairwise_sum(values: jax.Array) -> jax.Array:
    """Returns the sum over the first axis. Its rounding errors grow only with the logarithm of the number of values."""
    while len(values) > 1:
        half = len(values) // 2
        values = jnp.concatenate([values[:half] + values[half : 2 * half], values[2 * half :]])
    return jnp.sum(values, axis=0, dtype=values.dtype)


def flat_zeros(forms: Any, clients: int) -> Any:
    """Returns zero sums of all clients for `add_by_client`, flat leaves ``[clients + BLOCK, size]``, or ``[clients + BLOCK]``;
    of floats, as for `zeros`, with a first axis of 2.

    `BLOCK` further rows let the last clients begin a block.
    """
    return zeros(jax.tree.map(lambda form: jax.ShapeDtypeStruct((clients + BLOCK, *_flat(form.shape)), form.dtype), forms))


def zeros(forms: Any) -> Any:
    """Returns zero sums of these shapes; those of floats have a first axis of 2, for the sums and what their rounding lost."""
    return jax.tree.map(lambda form: jnp.zeros((2, *form.shape) if _is_float(form) else form.shape, form.dtype), forms)


def in_shape(forms: Any, sums: Any) -> Any:
    """Returns the sums of `add_by_client` in their shapes, not flat."""
    return jax.tree.map(lambda form, total: total.reshape(*total.shape[: 1 + _is_float(total)], *form.shape), forms, sums)


def on_host(sums: Any) -> Any:
    """Returns sums of leaves ``[n, ...]``, of floats ``[n, 2, ...]``, as ``int64 [n, ...]`` and ``float64 [n, ...]``."""

    def wide(total: np.ndarray) -> np.ndarray:
        return total.sum(1, dtype=np.float64) if _is_float(total) else total.astype(np.int64)

    return jax.tree.map(wide, distributed.on_host(sums))


def of_all_clients(sums: Any, present: np.ndarray) -> Any:
    """Returns sums for all clients, ``[clients, ...]``, from those of the clients where ``present [clients]`` is True."""

    def spread(total: np.ndarray) -> np.ndarray:
        everyone = np.zeros((len(present), *total.shape[1:]), total.dtype)
        everyone[present] = total[: np.count_nonzero(present)]
        return everyone

    return jax.tree.map(spread, sums)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (int(np.prod(shape)),) if shape else ()


def _masked(values: Any, mask: jax.Array) -> jax.Array:
    """Returns the values, in ``float32`` or ``int32``, and 0 for examples that do not count, whatever their values are."""
    values = jnp.asarray(values)
    return jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values.astype(_accumulator(values.dtype)), 0)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


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
        field = f"{'Mean' if isinstance(value, Mean) else type(value).__name__}{jax.tree_util.keystr(path)}"
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
