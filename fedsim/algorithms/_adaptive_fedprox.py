"""FedProx with a mu that follows the training loss.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, section 5.3.2 and appendix C.3.3 (dynamic mu): https://arxiv.org/abs/1812.06127. mu is raised by 0.1 whenever the loss
increases, and lowered by 0.1 when it decreases five times in a row. Deviation: the paper looks at the loss of all devices
after every round; here it is the mean loss, at the parameters that they are sent, of a round's own clients. So what a round
does to the loss changes mu in the round after the next, and if few clients take part the loss also moves with who they are; it
is the loss of training, which dropout makes random.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators import Beside, Noted
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._fedprox import FedProx
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._loss_before import LossBefore
from fedsim.execution import Client, ClientUpdate


class Trend(NamedTuple):
    """``mu`` of the next round and the ``loss`` of the last, ``float32 []``; how often it fell in a row, ``int32 []``."""

    mu: jax.Array
    loss: jax.Array
    falls: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdaptiveFedProx(LossBefore, FedProx):
    """FedProx that raises mu when the loss rises and lowers it, never below 0, when it keeps falling.

    A client takes one more pass over its examples, for their loss before it trains. ``state.more`` has mu and the loss.

    Attributes:
      mu: in the first rounds. The paper starts from 1 on IID data and from 0 on other, to show that either is mended.
      mu_step: how much mu changes at a time.
      patience: falls in a row that lower it.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``mu`` below 0, ``mu_step`` not above 0, ``patience`` below 1.

    >>> import optax, fedsim
    >>> AdaptiveFedProx(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), patience=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected patience >= 1, got patience=0: give a positive whole number.
    """

    mu: float = 0.0
    mu_step: float = 0.1
    patience: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", Beside.around(self.aggregator))
        checks.positive(mu_step=self.mu_step)
        checks.whole(1, patience=self.patience)

    def init(self, key: jax.Array) -> ServerState:
        return super().init(key)._replace(more=Trend(jnp.float32(self.mu), jnp.float32(jnp.nan), jnp.int32(0)))

    def broadcast(self, state: ServerState) -> Shared:
        return Shared(state.params, state.round, state.more.mu)

    def proximity(self, shared: Shared) -> jax.Array:
        return shared.more

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result = super().client_final(shared, state, client)
        return result._replace(update=Noted(result.update, self.loss_before(state)))

    def server_update(self, state: ServerState, update: Noted) -> ServerState:
        movement, loss = update
        mu, last, falls = state.more  # last is NaN in the first round: neither a rise nor a fall
        falls = jnp.where(loss < last, falls + 1, 0)
        lower = falls == self.patience
        change = self.mu_step * ((loss > last).astype(jnp.float32) - lower.astype(jnp.float32))
        trend = Trend(jnp.maximum(mu + change, 0.0), loss, jnp.where(lower, 0, falls))
        return super().server_update(state, movement)._replace(more=trend)
