"""pFedMe: personalization with Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020, Algorithm 1:
https://arxiv.org/abs/2006.08848. Each of a client's R local rounds is one step of ``batches``. On one batch, it computes::

    theta ≈ argmin f(theta) + lam/2 ||theta - w||²     by personal_steps (the paper's K) gradient steps
    w = w - η lam (w - theta)

η is the learning rate of the client optimizer, and β the learning rate of the server optimizer. The paper does not specify
where theta starts. Here it starts from the server's parameters in every round, and from the last theta in later steps.
Deviations: only the cohort trains (in the paper all clients train, and a sample is averaged). Clients are weighted by
``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import parts_of, with_kept
from fedsim.algorithms._personal_model import Models, first_model, model_of, train_both
from fedsim.data import Batch
from fedsim.model import Params, scope_of
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PFedMe(FedAvg):
    """Personal models theta_i close to a common w: min over w of mean_i min over theta of F_i(theta) + lam/2 ||theta - w||².

    `fedsim.evaluate_personalized` evaluates the last theta of each client. A step computes ``personal_steps`` gradients. The
    ``loss`` in a round's info is F_i(theta) alone.

    Attributes:
      lam: above 0. Larger values keep the personal models closer to w. The paper uses 15.
      personal_learning_rate: the learning rate of the gradient steps on theta, above 0. It should be below
        2 / (lam + curvature).
      personal_steps: the number of these steps, at least 1. The paper uses 5.

    Raises:
      ValueError: a number is outside the range that is described, or see `FedAvg`.

    >>> import optax, fedsim
    >>> PFedMe(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), lam=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected lam > 0 and finite, got lam=0.0.
    """

    capabilities = Capabilities(scalable=True, model_parts=True)
    train = None  # type: ignore[assignment]  # There is no single local model, because clients train two.

    lam: float = 15.0
    personal_learning_rate: float = 0.05
    personal_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(lam=self.lam, personal_learning_rate=self.personal_learning_rate)
        checks.whole(1, personal_steps=self.personal_steps)

    def client_memory(self, shared: Any) -> Params:
        return first_model(shared)

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the client's last theta."""
        return client.memory

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, "its gradients of a batch would all have the same noise")

        def step(models: Models, batch: Batch) -> Models:
            copy, own = models
            near = training.with_proximal_term(self.lam, copy.params)

            def nearer(_: jax.Array, theta: Params) -> Params:
                with scope_of(own.parts, batch.mask):
                    gradient = near.step_gradient(theta, batch)[1]
                return tree.subtract(theta, tree.scale(gradient, self.personal_learning_rate))

            theta = jax.lax.fori_loop(0, self.personal_steps, nearer, with_kept(own.params, own.parts))
            sent = tree.masked(theta, like=own.params)

            def envelope(w: Params, batch: Batch) -> jax.Array:
                return training.loss(theta, batch) + self.lam / 2 * tree.squared_norm(tree.subtract(sent, w))

            def gradient(w: Params, batch: Batch) -> tuple[jax.Array, Params]:
                return training.loss(theta, batch), tree.scale(tree.subtract(w, sent), self.lam)

            copy = dataclasses.replace(training, gradient=gradient, objective=envelope, terms=()).step(copy, batch)
            parts = parts_of(copy)._replace(kept=parts_of(own).kept).after_step(theta, None)
            return copy, own._replace(params=sent, loss=copy.loss, parts=parts)

        # In each round theta starts from the server's parameters, and not from the client's memory. Only theta has the
        # parameters that the client keeps, and all running statistics are those of theta.
        parts = parts_of(client)
        start = training.start(shared.params, parts._replace(kept=())), training.start(shared.params, parts)
        result, own = train_both(self, shared, client, step, start)
        return result._replace(memory=model_of(own), parts=own.parts)
