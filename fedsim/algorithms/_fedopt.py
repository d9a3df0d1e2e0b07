"""Adaptive federated optimization: FedAdagrad, FedAdam, FedYogi.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated optimization", ICLR
2021, Algorithm 2: https://arxiv.org/abs/2003.00295. With Δ the mean movement of the clients (the server optimizer receives -Δ
as its gradient)::

    m = b1 m + (1 - b1) Δ
    v = v + Δ²                                   FedAdagrad
    v = b2 v + (1 - b2) Δ²                       FedAdam
    v = v - (1 - b2) Δ² sign(v - Δ²)             FedYogi
    x = x + server_learning_rate m / (sqrt(v) + tau),     m = 0 and v = tau² at the start

There are no deviations. In particular, there is no bias correction, unlike in `optax.adam`. For Adam with bias correction,
which FedJAX and TFF run under this name, use ``FedAvg(server_optimizer=optax.adam(...))``. The defaults are the paper's
b1 = 0.9 (0 for FedAdagrad), b2 = 0.99 and tau = 1e-3. The learning rate depends on the task (the paper's appendix D). The
default 10^-2 is in the middle of the paper's grid.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.model import Params


class Moments(NamedTuple):
    """m and v of Algorithm 2, each with the shapes of the parameters."""

    m: Params
    v: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdaptiveFedAvg(FedAvg):
    """Algorithm 2 without the update of v, which subclasses define.

    Attributes:
      server_learning_rate: η, the learning rate of the step along m / (sqrt(v) + tau).
      b1: decay of the first moment, in [0, 1).
      tau: degree of adaptivity τ, above 0. Smaller values are more adaptive.
    """

    server_learning_rate: float = 1e-2
    b1: float = 0.9
    tau: float = 1e-3
    server_optimizer: optax.GradientTransformation = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(server_learning_rate=self.server_learning_rate, tau=self.tau)
        checks.number(least=0, below=1, b1=self.b1, b2=getattr(self, "b2", 0.0))  # FedAdagrad has no b2

    def _server_optimizer(self) -> optax.GradientTransformation:
        def init(params: Params) -> Moments:
            return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda x: jnp.full_like(x, self.tau**2), params))

        def update(gradient: Params, state: Moments, params: Params | None = None) -> tuple[Params, Moments]:
            m = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state.m, gradient)
            v = jax.tree.map(lambda v, g: self.second_moment(v, jnp.square(g)), state.v, gradient)
            step = jax.tree.map(lambda m, v: -self.server_learning_rate * m / (jnp.sqrt(v) + self.tau), m, v)
            return step, Moments(m, v)

        return optax.GradientTransformation(init, update)

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        """Returns the new v for a movement whose square is ``square``."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAdagrad(AdaptiveFedAvg):
    """FedAvg with Adagrad as the server optimizer, whose effective learning rates only decrease.

    >>> import fedsim
    >>> FedAdagrad(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2)).b1
    0.0
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.3}, scalable=True)

    b1: float = 0.0

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        return v + square


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAdam(AdaptiveFedAvg):
    """FedAvg with Adam as the server optimizer, without bias correction.

    Attributes:
      b2: decay of the second moment, in [0, 1).

    >>> import optax, fedsim
    >>> FedAdam(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), client_optimizer=optax.sgd(0.1), b2=1.5)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= b2 < 1, got b2=1.5.
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.03}, scalable=True)

    b2: float = 0.99

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        return self.b2 * v + (1 - self.b2) * square


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedYogi(AdaptiveFedAvg):
    """FedAvg with Yogi as the server optimizer, whose second moment v changes in steps proportional to Δ².

    The second moment v moves towards Δ² by a step that does not depend on its distance from Δ².

    Attributes:
      b2: in [0, 1). 1 - b2 is the size of this step relative to Δ².

    >>> import fedsim
    >>> FedYogi(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2)).b2
    0.99
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.03}, scalable=True)

    b2: float = 0.99

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        return v - (1 - self.b2) * square * jnp.sign(v - square)
