"""Adaptive personalized federated learning (APFL).

Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive personalized federated learning", 2020, Algorithm 1:
https://arxiv.org/abs/2003.13461. In a step on one batch, with m = alpha v + (1 - alpha) w and rate η::

    w = w - η ∇f(w),    v = v - η ∇_v f(m) = v - η alpha ∇f(m),    alpha = alpha - η <v - w, ∇f(m)>  (if adaptive)

where the right-hand sides hold what was before the step. Clients keep v and alpha; w starts from the server's parameters.
Deviations: alpha moves in every step, like v, and is kept in [0, 1]; the client optimizer, where it is not SGD, steps all three
by its own rule; a client's v starts from the server's parameters of its first round; clients are weighted by ``weighting``
(the paper averages uniformly). FedJAX's APFL differs: it leaves the factor alpha of ∇_v out, and has an alpha for every array.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms._gradient_server import Shared
from fedsim.algorithms._personal_model import PersonalModel
from fedsim.data import Batch
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Mixture(NamedTuple):
    """A client's own model v, and its weight alpha, ``float32 []``, in the mixture with the global one."""

    params: Params
    alpha: jax.Array

    def mixed(self, others: Params) -> Params:
        """``alpha * own + (1 - alpha) * others``."""
        return jax.tree.map(lambda v, w: self.alpha * v + (1 - self.alpha) * w, self.params, others)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class APFL(PersonalModel):
    """FedAvg beside which every client trains a model v of its own such that alpha v + (1 - alpha) w suits it.

    The global model w is FedAvg's. `fedsim.evaluate_personalized` evaluates the mixtures. A step takes two gradients.

    Attributes:
      alpha: in [0, 1], each client's weight of its own model, at first if adaptive; 0: only the global model, 1: only v.
      adaptive: whether clients learn alpha, too.

    >>> import optax, fedsim
    >>> algorithm = APFL(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3))
    >>> shared = algorithm.broadcast(algorithm.init(jax.random.key(0)))
    >>> float(algorithm.client_memory(shared).alpha)
    0.5
    >>> APFL(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=1.5)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= alpha <= 1, got alpha=1.5.
    """

    alpha: float = 0.5
    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, most=1, alpha=self.alpha)
        checks.truth(adaptive=self.adaptive)

    def client_memory(self, shared: Shared) -> Mixture:
        return Mixture(shared.params, jnp.float32(self.alpha))

    def personal_params(self, shared: Shared, memory: Mixture) -> Params:
        return memory.mixed(shared.params)

    def personal_loss(self, shared: Shared, copy: Params, own: Mixture, batch: Batch) -> jax.Array:
        return self.client_loss(shared, own.mixed(copy), batch)

    def personal_gradient(self, shared: Shared, copy: Params, own: Mixture, batch: Batch) -> tuple[jax.Array, Mixture]:
        slope = jax.value_and_grad(self.client_loss, argnums=1)(shared, own.mixed(copy), batch)
        # A slope that nobody follows must not count where an optimizer looks at all of them, as one that clips does.
        along = tree.dot(tree.subtract(own.params, copy), slope[1]) if self.adaptive else jnp.zeros_like(own.alpha)
        loss, slope = tree.after(slope, (slope, along))  # As in `tree.value_and_grad`; what is along reads the model, too.
        # The mixture is in alpha's precision, what is trained in its own.
        return loss, Mixture(jax.tree.map(lambda g, v: (own.alpha * g).astype(v.dtype), slope, own.params), along)

    def client_step(self, shared: Shared, state: Any, batch: Batch) -> Any:
        after = super().client_step(shared, state, batch)
        own: Mixture = after.own.params
        alpha = jnp.clip(own.alpha, 0, 1) if self.adaptive else state.own.params.alpha
        return after._replace(own=after.own._replace(params=own._replace(alpha=alpha)))

    def client_final(self, shared: Shared, state: Any, client: Client) -> ClientUpdate:
        sent = super().client_final(shared, state, client)
        return sent._replace(info={**sent.info, "alpha": sent.memory.alpha})
