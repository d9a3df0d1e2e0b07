"""How far an optimizer goes along a gradient of ones: what normalized averages and control variates are divided by.

After K steps of a client's optimizer that is linear in its gradients, x - y = η Σ_k a_k g_k: for SGD of rate η all a_k are 1,
for momentum ρ they are (1 - ρ^(K-k)) / (1 - ρ), for a proximal term (1 - ημ)^(K-1-k), k from 0. Instead of closed forms, the
optimizer itself moves a number whose gradient is always 1: it has then come η ‖a‖₁ far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import tree
from fedsim.model import Params

# Gradients of two different trainings.
_WAYS = np.array([[1.0, 0.0, 2.0, -1.0], [0.5, -3.0, 1.0, 4.0]])


class Reach(NamedTuple):
    """How far that number has ``come``, ``float32 []``, and its optimizer's state."""

    come: jax.Array
    opt_state: optax.OptState

    @classmethod
    def zero(cls, optimizer: optax.GradientTransformation) -> Reach:
        """Before the first step."""
        return cls(jnp.float32(0), optimizer.init(jnp.float32(0)))

    def step(self, optimizer: optax.GradientTransformation, mu: float = 0.0) -> Reach:
        """After one more, on a loss with the proximal term ``mu / 2`` times the square of the way."""
        update, opt_state = optimizer.update(1 - mu * self.come, self.opt_state, -self.come)
        return Reach(self.come - update, opt_state)

    def mean(self, movement: Params) -> Params:
        """The mean of the gradients, each counted as the optimizer did, that made a client move so; 0 where nothing moves."""
        return tree.scale(movement, jnp.where(self.come == 0, 0, 1 / jnp.where(self.come == 0, 1, self.come)))


def must_be_linear(what: str, optimizer_of: Callable[[jax.Array], optax.GradientTransformation]) -> None:
    """Raises ``ValueError`` unless what an optimizer does with gradients is linear in them, whatever the parameters.

    Args:
      what: needs that.
      optimizer_of: from the round to the clients' optimizer, of which those of the first two are tried.

    >>> must_be_linear("FedNova", lambda round: optax.sgd(0.1, momentum=0.9))
    >>> must_be_linear("FedNova", lambda round: optax.sign_sgd(0.1))
    Traceback (most recent call last):
    ...
    ValueError: FedNova needs a client_optimizer that is linear in the gradients: SGD, with or without momentum. ...
    """

    def way(optimizer: optax.GradientTransformation, gradients: np.ndarray, params: float) -> np.ndarray:
        state, steps = optimizer.init(jnp.float32(params)), []
        for gradient in gradients:
            update, state = optimizer.update(jnp.float32(gradient), state, jnp.float32(params))
            steps.append(float(update))
        return np.array(steps)

    def additive(optimizer: optax.GradientTransformation) -> bool:
        one, other = (way(optimizer, gradients, 0.0) for gradients in _WAYS)
        # What clips does so at some size of gradients only.
        for large in (2.0, 2e6):
            together = way(optimizer, large * _WAYS[0] + _WAYS[1], 7.0)
            if not np.allclose(together, large * one + other, rtol=1e-4, atol=1e-6 * np.abs(together).max()):
                return False
        return True

    try:
        linear = all(additive(optimizer_of(jnp.int32(round))) for round in (0, 1))
    except (TypeError, ValueError):  # One that asks for the loss, too, or for parameters of certain names.
        linear = False
    if not linear:
        raise ValueError(
            f"{what} needs a client_optimizer that is linear in the gradients: SGD, with or without momentum. It divides by "
            "how far the client's steps reach, which is defined for no other."
        )
