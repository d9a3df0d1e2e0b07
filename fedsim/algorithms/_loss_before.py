"""What q-FedAvg and FedProx with an adaptive mu share: clients that know their loss before they train.

It is the loss that they train by: with dropout it is random, by keys of this pass alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import metrics
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import Shared
from fedsim.data import Batch, Batches
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LossBefore(FedAvg):
    """FedAvg whose clients read their examples once before they train, for their mean loss at what they were sent.

    >>> import optax, fedsim
    >>> LossBefore(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1),
    ...     batches=fedsim.Batches(size=20, epochs=5)).preview.epochs
    1
    """

    @property
    def preview(self) -> Batches | None:
        return self.batches.one_pass()

    def set_out(self, shared: Shared, params: Params) -> ClientState:
        return super().set_out(shared, params)._replace(more=metrics.Mean(jnp.float32(0), jnp.float32(0)))

    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        seen = jnp.sum(batch.mask, dtype=jnp.float32)
        loss = self.client_loss(shared, shared.params, batch)
        return state._replace(more=state.more.merge(metrics.Mean(loss * seen, seen)))

    def loss_before(self, state: ClientState) -> jax.Array:
        """The mean loss, ``float32 []``."""
        return state.more.result()
