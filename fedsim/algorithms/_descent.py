"""Checks that optax optimizers descend, to find a learning rate of the wrong sign before the first round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim.model import Model, Params

# At least one of this many first steps must be nonzero. A warm-up may start with learning rate 0.
_WARM_UP = 100


def check_descent(model: Model, *, may_be_zero: bool = False, **optimizers: optax.GradientTransformation) -> None:
    """Raises ``ValueError`` if an optimizer ascends, returns NaN or another form of update, or does not move.

    The error names the first such optimizer.

    The learning rate of an optax transformation cannot be read. Instead, the optimizer takes steps from parameters that are 0,
    with gradients that are 1. Its first nonzero step must not increase any parameter. One of the first hundred steps must be
    nonzero, because a warm-up may start with learning rate 0. With ``may_be_zero``, only the first step counts, and may be 0.

    Updates must have the structure, shapes and dtypes of the parameters, and states those of the initial state. Otherwise the
    loop over batches could not be compiled.

    The checked step is half of the difference between the steps for gradients 1 and -1, in which noise cancels. The parameters
    have the names of the model's parameters, but every array has only one element.

    >>> import fedsim
    >>> check_descent(fedsim.models.digits_logistic(), server_optimizer=optax.sgd(-0.5))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected server_optimizer to descend, got a mean change of +0.5 in its first step for a gradient of ones. ...
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    zeros, up, down = (jax.tree.map(lambda x, v=v: jnp.full((1,) * x.ndim, v, x.dtype), params) for v in (0, 1, -1))

    def step(optimizer: optax.GradientTransformationExtraArgs, slope: Params, state: Any) -> tuple[Params, Any]:
        def loss(params: Params) -> jax.Array:  # for optimizers that need it: Polyak steps, line searches
            return 1 + jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(jax.tree.map(jnp.multiply, slope, params))]))

        return optimizer.update(slope, state, zeros, value=jnp.float32(1), grad=slope, value_fn=loss)

    for name, optimizer in optimizers.items():
        optimizer = optax.with_extra_args_support(optimizer)
        start = state_up = state_down = optimizer.init(zeros)
        for i in range(1 if may_be_zero else _WARM_UP):
            along, state_up = step(optimizer, up, state_up)
            against, state_down = step(optimizer, down, state_down)
            if i == 0:
                _check_form(name, "updates", "the parameters", along, zeros)
                _check_form(name, "a state", "the state that its init returns", state_up, start)
            change = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.mean(a - b) / 2, along, against))
            if any(isinstance(x, jax.core.Tracer) for x in change):  # The learning rate is traced, as under jax.grad.
                return
            increases = np.array([float(x) for x in change])
            if np.any(increases) or may_be_zero:
                break
        is_zero = not np.any(increases)
        if not np.all(increases <= 0) or (is_zero and not may_be_zero):
            steps = f"{_WARM_UP} steps" if is_zero else "step"
            raise ValueError(
                f"Expected {name} to descend, got a mean change of {increases.max() + 0.0:+.3g} in its first {steps} for a "
                "gradient of ones. Use a positive learning rate."
            )


def _check_form(name: str, what: str, like: str, result: Any, expected: Any) -> None:
    """Raises ``ValueError`` unless both have one structure, with the same shapes and dtypes."""

    def form(a: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", a)

    structures: list[Any] = [jax.tree.structure(result), jax.tree.structure(expected)]
    if structures[0] != structures[1] or form(result) != form(expected):
        raise ValueError(
            f"Expected the update of {name} to return {what} with the structure, shapes and dtypes of {like}, "
            f"{form(expected)}, got {form(result)}. Check the optimizer's update function."
        )
