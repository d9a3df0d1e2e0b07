"""Whether an optax transformation goes down: a learning rate of the wrong sign shows before the first round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim.model import Model, Params

# Steps of a rate of 0 that pass for the start of a warm-up.
_WARM_UP = 100


def must_descend(model: Model, *, may_rest: bool = False, **optimizers: optax.GradientTransformation) -> None:
    """Raises ``ValueError`` naming the first optimizer that goes up, nowhere finite, or not at all.

    A learning rate cannot be read off an optax transformation. But from zero, where every slope is 1, its first step that
    is not zero must not climb, and there must be one among the first hundred (a warm-up may start with a rate of 0) unless
    it ``may_rest``. Half the way between its steps where slopes are 1 and -1 is taken, in which noise cancels.
    Parameters keep their names here and shrink to one number each.

    >>> import fedsim
    >>> must_descend(fedsim.models.digits_logistic(), server_optimizer=optax.sgd(-0.5))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected server_optimizer to descend, and its first step along a gradient of ones: +0.5 in the mean. ...
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    zeros, up, down = (jax.tree.map(lambda x, v=v: jnp.full((1,) * x.ndim, v, x.dtype), params) for v in (0, 1, -1))

    def step(optimizer: optax.GradientTransformationExtraArgs, slope: Params, state: Any) -> tuple[Params, Any]:
        def loss(params: Params) -> jax.Array:  # for those that ask for it: Polyak steps, line searches
            return 1 + jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(jax.tree.map(jnp.multiply, slope, params))]))

        return optimizer.update(slope, state, zeros, value=jnp.float32(1), grad=slope, value_fn=loss)

    for name, optimizer in optimizers.items():
        optimizer = optax.with_extra_args_support(optimizer)
        uphill = downhill = optimizer.init(zeros)
        for _ in range(1 if may_rest else _WARM_UP):
            along, uphill = step(optimizer, up, uphill)
            against, downhill = step(optimizer, down, downhill)
            change = jax.tree.map(lambda a, b: float(jnp.mean(a - b)) / 2, along, against)
            climbs = np.array(jax.tree.leaves(change))
            if np.any(climbs) or may_rest:
                break
        rests = not np.any(climbs)
        if not np.all(climbs <= 0) or (rests and not may_rest):
            steps = f"{_WARM_UP} steps" if rests else "step"
            raise ValueError(
                f"Expected {name} to descend, and its first {steps} along a gradient of ones: {climbs.max() + 0.0:+.3g} in "
                "the mean. Give it a positive learning rate."
            )
