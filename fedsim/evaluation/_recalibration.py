"""Recalibration: the running statistics of a client's own examples in place of those of training.

Y. Li, N. Wang, J. Shi, J. Liu, X. Hou, "Revisiting batch normalization for practical domain adaptation" (AdaBN), 2016:
https://arxiv.org/abs/1603.04779, replaces the statistics of batch normalization by those of another domain (Algorithm 1) and
leaves the parameters as they are. Here each client is a domain, as its examples are read batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng, tree
from fedsim.data import Batch, Batches
from fedsim.model import Model, ModelParts, Params, scope_of
from fedsim.rounds import Client, kept_with

_ROUNDING = 1e-6  # of a decay that is 1


def batches_of_pass(batches: Batches) -> Batches:
    """Returns one pass over the examples in batches of the same size.

    >>> batches_of_pass(Batches(size=20, steps=3)).num_steps(50)
    3
    """
    return Batches(size=batches.size, shuffle=batches.shuffle, drop_remainder=batches.drop_remainder)


def recalibrated(model: Model, whole: Params, client: Client, batches: Batches) -> Params:
    """Returns a model with the statistics of a client's examples, as they are when it trains with its parameters.

    A running statistic after a batch is ``a old + (1 - a) x``, where ``x`` is the statistic of the batch. The new statistic is
    the mean of ``x`` over the batches, weighted by their numbers of examples. A batch that leaves it as it is (``a = 1``) does
    not count.

    Args:
      model: has running statistics; see `check_recalibration`.
      whole: all parts of the model.
      client: the client. Without batches, the statistics stay.
      batches: one pass, see `batches_of_pass`.
    """
    old = _statistics(model, whole)
    zeros = jax.tree.map(jnp.zeros_like, old)

    def add(sums: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
        after, decay = _average(lambda before: _after(model, whole, before, batch), zeros)
        count = jnp.sum(batch.mask, dtype=jnp.float32)
        share = jax.tree.map(lambda a: jnp.where(1 - a > _ROUNDING, 1 - a, 0), decay)
        weight = jax.tree.map(lambda s: jnp.where(s > 0, count, 0), share)
        of_batch = jax.tree.map(lambda x, s: x / jnp.where(s > 0, s, 1), after, share)
        total = jax.tree.map(lambda sum_, w, x: sum_ + w * x, sums[0], weight, of_batch)
        return total, tree.add(sums[1], weight)

    total, weight = client.for_each_batch(batches, add, (zeros, zeros), "recalibration")
    mean = jax.tree.map(lambda x, sum_, w: jnp.where(w > 0, sum_ / jnp.where(w > 0, w, 1), x), old, total, weight)
    return tree.merge(tree.masked(whole, like=old, inverted=True), mean)


def check_recalibration(model: Model) -> None:
    """Raises ``ValueError`` unless the model has running statistics, all of which are averages as in `recalibrated`.

    >>> import fedsim
    >>> check_recalibration(fedsim.models.digits_dense())
    Traceback (most recent call last):
    ...
    ValueError: Expected a model with running statistics, got recalibrate=True for one without: leave it out, or normalize \
by batches, as in fedsim.models.resnet8(norm='batch').
    """
    if not {"statistics", "own_statistics"} & set(jax.tree.leaves(model.roles)):
        raise ValueError(
            "Expected a model with running statistics, got recalibrate=True for one without: leave it out, or normalize by "
            "batches, as in fedsim.models.resnet8(norm='batch')."
        )
    kept = kept_with(model)
    if "averages" in kept:
        return
    whole = model.init_whole(rng.root(0))
    draw = np.random.default_rng(0)

    def any_like(x: Any) -> jax.Array:
        return jnp.asarray(draw.uniform(-1, 1, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x, x.dtype)

    examples = {name: any_like(x) for name, x in model.dummy_examples(2).items()}
    batch = Batch(examples, jnp.ones(2, bool), rng.root(0), jnp.int32(0))
    drawn = jax.tree.map(any_like, _statistics(model, whole))
    zeros = jax.tree.map(jnp.zeros_like, drawn)

    def after(before: Any) -> Any:
        return _after(model, whole, before, batch)

    (first, decay), found = jax.jit(lambda before: (_average(after, zeros), after(before)))(drawn)
    expected = jax.tree.map(lambda x, a, old: x + a * old, first, decay, drawn)
    for (path, a), x, y in zip(
        jax.tree_util.tree_leaves_with_path(decay), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        if not (np.allclose(x, y, 1e-4, 1e-4) and np.all((a > -1e-4) & (a < 1 + 1e-4))):
            raise ValueError(
                "Expected running statistics that are averages over batches, a * old + (1 - a) * new, got "
                f"{jax.tree_util.keystr(path, simple=True, separator='/')}, which is none: leave out recalibrate=True."
            )
    kept["averages"] = True


def _average(after: Callable[[Any], Any], zeros: Any) -> tuple[Any, Any]:
    """Returns ``(1 - a) x`` and ``a`` for a function of ``old`` that returns ``a old + (1 - a) x``, see `recalibrated`.

    ``a`` is the quotient of differences, because networks may stop the derivative. XLA computes what does not depend on ``old``
    once.
    """
    first = after(zeros)
    step = jax.tree.map(lambda x: 1 + jnp.abs(x), first)  # as large as the result, so that rounding does not matter
    return first, jax.tree.map(lambda x, y, d: (y - x) / d, first, after(step), step)


def _statistics(model: Model, whole: Params) -> Any:
    """Returns the running statistics, with None in place of other leaves."""
    return jax.tree.map(lambda role, x: x if role in ("statistics", "own_statistics") else None, model.roles, whole)


def _after(model: Model, whole: Params, before: Any, batch: Batch) -> Any:
    """Returns the running statistics after a batch in training, from those before it, with None in place of other leaves."""
    params = jax.tree.map(lambda role, x: x if role == "params" else None, model.roles, whole)
    others = jax.tree.map(lambda role, x: x if role in ("frozen", "kept") else None, model.roles, whole)
    with scope_of(ModelParts(frozen=others, statistics=before), batch.mask) as scope:
        model.apply_for_train(params, batch.examples, batch.key)
    return jax.tree.map(lambda old, x: x.astype(old.dtype), before, tree.masked(scope.new, like=before))
