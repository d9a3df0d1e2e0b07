"""Networks that compute in half precision, with parameters, outputs and losses in float32.

P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, https://arxiv.org/abs/1710.03740. Here the
scale of the loss is constant.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import numpy as np

from fedsim import checks, tree

# Of the network in half precision that is being computed; None outside of one.
_LOSS_SCALE: contextvars.ContextVar[float | None] = contextvars.ContextVar("loss_scale", default=None)


def as_output(value: Any) -> Any:
    """Returns a value from inside of a network as the network would return it, for losses that read it beside the outputs.

    If the network is computed by `fedsim.Model.with_precision`, the value is converted to float32, and its gradient is scaled
    like that of the outputs. In other networks it stays as it is.

    >>> import jax.numpy as jnp
    >>> seen = []
    >>> def apply(params, examples):
    ...     seen.extend([params["w"], as_output(params["w"])])
    ...     return params["w"]
    >>> _ = in_precision(apply, "float16", None)({"w": jnp.float32(1)}, {})
    >>> [str(value.dtype) for value in seen]
    ['float16', 'float32']
    """
    loss_scale = _LOSS_SCALE.get()
    return value if loss_scale is None else _scale_gradient(_cast(value, "float32"), loss_scale)


def in_precision(apply: Callable[..., Any], compute: str, loss_scale: float | None) -> Callable[..., Any]:
    """Returns ``apply(params, examples, *key)`` with parameters, examples and outputs of Haiku modules in another dtype.

    Modules whose names end in "Norm" compute in float32, because a mean over many values loses too much in half precision.

    Args:
      apply: the function, whose outputs must be of the dtype ``compute`` then.
      compute: "bfloat16" or "float16".
      loss_scale: a factor of the gradient inside of the network, by which the gradient of the parameters is divided; None: 1024
        in float16, whose smallest numbers are otherwise larger than many values of a gradient, and 1 in bfloat16.

    Raises:
      ValueError: the function computes in another dtype nevertheless (when it is called).
    """
    checks.one_of("bfloat16", "float16", compute=compute)
    if loss_scale is None:
        loss_scale = 1024.0 if compute == "float16" else 1.0
    checks.positive(loss_scale=loss_scale)
    half, single = (functools.partial(_cast, dtype=dtype) for dtype in (compute, "float32"))

    def intercept(next_f: Callable, args: tuple, kwargs: dict[str, Any], context: hk.MethodContext) -> Any:
        if context.method_name != "__call__":
            return next_f(*args, **kwargs)
        if not type(context.module).__name__.endswith("Norm"):
            return next_f(*half(args), **half(kwargs))
        with hk.custom_getter(lambda next_getter, value, _: single(next_getter(value))):
            return half(next_f(*single(args), **single(kwargs)))

    @functools.wraps(apply)
    def computed(params: Any, examples: Any, *key: jax.Array) -> Any:
        params = half(_scale_gradient(params, 1 / loss_scale))
        token = _LOSS_SCALE.set(loss_scale)
        try:
            with hk.intercept_methods(intercept):
                outputs = apply(params, half(dict(examples)), *key)
        finally:
            _LOSS_SCALE.reset(token)
        other = {str(leaf.dtype) for leaf in jax.tree.leaves(outputs) if tree.is_float(leaf)} - {compute}
        if other:
            raise ValueError(
                f"Expected a network whose outputs are {compute} if its parameters and inputs are, got "
                f"{', '.join(sorted(other))}: remove what converts values inside of the network, or use the means of its "
                "library, such as dtype arguments."
            )
        return _scale_gradient(single(outputs), loss_scale)

    return computed


def _cast(a: Any, dtype: str) -> Any:
    """Returns a pytree with its arrays of floats in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if isinstance(x, jax.Array | np.ndarray) and tree.is_float(x) else x, a)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scale_gradient(a: Any, factor: float) -> Any:
    """Returns ``a``, with ``factor`` times its gradient."""
    return a


def _scaled(factor: float, _: None, gradient: Any) -> tuple[Any]:
    # Integers that a network returns have a gradient without a value.
    return (jax.tree.map(lambda g: g if g.dtype == jax.dtypes.float0 else g * factor, gradient),)


_scale_gradient.defvjp(lambda a, factor: (a, None), _scaled)
