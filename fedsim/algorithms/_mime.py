"""Mime and MimeLite: clients that mimic a centralized optimizer.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "Mime: Mimicking centralized stochastic
algorithms in federated learning", NeurIPS 2021 ("Breaking the centralized barrier for cross-device federated learning"),
Algorithm 1: https://arxiv.org/abs/2008.03606. A base algorithm steps by U(g, s) and renews its statistics by V(g, s). With x
and s from the server, c = mean_S ∇f_i(x), and ζ a batch::

    y = x;  K times:  y = y - η U(g, s)
        g = ∇f_i(y; ζ) - ∇f_i(x; ζ) + c         Mime
        g = ∇f_i(y; ζ)                           MimeLite
    s = V(c, s),     x = mean_S y

Any optax transformation is a base algorithm: U is the step of its ``update`` from the server's s, V what that makes of s for c
(so a statistic takes the local gradient in before the step, as the paper's momentum does; a rate that counts updates counts
rounds). Deviations: means are weighted by ``weighting`` (the paper's is ``"uniform"``), and ``server_optimizer`` takes the
mean of x - y for its gradient; with its default the last line holds. Another ``aggregator`` than the mean takes the place of
both means, and c is what it makes of the gradients. `MimeLite` sends the pair (movement, gradient), which is clipped and
compared with others' as one update; in `Mime` they are two, one after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import tree
from fedsim.algorithm import Algorithm
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._fedsgd import FedSGD, FullGradient
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._part_of import PartOf
from fedsim.data import Batch, Batches
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Centre(NamedTuple):
    """The base algorithm's state, and for Mime the cohort's gradient c at the server's parameters."""

    opt_state: optax.OptState
    gradient: Params = ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mimicking(FedAvg):
    """FedAvg whose clients step by an optimizer with the server's statistics, frozen while they train; Mime and MimeLite.

    Attributes:
      client_optimizer: the base algorithm, an optax transformation such as ``optax.sgd(0.1, momentum=0.9)``; its state is the
        server's. Or a function from the round to one, as in `FedAvg`, all with states of one structure.
      model, server_optimizer, weighting: see `GradientServer`.
    """

    def init(self, key: jax.Array) -> ServerState:
        state = super().init(key)
        return state._replace(more=Centre(self._client_optimizer(state.round).init(state.params)))

    def broadcast(self, state: ServerState) -> Shared:
        return Shared(state.params, state.round, state.more)

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        return super().client_init(shared, client)._replace(opt_state=shared.more.opt_state)

    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        return super().client_step(shared, state, batch)._replace(opt_state=state.opt_state)

    def mimic(self, state: ServerState, movement: Params, gradient: Params) -> ServerState:
        """The state after the round, with V(gradient, s) for the statistics."""
        _, opt_state = self._client_optimizer(state.round).update(gradient, state.more.opt_state, state.params)
        return super().server_update(state, movement)._replace(more=state.more._replace(opt_state=opt_state))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MimeLite(Mimicking):
    """A client sends its full gradient at x beside its movement, for one more pass over its examples a round.

    Attributes:
      client_optimizer: see `Mimicking`.
      model, server_optimizer, weighting: see `GradientServer`.

    >>> import fedsim
    >>> algorithm = MimeLite(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1, momentum=0.9),
    ...                      batches=fedsim.Batches(size=20, epochs=5))
    >>> state = algorithm.init(jax.random.key(0))
    >>> momentum = state.more.opt_state[0].trace
    >>> jax.tree.map(jnp.shape, momentum) == jax.tree.map(jnp.shape, state.params)
    True
    """

    @property
    def preview(self) -> Batches | None:
        return self.batches.one_pass()

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        return super().client_init(shared, client)._replace(more=FullGradient.zero(shared.params))

    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        return state._replace(more=state.more.add(self.client_loss, shared, batch))

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result = super().client_final(shared, state, client)
        return result._replace(update=(result.update, state.more.mean(shared.params)))

    def server_update(self, state: ServerState, update: Any) -> ServerState:
        return self.mimic(state, *update)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FirstPhase(PartOf, FedSGD):
    """Mime's first pass over the cohort: c, for the second."""

    def server_update(self, state: ServerState, update: Params) -> ServerState:
        return state._replace(more=state.more._replace(gradient=update))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mime(Mimicking):
    """Clients also correct every gradient by the cohort's, as SVRG does: g(y) - g(x) + c.

    A round has two phases, first c and then training: clients are reached twice, and get x both times. A step takes two
    gradients. The ``aggregator`` and the ``downlink``, whatever they are, act in both phases, with a memory and with noise of
    their own in each, and the round's bits are those of both. Attackers attack in both. In the first, `client_loss` gets a
    ``shared`` of parameters and round alone.

    Attributes:
      client_optimizer: see `Mimicking`.
      model, server_optimizer, weighting: see `GradientServer`.

    >>> import fedsim
    >>> algorithm = Mime(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1, momentum=0.9),
    ...                  batches=fedsim.Batches(size=20))
    >>> [type(phase).__name__ for phase in algorithm.phases]
    ['FirstPhase', 'Mime']
    """

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        first = FirstPhase(
            whole=self,
            model=self.model,
            batches=self.batches.one_pass(),
            weighting=self.weighting,
            aggregator=self.aggregator,
            downlink=self.downlink,
        )
        return first, self

    def init(self, key: jax.Array) -> ServerState:
        state = super().init(key)
        return state._replace(more=state.more._replace(gradient=jax.tree.map(jnp.zeros_like, state.params)))

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        loss, here = super().client_gradient(shared, state, batch)
        _, there = super().client_gradient(shared, state._replace(params=shared.params), batch)
        return loss, tree.add(tree.subtract(here, there), shared.more.gradient)

    def server_update(self, state: ServerState, update: Params) -> ServerState:
        return self.mimic(state, update, state.more.gradient)
