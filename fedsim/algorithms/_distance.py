"""Measures how far an optimizer moves along a gradient of ones. FedNova and SCAFFOLD divide by this distance.

After K steps of a client's optimizer that is linear in its gradients, x - y = η Σ_k a_k g_k, where k starts from 0. For SGD
with learning rate η, all a_k are 1. For momentum ρ they are (1 - ρ^(K-k)) / (1 - ρ). For a proximal term they are
(1 - ημ)^(K-1-k). Instead of these formulas, the optimizer itself updates a scalar whose gradient is always 1. The distance that
the scalar moves is η ‖a‖₁.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import tree
from fedsim.algorithms._descent import constants
from fedsim.algorithms._local_training import LocalTraining, Schedule, optimizer_of_round
from fedsim.model import Model, Params

# The gradients of two different training runs.
_TRAININGS = np.array([[1.0, 0.0, 2.0, -1.0], [0.5, -3.0, 1.0, 4.0]])


class Distance(NamedTuple):
    """The distance ``length`` that the scalar has moved, ``float32 []``, and the states of its and the model's optimizer."""

    length: jax.Array
    of_scalar: optax.OptState
    of_params: optax.OptState

    def mean_gradient(self, movement: Params) -> Params:
        """Returns the mean of the gradients that caused a client's movement, weighted as the optimizer weights them.

        It is 0 if the scalar did not move. A movement that is not much longer than the rounding of the parameters (6e-8 of
        their size in ``float32``) says nothing about the gradients: learning rates that are not 0 must move parameters by more.
        """
        return tree.scale(movement, jnp.where(self.length == 0, 0, 1 / jnp.where(self.length == 0, 1, self.length)))


def measured(training: LocalTraining, mu: jax.Array | float = 0.0) -> LocalTraining:
    """Returns training that also measures how far its steps would move along a gradient of ones.

    The state of its optimizer is a `Distance`. ``mu`` is the coefficient of a proximal term in the gradient: ``mu / 2`` times
    the squared distance from the start.
    """
    optimizer = training.optimizer

    def init(params: Params) -> Distance:
        return Distance(jnp.float32(0), optimizer.init(jnp.float32(0)), optimizer.init(params))

    def update(gradient: Params, state: Distance, params: Params) -> tuple[Params, Distance]:
        step, of_scalar = optimizer.update(1 - mu * state.length, state.of_scalar, -state.length)
        steps, of_params = optimizer.update(gradient, state.of_params, params)
        return steps, Distance(state.length - step, of_scalar, of_params)

    return dataclasses.replace(training, optimizer=optax.GradientTransformation(init, update))


def check_linear(what: str, client_optimizer: optax.GradientTransformation | Schedule, model: Model) -> None:
    """Raises ``ValueError`` unless an optimizer's steps are linear in the gradients and do not depend on the parameters.

    Every array that clients train must move as the scalar does, for which steps are measured: a mask by rank or name, such as
    that of a weight decay, leaves it out.

    Args:
      what: what requires this, for the error message.
      client_optimizer: the clients' optimizer, or a function from the round to it. Those of the first two rounds are tested.
      model: the model that it trains.

    >>> import fedsim
    >>> model = fedsim.models.digits_logistic()
    >>> check_linear("FedNova", optax.sgd(0.1, momentum=0.9), model)
    >>> check_linear("FedNova", lambda round: optax.sign_sgd(0.1), model)
    Traceback (most recent call last):
    ...
    ValueError: FedNova needs a client_optimizer that is linear in the gradients, alike for all parameters: ...
    """

    def steps_of(optimizer: optax.GradientTransformation, gradients: np.ndarray, params: Params) -> np.ndarray:
        """Returns the steps of arrays of one element, ``[steps, arrays]``, which all get the same gradients."""
        state, steps = optimizer.init(params), []
        for gradient in gradients:
            slope = jax.tree.map(lambda x, g=gradient: jnp.full_like(x, g), params)
            update, state = optimizer.update(slope, state, params)
            steps.append([float(x.sum()) for x in jax.tree.leaves(update)])
        return np.array(steps)

    def close(found: np.ndarray, expected: np.ndarray) -> bool:
        return np.allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(found).max())

    def additive(optimizer: optax.GradientTransformation) -> bool:
        one, other = (steps_of(optimizer, gradients, jnp.float32(0)) for gradients in _TRAININGS)
        # An optimizer that clips is nonlinear only for large gradients.
        for large in (2.0, 2e6):
            together = steps_of(optimizer, large * _TRAININGS[0] + _TRAININGS[1], jnp.float32(7))
            if not close(together, large * one + other):
                return False
        return close(steps_of(optimizer, _TRAININGS[0], arrays), one)

    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), constants(model, 7, kept=True))

    try:
        linear = all(additive(optimizer_of_round(client_optimizer, jnp.int32(round))) for round in (0, 1))
    except jax.errors.ConcretizationTypeError:  # The learning rate is traced, as under jax.grad, and cannot be tested.
        return
    except (TypeError, ValueError):  # The optimizer also needs the loss, or parameters with certain names.
        linear = False
    if not linear:
        raise ValueError(
            f"{what} needs a client_optimizer that is linear in the gradients, alike for all parameters: SGD, with or without "
            "momentum. It divides by the length of the client's steps for a gradient of ones, which is not meaningful for "
            "other optimizers."
        )
