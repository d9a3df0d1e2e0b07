"""Federated representation learning (FedRep).

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting shared representations for personalized federated learning",
ICML 2021, Algorithm 1: https://arxiv.org/abs/2102.07078. Its representation φ is the body here. Of a client's steps, the first
τ_h train the head and the others, τ_φ of them, the body. Deviations: τ_h is a fraction of the steps that ``batches`` gives, so
that it suits clients of any size; and clients are weighted by ``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._fedper import FedPer
from fedsim.algorithms._gradient_server import Shared
from fedsim.data import Batch
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Halves(NamedTuple):
    """Body and head, each with an optimizer's state of its own, and how many steps are the head's, ``int32 []``."""

    body: ClientState
    head: ClientState
    head_steps: jax.Array

    @property
    def params(self) -> Params:
        return hk.data_structures.merge(self.body.params, self.head.params)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedRep(FedPer):
    """FedPer whose clients first fit their head to the server's body, and then the body to their head.

    Attributes:
      head_fraction: in [0, 1], of a client's steps, rounded down to whole ones: those that train the head. The paper's
        experiments train it for ten epochs of eleven, which is ``10 / 11`` with ``Batches(epochs=11)``: of one epoch alone, the
        body would get a tenth of FedAvg's steps.
      head: see `FedPer`.

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

    def client_init(self, shared: Shared, client: Client) -> Any:
        # 0.7 of 10 is 7, also where a float has it a little below.
        head_steps = jnp.floor(client.num_steps.astype(jnp.float32) * self.head_fraction + 1e-3).astype(jnp.int32)
        return Halves(self.set_out(shared, shared.params), self.set_out(shared, client.memory), head_steps)

    def client_step(self, shared: Shared, state: Any, batch: Batch) -> Any:
        def loss(body: Params, head: Params) -> jax.Array:
            return self.client_loss(shared, hk.data_structures.merge(body, head), batch)

        # Both gradients come from one pass back through the network; the half whose turn it is not stays as it was.
        body = self.descend(shared, state.body, batch, lambda body: loss(body, state.head.params))
        head = self.descend(shared, state.head, batch, lambda head: loss(state.body.params, head))
        return tree.select(batch.step < state.head_steps, state._replace(head=head), state._replace(body=body))

    def client_final(self, shared: Shared, state: Any, client: Client) -> ClientUpdate:
        loss = state.head.loss.merge(state.body.loss)
        return super().client_final(shared, ClientState(state.params, (), loss), client)
