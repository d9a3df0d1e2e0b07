"""FedProx with a mu that adapts to the training loss.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, section 5.3.2 and appendix C.3.3 (dynamic mu): https://arxiv.org/abs/1812.06127. mu increases by 0.1 whenever the loss
increases. It decreases by 0.1 when the loss has decreased five times in a row.

Deviation: the paper uses the loss of all devices after every round. Here it is the mean training loss of the round's clients at
the parameters that they receive. Therefore the effect of a round on the loss changes mu only in the round after the next. If
few clients participate, the loss also depends on which clients these are. With dropout the loss is random.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class AdaptiveState(NamedTuple):
    """`ServerState` with mu and the history of the loss.

    Attributes:
      params, opt_state, round: see `ServerState`.
      mu: mu of the next round, ``float32 []``.
      loss: the loss of the last round, ``float32 []``.
      falls: how many times in a row the loss has decreased, ``int32 []``.
    """

    params: Params
    opt_state: Any
    round: jax.Array
    mu: jax.Array
    loss: jax.Array
    falls: jax.Array


class AdaptiveShared(NamedTuple):
    """What clients receive: `Shared` and the ``mu`` of the round."""

    params: Params
    round: jax.Array
    mu: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdaptiveFedProx(FedAvg):
    """FedProx that increases mu when the loss increases, and decreases mu (never below 0) when the loss keeps decreasing.

    A client makes one more pass over its examples before it trains, to compute their loss. ``state.mu`` and ``state.loss`` hold
    the current values.

    Attributes:
      mu: the initial value. The paper starts from 1 on IID data and from 0 on non-IID data, to show that the rule corrects
        both.
      mu_step: by how much mu changes at a time.
      patience: after how many decreases of the loss in a row mu decreases.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``mu`` is below 0, ``mu_step`` is not above 0, or ``patience`` is below 1.

    >>> import optax, fedsim
    >>> AdaptiveFedProx(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), patience=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected patience >= 1, got patience=0: give a positive whole number.
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True)  # The loss must not be multiplied.
    preview = "the loss before training"

    mu: float = 0.0
    mu_step: float = 0.1
    patience: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))
        checks.number(least=0, mu=self.mu)
        checks.positive(mu_step=self.mu_step)
        checks.whole(1, patience=self.patience)

    def init(self, key: jax.Array) -> AdaptiveState:
        # The loss starts as NaN, so that the first round counts neither as an increase nor as a decrease.
        return AdaptiveState(
            **super().init(key)._asdict(), mu=jnp.float32(self.mu), loss=jnp.float32(jnp.nan), falls=jnp.int32(0)
        )

    def broadcast(self, state: AdaptiveState) -> AdaptiveShared:
        return AdaptiveShared(state.params, state.round, state.mu)

    def local_training(self, shared: AdaptiveShared, client: Client) -> LocalTraining:
        return super().local_training(shared, client).with_proximal_term(shared.mu, shared.params)

    def client_update(self, shared: AdaptiveShared, client: Client) -> ClientUpdate:
        before = self.local_training(shared, client).mean_loss(client, shared.params)
        result = super().client_update(shared, client)
        return result._replace(update=WithAux(result.update, before))

    def server_update(self, state: AdaptiveState, update: WithAux, info: RoundInfo) -> AdaptiveState:
        movement, loss = update
        falls = jnp.where(loss < state.loss, state.falls + 1, 0)
        lower = falls == self.patience
        change = self.mu_step * ((loss > state.loss).astype(jnp.float32) - lower.astype(jnp.float32))
        seen = jnp.maximum(state.mu + change, 0.0), loss, jnp.where(lower, 0, falls)
        # Where noise hides a round without clients, its aggregate has no loss.
        mu, loss, falls = tree.select(info.num_aggregated > 0, seen, (state.mu, state.loss, state.falls))
        return super().server_update(state, movement, info)._replace(mu=mu, loss=loss, falls=falls)
