"""pFedMe: personalization with Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020, Algorithm 1:
https://arxiv.org/abs/2006.08848. In each of a client's R local rounds, which are the steps of ``batches``, on one batch::

    theta ≈ argmin f(theta) + lam/2 ||theta - w||²     by personal_steps (the paper's K) gradient steps
    w = w - η lam (w - theta)

η is the client optimizer's rate, β the server optimizer's. Where theta starts, the paper leaves open: here at the server's
parameters in every round, and in later steps where it was. Deviations: only the cohort trains (in the paper everybody does,
and a sample is averaged); clients are weighted by ``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedsim import checks, tree
from fedsim.algorithms._gradient_server import Shared
from fedsim.algorithms._personal_model import PersonalModel, TwoModels
from fedsim.data import Batch
from fedsim.execution import Client
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PFedMe(PersonalModel):
    """Learns a point w near which every client has a good model of its own: min mean_i min_theta F_i + lam/2 ||theta - w||².

    `fedsim.evaluate_personalized` evaluates the last theta of each client. A step takes ``personal_steps`` gradients.
    The ``loss`` of the rounds' info is F_i(theta) alone.

    Attributes:
      lam: above 0: the larger, the nearer the personal models to w. The paper takes 15.
      personal_learning_rate: above 0, and below 2 / (lam + curvature), of the gradient steps on theta.
      personal_steps: at least 1, how many of them. The paper takes 5.

    >>> import optax, fedsim
    >>> PFedMe(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), lam=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected lam > 0 and finite, got lam=0.0.
    """

    lam: float = 15.0
    personal_learning_rate: float = 0.05
    personal_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(lam=self.lam, personal_learning_rate=self.personal_learning_rate)
        checks.whole(1, personal_steps=self.personal_steps)

    def personal_loss(self, shared: Shared, copy: Params, own: Params, batch: Batch) -> jax.Array:
        return self.client_loss(shared, own, batch) + self.lam / 2 * tree.squared_norm(tree.subtract(own, copy))

    def client_init(self, shared: Shared, client: Client) -> Any:
        state = self.set_out(shared, shared.params)
        return TwoModels(state, state._replace(opt_state=()))

    def client_step(self, shared: Shared, state: Any, batch: Batch) -> Any:
        w = state.copy.params

        def nearer(_: jax.Array, theta: Params) -> Params:
            _, slope = tree.value_and_grad(lambda theta: self.client_loss(shared, theta, batch), theta)
            return tree.subtract(theta, tree.scale(tree.pulled(slope, self.lam, theta, w), self.personal_learning_rate))

        theta = jax.lax.fori_loop(0, self.personal_steps, nearer, state.own.params)
        # Of the envelope f(theta) + lam/2 ||theta - w||², whose gradient in w is lam (w - theta).
        slope = self.client_loss(shared, theta, batch), tree.scale(tree.subtract(w, theta), self.lam)
        copy = self.walk(shared, state.copy, batch, slope, lambda w: self.personal_loss(shared, w, theta, batch))
        return TwoModels(copy, state.own._replace(params=theta, loss=copy.loss))
