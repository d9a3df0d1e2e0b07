"""`pipelined`: layers in stages that work on different parts of a batch at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks


def pipelined(stage: Callable[[Any, Any], Any], params: Any, inputs: Any, *, microbatches: int, remat: bool = True) -> Any:
    """Applies stages one after another, each to one microbatch while the next stage works on the one before: GPipe.

    The result and its gradient are those of a plain loop over the stages. If the first axis of the parameters is divided over
    the ``model`` axis of `fedsim.Sharded`, every device has one stage and sends what it computes to the next one. With ``p``
    stages and ``m`` microbatches there are ``m + p - 1`` steps, in ``p - 1`` of which a stage has nothing to do: the part
    ``(p - 1) / (m + p - 1)`` of the time. For the gradient, a stage stores its ``m + p - 1`` inputs of a microbatch.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.

    Args:
      stage: ``(params of a stage, inputs) -> outputs``, where outputs have the form of inputs. What all stages need, such as
        masks, is a part of both.
      params: leaves ``[p, ...]``.
      inputs: of the first stage, leaves ``[n, ...]``.
      microbatches: ``m``, a divisor of ``n``.
      remat: whether the gradient computes what is inside of a stage again, and only its inputs are stored.

    Returns:
      The outputs of the last stage, leaves ``[n, ...]``.

    Raises:
      ValueError: the sizes do not fit, or outputs have another form than inputs.

    >>> def stage(w, x): return jnp.tanh(x @ w)
    >>> w, x = jnp.full((3, 2, 2), 0.5), jnp.arange(8.0).reshape(4, 2)
    >>> y = pipelined(stage, w, x, microbatches=2)
    >>> bool(jnp.allclose(y, stage(w[2], stage(w[1], stage(w[0], x)))))
    True
    """
    checks.whole(1, microbatches=microbatches)
    checks.truth(remat=remat)
    stages, rows = _size("params", params), _size("inputs", inputs)
    if rows % microbatches:
        raise ValueError(
            f"Expected microbatches to divide the {rows} rows of a batch, got microbatches={microbatches}: use a divisor."
        )
    parts = jax.tree.map(lambda x: x.reshape(microbatches, rows // microbatches, *x.shape[1:]), inputs)
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    one = jax.eval_shape(stage, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params), part)
    got, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), of) for of in (one, part))
    if got != expected:
        raise ValueError(f"Expected the outputs of a stage to have the form of its inputs, {expected}, got {got}.")
    of_all = jax.vmap(jax.checkpoint(stage) if remat else stage)

    def step(outputs: Any, t: jax.Array) -> tuple[Any, Any]:
        def entering(part: jax.Array, before: jax.Array) -> jax.Array:
            # After the last microbatch, the first stage computes what nobody reads.
            new = part[jnp.minimum(t, microbatches - 1)]
            return jnp.roll(before, 1, axis=0).at[0].set(new)

        outputs = of_all(params, jax.tree.map(entering, parts, outputs))
        return outputs, jax.tree.map(lambda x: x[-1], outputs)

    # Before the first microbatch arrives, a stage computes values that are not used. At zeros, such as a mask of False, their
    # derivative could be NaN.
    first = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (stages, *x.shape[1:])), parts)
    _, last = jax.lax.scan(step, first, jnp.arange(microbatches + stages - 1))
    return jax.tree.map(lambda x: x[stages - 1 :].reshape(rows, *x.shape[2:]), last)


def _size(name: str, values: Any) -> int:
    """Returns the size of the first axis of all leaves."""
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(values)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(f"Expected leaves of {name} with one size of the first axis, got the sizes {sorted(sizes)}.")
    return sizes.pop()[0]
