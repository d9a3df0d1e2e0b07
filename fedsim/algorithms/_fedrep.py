"""Federated representation learning (FedRep).

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting shared representations for personalized federated learning",
ICML 2021, Algorithm 1: https://arxiv.org/abs/2102.07078. The paper's representation φ is the body here. The first τ_h steps of
a client train the head, and the other τ_φ steps train the body. Deviations: τ_h is a fraction of the steps that ``batches``
determines, so that it suits clients of any size. Clients are weighted by ``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._fedper import OwnHead
from fedsim.algorithms._local_training import Local
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedRep(OwnHead, FedAvg):
    """FedPer in which a client first fits its head to the server's body, and then fits the body to its head.

    Attributes:
      head_fraction: the fraction of a client's steps that train the head, in [0, 1]. The number of steps is rounded down. The
        paper's experiments train the head for ten of eleven epochs, which is ``10 / 11`` with ``Batches(epochs=11)``. With one
        epoch and the default, the body gets only a tenth of the steps of FedAvg.
      head: see `FedPer`.

    Raises:
      ValueError: ``head_fraction`` is not in [0, 1], or see `FedPer`.

    >>> import optax, fedsim
    >>> FedRep(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     head_fraction=2.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 <= head_fraction <= 1, got head_fraction=2.0.
    """

    head_fraction: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, most=1, head_fraction=self.head_fraction)

    def train(self, shared: Any, client: Client) -> Local:
        """Runs the client's local steps: first the steps of the head, then the steps of the body. Each has its own optimizer
        state. Optimizers get all parameters, with a gradient of 0 for the other part, so that they find these by their names.
        """
        training = self.local_training(shared, client)
        start = training.start(self.personal_params(shared, client))
        # The small term corrects rounding: 0.7 of 10 steps must be 7, also if the product is slightly below 7.
        head_steps = jnp.floor(client.num_steps.astype(jnp.float32) * self.head_fraction + 1e-3).astype(jnp.int32)

        def joined(body: Params, head: Params) -> Params:
            """Returns the body of the one and the head of the other."""
            return hk.data_structures.merge(self.split(body)[0], self.split(head)[1])

        def step(before: tuple[Params, Local, Local], batch: Batch) -> tuple[Params, Local, Local]:
            params, body, head = before
            # One backward pass computes both gradients.
            loss, gradient = training.step_gradient(params, batch)
            zeros = jax.tree.map(jnp.zeros_like, gradient)

            def step_of(part: Local, own: Callable[[Params, Params], Params]) -> tuple[Params, Local]:
                """Takes a step of one part. ``own(a, b)`` has this part of ``a``, and the other part of ``b``."""
                moved = dataclasses.replace(
                    training,
                    gradient=lambda params, batch: (loss, own(gradient, zeros)),
                    objective=lambda new, batch: training.step_value(own(new, params), batch),
                    terms=(),
                ).step(part._replace(params=params), batch)
                return own(moved.params, params), moved._replace(params=())

            of_body, new_body = step_of(body, joined)
            of_head, new_head = step_of(head, lambda new, old: joined(old, new))
            return tree.select(batch.step < head_steps, (of_head, body, new_head), (of_body, new_body, head))

        empty = start._replace(params=())
        params, body, head = client.for_each_batch(self.batches, step, (start.params, empty, empty))
        return Local(params, (), head.loss.merge(body.loss))
