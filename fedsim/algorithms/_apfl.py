"""Adaptive personalized federated learning (APFL).

Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive personalized federated learning", 2020, Algorithm 1:
https://arxiv.org/abs/2003.13461. A step on one batch, with m = alpha v + (1 - alpha) w and learning rate η, computes::

    w = w - η ∇f(w),    v = v - η ∇_v f(m) = v - η alpha ∇f(m),    alpha = alpha - η <v - w, ∇f(m)>  (if adaptive)

The right-hand sides use the values before the step. Clients keep v and alpha. w starts from the server's parameters.

Deviations: alpha changes in every step, like v, and is clipped to [0, 1]. A client optimizer other than SGD updates w, v and
alpha by its own rule. A client's v starts from the server's parameters of the client's first round. Clients are weighted by
``weighting`` (the paper averages uniformly). FedJAX's APFL is different: it omits the factor alpha of ∇_v, and has a separate
alpha for every array.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import parts_of
from fedsim.algorithms._personal_model import Models, train_both
from fedsim.data import Batch
from fedsim.model import ModelParts, Params, current_scope
from fedsim.rounds import Client, ClientUpdate


class Mixture(NamedTuple):
    """What a client keeps: its own model v, and the weight of v in the mixture with the global model.

    Attributes:
      params: v.
      alpha: the weight, ``float32 []``.
      parts: the running statistics of the mixture.
    """

    params: Params
    alpha: jax.Array
    parts: ModelParts = ModelParts()

    def mixed(self, others: Params) -> Params:
        """Returns ``alpha * own + (1 - alpha) * others``."""
        return jax.tree.map(lambda v, w: self.alpha * v + (1 - self.alpha) * w, self.params, others)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class APFL(FedAvg):
    """FedAvg with mixtures: every client also trains a personal model v, such that alpha v + (1 - alpha) w fits its data.

    The global model w is the same as in FedAvg. `fedsim.evaluate_personalized` evaluates the mixtures, which have
    running statistics of their own. A step computes two gradients.

    Attributes:
      alpha: each client's weight of its own model, in [0, 1]. It is the initial weight if ``adaptive``. 0 uses only the global
        model, 1 only v.
      adaptive: whether clients also learn alpha.

    Raises:
      ValueError: ``alpha`` is not in [0, 1], or see `FedAvg`.

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

    capabilities = Capabilities(
        scalable=True,
        microbatches=True,
        model_parts=True,
        refused_parts={"kept": "clients mix their models with the server's, which lacks these; use Ditto, for example"},
    )
    train = None  # type: ignore[assignment]  # There is no single local model, because clients train two.

    alpha: float = 0.5
    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, most=1, alpha=self.alpha)
        checks.truth(adaptive=self.adaptive)

    def client_memory(self, shared: Any) -> Mixture:
        return Mixture(shared.params, jnp.float32(self.alpha), current_scope().parts._replace(frozen=()))

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of the client's mixture."""
        return client.memory.parts.join(client.memory.mixed(shared.params))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)

        def step(models: Models, batch: Batch) -> Models:
            copy, own = models

            def gradient(own: Mixture, batch: Batch) -> tuple[jax.Array, Mixture]:
                loss, gradient = training.step_gradient(own.mixed(copy.params), batch)
                # If alpha is not learned, its gradient must not affect optimizers that use all gradients together, for example
                # to clip.
                along = tree.dot(tree.subtract(own.params, copy.params), gradient)
                slope = along if self.adaptive else jnp.zeros_like(own.alpha)
                # The mixture has the precision of alpha. Gradients need the precision of the parameters that they update.
                return loss, Mixture(jax.tree.map(lambda g, v: (own.alpha * g).astype(v.dtype), gradient, own.params), slope)

            def value(own: Mixture, batch: Batch) -> jax.Array:
                return training.step_value(own.mixed(copy.params), batch)

            after = dataclasses.replace(training, gradient=gradient, objective=value, terms=()).step(own, batch)
            alpha = jnp.clip(after.params.alpha, 0, 1) if self.adaptive else own.params.alpha
            return training.step(copy, batch), after._replace(params=after.params._replace(alpha=alpha))

        statistics = client.memory.parts._replace(frozen=parts_of(client).frozen)
        mixed = training.start(client.memory._replace(parts=ModelParts()), statistics)
        result, own = train_both(self, shared, client, step, (training.start(shared.params, client.parts), mixed))
        memory = own.params._replace(parts=parts_of(own)._replace(frozen=()))
        return result._replace(info={**result.info, "alpha": memory.alpha}, memory=memory)
