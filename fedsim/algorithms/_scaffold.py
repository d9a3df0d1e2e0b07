"""SCAFFOLD: stochastic controlled averaging.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic controlled averaging for
federated learning", ICML 2020, Algorithm 1: https://arxiv.org/abs/1910.06378. With c_i what client i keeps, c what the server
keeps, both 0 at first, S the cohort, N the clients that have examples, g_i(·) the client's gradients::

    y = x;  K times:  y = y - η_l (g_i(y) - c_i + c)
    c_i' = g_i(x)                               option I, on all of the client's examples
    c_i' = c_i - c + (x - y) / (K η_l)          option II
    x = x + η_g mean_S (y - x),     c = c + |S| / N mean_S (c_i' - c_i)

η_l is ``client_optimizer``'s rate, η_g ``server_optimizer``'s. Deviations: none in these lines. Beyond the paper, K η_l is
measured (`fedsim.algorithms._reach`), which for momentum or a rate that changes gives its weighted mean of gradients; and with
``weighting="examples"`` both means are weighted, and |S| / N is the cohort's part of all examples, so that c stays the mean of
all c_i. Where what arrives of a client's change is clipped or compressed, its variate changes by that, so that this stays so;
an attack, or an aggregator that is no mean (a median, Krum) or adds noise, leaves c apart from the mean of c_i. The paper
starts its experiments with c_i = 0, its theorems with c_i = g_i(x).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._fedsgd import FullGradient
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._reach import Reach, must_be_linear
from fedsim.algorithms._tilted import Tilted
from fedsim.data import Batch, Batches, FederatedData
from fedsim.execution import Client, ClientUpdate, Turnout
from fedsim.model import Params


class Control(NamedTuple):
    """``correction``, c - c_i, and what the client's new variate is made of."""

    correction: Params
    source: FullGradient | Reach


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SCAFFOLD(Tilted):
    """FedAvg whose clients correct every gradient by what they know of the others: g - c_i + c.

    A client keeps its variate c_i between rounds (as much as the parameters), sends its change beside its movement, and gets c
    beside x.

    Attributes:
      option: how a client renews its variate: ``"I"``, its full gradient at x, for one more pass over its examples; ``"II"``,
        the mean of the gradients on its way, for nothing.
      weighting: default ``"uniform"``, the paper's; see `GradientServer`.
      client_optimizer: see `FedAvg`. With option II, SGD with or without momentum.
      model, server_optimizer: see `GradientServer`.

    Raises:
      ValueError: another option; with option II, before the first round, an optimizer that is not linear in the gradients.

    >>> import optax, fedsim
    >>> SCAFFOLD(
    ...     model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), client_optimizer=optax.sgd(0.1), option=2)
    Traceback (most recent call last):
    ...
    ValueError: Expected option to be 'I' or 'II', got option=2.
    """

    option: Literal["I", "II"] = "II"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("I", "II", option=self.option)

    @property
    def preview(self) -> Batches | None:
        return self.batches.one_pass() if self.option == "I" else None

    def broadcast(self, state: ServerState) -> Shared:
        return Shared(state.params, state.round, state.more)

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        source = FullGradient.zero(shared.params) if self.option == "I" else Reach.zero(self._client_optimizer(shared.round))
        return super().client_init(shared, client)._replace(more=Control(tree.subtract(shared.more, client.memory), source))

    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        correction, source = state.more
        return state._replace(more=Control(correction, source.add(self.client_loss, shared, batch)))

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradient = super().client_gradient(shared, state, batch)
        return loss, tree.add(gradient, state.more.correction)

    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        correction, source = state.more
        source = source if self.option == "I" else source.step(self._client_optimizer(shared.round))
        return super().client_step(shared, state, batch)._replace(more=Control(correction, source))

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result, source = super().client_final(shared, state, client), state.more.source
        if isinstance(source, FullGradient):
            change = tree.subtract(source.mean(shared.params), client.memory)
        else:  # Who has not come anywhere, at a rate of 0, has learnt nothing of its gradients.
            change = tree.subtract(source.mean(result.update), shared.more)
            change = tree.select(source.come == 0, jax.tree.map(jnp.zeros_like, change), change)
        return result._replace(update=(result.update, change))

    def client_sent(self, result: ClientUpdate, client: Client, arrived: Any) -> Params:
        return tree.add(client.memory, arrived[1])

    def server_round(self, state: ServerState, update: Any, turnout: Turnout) -> ServerState:
        movement, change = update
        control = tree.add(state.more, tree.scale(change, self.share(turnout)))
        return self.server_update(state, movement)._replace(more=control)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.option == "II":
            must_be_linear("SCAFFOLD's option II", self._client_optimizer)
