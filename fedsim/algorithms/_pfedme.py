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
from fedsim.algorithms._personal_model import Models, PersonalModel
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PFedMe(PersonalModel):
    """Personal models theta_i close to a common w: min over w of mean_i min over theta of F_i(theta) + lam/2 ||theta - w||².

    `fedsim.evaluate_personalized` evaluates the last theta of each client. A step computes ``personal_steps`` gradients. The
    ``loss`` in a round's info is F_i(theta) alone.

    Attributes:
      lam: above 0. Larger values keep the personal models closer to w. The paper uses 15.
      personal_learning_rate: the learning rate of the gradient steps on theta, above 0. It should be below
        2 / (lam + curvature).
      personal_steps: the number of these steps, at least 1. The paper uses 5.

    >>> import optax, fedsim
    >>> PFedMe(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), lam=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected lam > 0 and finite, got lam=0.0.
    """

    capabilities = Capabilities(scalable=True)

    lam: float = 15.0
    personal_learning_rate: float = 0.05
    personal_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(lam=self.lam, personal_learning_rate=self.personal_learning_rate)
        checks.whole(1, personal_steps=self.personal_steps)

    def personal_loss(self, shared: Any, copy: Params, own: Params, batch: Batch) -> jax.Array:
        return self.client_loss(shared, own, batch) + self.lam / 2 * tree.squared_norm(tree.subtract(own, copy))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        # In each round theta starts from the server's parameters, and not from the client's memory.
        return super().client_update(shared, dataclasses.replace(client, memory=shared.params))

    def two_steps(self, shared: Any, models: Models, batch: Batch) -> Models:
        copy, own = models
        w = copy.params

        def nearer(_: jax.Array, theta: Params) -> Params:
            _, gradient = self.client_gradient(shared, theta, batch)
            return tree.subtract(
                theta, tree.scale(tree.add_proximal_gradient(gradient, self.lam, theta, w), self.personal_learning_rate)
            )

        theta = jax.lax.fori_loop(0, self.personal_steps, nearer, own.params)
        # The envelope f(theta) + lam/2 ||theta - w||² has the gradient lam (w - theta) with respect to w.
        slope = self.client_loss(shared, theta, batch), tree.scale(tree.subtract(w, theta), self.lam)
        copy = self.step(shared, copy, batch, slope, lambda w: self.personal_loss(shared, w, theta, batch))
        return copy, own._replace(params=theta, loss=copy.loss)
