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
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks
from fedsim.aggregators import widened
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._server_step import from_fields
from fedsim.model import Params


class Moments(NamedTuple):
    """m and v of Algorithm 2, each with the shapes of the parameters, at least ``float32``."""

    m: Params
    v: Params


def adaptive(algorithm: Any, second_moment: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Returns Algorithm 2 with an algorithm's hyperparameters. ``second_moment`` returns the new v, given v and Δ²."""
    rate, b1, tau = algorithm.server_learning_rate, algorithm.b1, algorithm.tau

    def init(params: Params) -> Moments:
        params = widened(params)
        return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda x: jnp.full_like(x, tau**2), params))

    def update(gradient: Params, state: Moments, params: Params | None = None) -> tuple[Params, Moments]:
        wide = widened(gradient)
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, wide)
        v = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state.v, wide)
        steps = jax.tree.map(lambda m, v, g: (-rate * m / (jnp.sqrt(v) + tau)).astype(g.dtype), m, v, gradient)
        return steps, Moments(m, v)

    return optax.GradientTransformation(init, update)


def check_adaptive(algorithm: Any) -> None:
    """Raises ``ValueError`` unless the hyperparameters are in their ranges."""
    checks.positive(server_learning_rate=algorithm.server_learning_rate, tau=algorithm.tau)
    checks.number(least=0, below=1, b1=algorithm.b1, b2=getattr(algorithm, "b2", 0.0))  # FedAdagrad has no b2


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAdagrad(FedAvg):
    """FedAvg with Adagrad as the server optimizer, whose effective learning rates only decrease.

    Attributes:
      server_learning_rate: η, the learning rate of the step along m / (sqrt(v) + tau).
      b1: decay of the first moment, in [0, 1).
      tau: degree of adaptivity τ, above 0. Smaller values are more adaptive.

    Raises:
      ValueError: ``b1`` is not in [0, 1), ``server_learning_rate`` or ``tau`` is not positive, or see `FedAvg`.

    >>> import fedsim
    >>> FedAdagrad(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2)).b1
    0.0
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.3}, scalable=True, model_parts=True, microbatches=True)

    server_learning_rate: float = 1e-2
    b1: float = 0.0
    tau: float = 1e-3
    server_optimizer: ClassVar[Any] = from_fields(lambda self: adaptive(self, lambda v, square: v + square))  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adaptive(self)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAdam(FedAvg):
    """FedAvg with Adam as the server optimizer, without bias correction.

    Attributes:
      server_learning_rate, b1, tau: see `FedAdagrad`.
      b2: decay of the second moment, in [0, 1).

    Raises:
      ValueError: ``b2`` is not in [0, 1), or see `FedAdagrad`.

    >>> import optax, fedsim
    >>> FedAdam(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), client_optimizer=optax.sgd(0.1), b2=1.5)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= b2 < 1, got b2=1.5.
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.03}, scalable=True, model_parts=True, microbatches=True)

    server_learning_rate: float = 1e-2
    b1: float = 0.9
    tau: float = 1e-3
    b2: float = 0.99
    server_optimizer: ClassVar[Any] = from_fields(  # type: ignore[misc]
        lambda self: adaptive(self, lambda v, square: self.b2 * v + (1 - self.b2) * square)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adaptive(self)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedYogi(FedAvg):
    """FedAvg with Yogi as the server optimizer, whose second moment v changes in steps proportional to Δ².

    The second moment v moves towards Δ² by a step that does not depend on its distance from Δ².

    Attributes:
      server_learning_rate, b1, tau: see `FedAdagrad`.
      b2: in [0, 1). 1 - b2 is the size of this step relative to Δ².

    Raises:
      ValueError: ``b2`` is not in [0, 1), or see `FedAdagrad`.

    >>> import fedsim
    >>> FedYogi(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2)).b2
    0.99
    """

    capabilities = Capabilities(quadratic={"server_learning_rate": 0.03}, scalable=True, model_parts=True, microbatches=True)

    server_learning_rate: float = 1e-2
    b1: float = 0.9
    tau: float = 1e-3
    b2: float = 0.99
    server_optimizer: ClassVar[Any] = from_fields(  # type: ignore[misc]
        lambda self: adaptive(self, lambda v, square: v - (1 - self.b2) * square * jnp.sign(v - square))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adaptive(self)
