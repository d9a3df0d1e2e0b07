"""Checks of optax optimizers before the first round: a learning rate of the wrong sign, and gradients that would be lost."""

from __future__ import annotations

import re
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.interpreters import partial_eval

from fedsim import tree
from fedsim.model import Model, ModelParts, Params

# At least one of this many first steps must be nonzero. A warm-up may start with learning rate 0.
_WARM_UP = 100

# Optimizers that are refused, by the kind of their state.
_REFUSED = {
    optax.contrib.DifferentiallyPrivateAggregateState: "dpsgd, which needs the gradient of each example: use another one, such "
    "as optax.sgd, and fedsim.aggregators.GaussianMechanism for differential privacy of clients",
    optax.contrib.SAMState: "sam, which needs a second gradient, elsewhere: use another one, such as optax.sgd",
}


def check_descent(
    model: Model, *, may_be_zero: bool = False, at_clients: bool = False, **optimizers: optax.GradientTransformation
) -> None:
    """Raises ``ValueError`` if an optimizer ascends, returns NaN or another form of update, does not move, or needs more.

    With ``at_clients``, it gets the parameters that clients keep, too, and besides the gradient the value of the loss and the
    function, as line searches need them.

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
    zeros, up, down = (constants(model, value, kept=at_clients) for value in (0, 1, -1))

    def step(optimizer: optax.GradientTransformationExtraArgs, slope: Params, state: Any) -> tuple[Params, Any]:
        def loss(params: Params) -> jax.Array:  # for optimizers that need it: Polyak steps, line searches
            return 1 + jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(jax.tree.map(jnp.multiply, slope, params))]))

        extra = {"value": jnp.float32(1), "grad": slope, "value_fn": loss} if at_clients else {}
        try:
            return optimizer.update(slope, state, zeros, **extra)
        except (TypeError, AttributeError) as error:
            given = "the gradient, the parameters and the loss" if at_clients else "the gradient and the parameters"
            raise ValueError(
                f"Expected {name} to need {given} only, got {_culprit(error)}, which raises {type(error).__name__}: {error}. "
                "Use another optimizer, such as optax.sgd or optax.adam"
                f"{'.' if at_clients else '; those that need the loss can be the client_optimizer.'}"
            ) from error

    for name, optimizer in optimizers.items():
        optimizer = optax.with_extra_args_support(optimizer)
        start = state_up = state_down = optimizer.init(zeros)
        for kind, reason in _REFUSED.items():
            if _states(start, kind):
                raise ValueError(f"Expected {name} to need one gradient for each step, got optax.contrib.{reason}.")
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


def check_draws_no_noise(model: Model, *, client_optimizer: optax.GradientTransformation) -> None:
    """Raises ``ValueError`` if a client optimizer draws noise from a key of its own, which is the same for all clients."""
    if _states(client_optimizer.init(constants(model, 0, kept=True)), optax.AddNoiseState):
        raise ValueError(
            "Expected client_optimizer without noise, got optax.add_noise (also in optax.noisy_sgd): its key is that of the "
            "optimizer, so all clients would draw the same noise in every round. For differential privacy of clients, use "
            "fedsim.aggregators.GaussianMechanism; for noise in local steps, override local_training with a loss that draws it "
            "from Batch.key."
        )


def needs_loss(optimizer: optax.GradientTransformation, params: Params) -> bool:
    """Returns whether an optimizer reads the loss: its value, its gradient besides the updates, or the function itself.

    Most optimizers of optax take these arguments and do not use them, and then the loss need not be computed again for them.

    >>> params = {"w": jnp.zeros(3)}
    >>> needs_loss(optax.sgd(0.1), params), needs_loss(optax.polyak_sgd(), params)
    (False, True)
    """
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return False
    called = False

    def loss(params: Params) -> jax.Array:
        nonlocal called
        called = True
        return jnp.float32(0)

    def update(value: jax.Array, grad: Params, gradient: Params, state: Any, params: Params) -> Any:
        return optimizer.update(gradient, state, params, value=value, grad=grad, value_fn=loss)

    shapes, value = tree.shapes(params), jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(optimizer.init, shapes)
    jaxpr = jax.make_jaxpr(update)(value, shapes, shapes, state, shapes).jaxpr
    used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return called or any(used[: 1 + len(jax.tree.leaves(shapes))])


def waits(optimizer: optax.GradientTransformation, params: Params) -> bool:
    """Returns whether the first step of an optimizer is 0 and one of the next ninety-nine is not, as in a warm-up.

    It is False if the learning rate is traced.

    >>> params = {"w": jnp.zeros(3)}
    >>> waits(optax.sgd(0.1), params), waits(optax.sgd(optax.linear_schedule(0, 0.1, 5)), params)
    (False, True)
    """
    optimizer, ones = optax.with_extra_args_support(optimizer), jax.tree.map(jnp.ones_like, params)
    state = optimizer.init(params)
    for i in range(_WARM_UP):
        steps, state = optimizer.update(ones, state, params)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(steps)):
            return False
        if any(bool(jnp.any(x)) for x in jax.tree.leaves(steps)):
            return i > 0
    return False


def check_needs_no_loss(what: str, optimizer: optax.GradientTransformation, params: Params) -> None:
    """Raises ``ValueError`` if an optimizer needs the loss where an algorithm has gradients alone.

    Args:
      what: for the message, the algorithm and where it has gradients alone.
      optimizer: the client optimizer.
      params: what it is for, such as `constants`.

    >>> check_needs_no_loss("Mime", optax.polyak_sgd(), {"w": jnp.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: Expected a client_optimizer that needs gradients alone with Mime, got one that needs the loss, as Polyak ...
    """
    if needs_loss(optimizer, params):
        raise ValueError(
            f"Expected a client_optimizer that needs gradients alone with {what}, got one that needs the loss, as Polyak steps "
            "and line searches do: use another one, such as optax.sgd or optax.adam."
        )


def warn_of_lost_gradients(model: Model, num_steps: np.ndarray, *, client_optimizer: optax.GradientTransformation) -> None:
    """Warns if the optimizer accumulates the gradients of several steps, of which clients have no multiple.

    Every client starts every round with a new state of its optimizer, so what the last one holds is lost.

    Args:
      model: gives the names of the parameters.
      num_steps: of each client in a round, ``int [clients]``.
      client_optimizer: the optimizer.
    """
    kinds = optax.MultiStepsState, optax.ApplyEvery
    optimizer, ones = optax.with_extra_args_support(client_optimizer), constants(model, 1, kept=True)
    state = optimizer.init(ones)
    if not _states(state, *kinds):
        return
    loss = {"value": jnp.float32(1), "grad": ones, "value_fn": lambda params: jnp.float32(1)}
    interval, holds = 0, True
    while holds and interval < _WARM_UP:
        _, state = optimizer.update(ones, state, ones, **loss)
        counts = [each[0] for each in _states(state, *kinds)]  # of the gradients that it holds
        if any(isinstance(count, jax.core.Tracer) for count in counts):
            return
        interval, holds = interval + 1, any(map(int, counts))
    lost = num_steps % interval != 0
    if np.any(lost):
        warnings.warn(
            f"client_optimizer accumulates gradients and moves after every {interval} steps, and {np.sum(lost)} of {len(lost)} "
            f"clients, the first with {num_steps[lost][0]}, take another number of steps in a round: the gradients of their "
            f"last steps are lost, because every client starts every round with a new optimizer. Set steps of Batches to a "
            f"multiple of {interval}, or use a larger batch size instead.",
            stacklevel=4,
        )


def constants(model: Model, value: float, *, kept: bool = False) -> Params:
    """Returns parameters of this value, with the names, ranks and dtypes of the model's, of one element each.

    Args:
      model: the model.
      value: the value.
      kept: whether those that clients keep are among them, which client optimizers update together with the others.

    >>> import fedsim
    >>> constants(fedsim.models.digits_logistic(), 2)
    {'linear': {'b': Array([2.], dtype=float32), 'w': Array([[2.]], dtype=float32)}}
    """

    def init(key: jax.Array) -> Params:
        params = model.init(key)
        return ModelParts(kept=model.init_parts(key).kept).join(params) if kept and model.init_parts else params

    return jax.tree.map(lambda x: jnp.full((1,) * x.ndim, value, x.dtype), jax.eval_shape(init, jax.random.key(0)))


def _states(state: Any, *kinds: type) -> list[Any]:
    """Returns the states of these kinds within an optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def _culprit(error: Exception) -> str:
    """Returns the name of the transformation whose update raised an error, such as "sam"."""
    names = re.findall(r"(\w+)\.<locals>", str(error))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names += re.findall(r"(\w+)\.<locals>", frame.f_code.co_qualname) if "optax" in frame.f_code.co_filename else []
    return f"optax's {names[0] if '<locals>' in str(error) else names[-1]}" if names else "one"


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
