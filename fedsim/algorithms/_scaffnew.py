"""Scaffnew: ProxSkip for federated learning.

K. Mishchenko, G. Malinovsky, S. Stich, P. Richtárik, "ProxSkip: Yes! Local gradient steps provably lead to communication
acceleration! Finally!", ICML 2022, Algorithm 2: https://arxiv.org/abs/2202.09357. Client i keeps a control variate h_i, which
is 0 at first. After each step the clients communicate with probability p. In a round, which is the steps until they
communicate::

    y_i = x;  until communication:  y_i = y_i - γ (g_i(y_i) - h_i)
    x = mean_i y_i,     h_i = h_i + p / γ (x - y_i)

γ is the learning rate of ``client_optimizer``.

Deviations: the number of steps is not random but that of ``batches``, with p the inverse of this number. The paper has all
clients in each round; here, clients outside of the cohort keep their h_i, so that the h_i still add up to 0. The cohort
receives the mean of its updates at the end of a round, and new clients receive x at the start of theirs, so both count as sent.
γ is measured (see `fedsim.algorithms._distance`). With ``weighting="examples"`` the mean is weighted. If updates are clipped or
compressed, h_i uses the update that the server receives. An attack, an aggregator that is not a mean or that adds noise, or a
compressed mean (``downlink``) makes the sum of the h_i differ from 0. With the default server optimizer, x is the mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import Mean
from fedsim.algorithm import Capabilities
from fedsim.algorithms._distance import check_linear, measured
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_step import Shared
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, Clients, ClientUpdate, RoundInfo


class ScaffnewMemory(NamedTuple):
    """A client's h_i, with the shapes of the parameters, and what it still subtracts of the round's mean update.

    ``factor`` is ``float32 []``: p / γ between a client's steps and the end of the round, and else 0.
    """

    control: Params
    factor: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scaffnew(FedAvg):
    """FedAvg with control variates that make local steps speed up convergence: h_i changes by how far i is from the mean.

    A client keeps h_i between rounds, which is as large as the parameters. It sends no more than in FedAvg.

    Attributes:
      p: the probability of communication after a step, in (0, 1], by which h_i changes. None takes the inverse of a client's
        number of steps. If clients take different numbers of steps, as with ``Batches(epochs=...)`` and unequal data, the h_i
        then add up to 0 no more: take ``Batches(steps=K)``, as the paper does, or give one p, at most 1 / K for the largest K.
      weighting: default ``"uniform"``, as in the paper; see `FedAvg`.
      client_optimizer: see `FedAvg`. It must be SGD, with or without momentum. A learning rate that is not 0 must move the
        parameters by much more than their rounding (6e-8 of their size in ``float32``), because movements are divided by it.
      model, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: ``p`` is not in (0, 1]. Before the first round: the client optimizer is not linear in the gradients,
        or not alike for all parameters, or parameters are in half precision.

    >>> import optax, fedsim
    >>> Scaffnew(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), p=2.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 < p <= 1, or None, got p=2.0.
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True, accumulates=True)

    p: float | None = None
    weighting: Literal["examples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(above=0, most=1, or_none=True, p=self.p)

    def client_memory(self, shared: Any) -> ScaffnewMemory:
        return ScaffnewMemory(jax.tree.map(jnp.zeros_like, shared.params), jnp.float32(0))

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        correction = tree.scale(client.memory.control, -1.0)
        return measured(super().local_training(shared, client).with_term(None, lambda params: correction))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        length = local.opt_state.length  # γ times the number of steps, without momentum
        steps = 1.0 if self.p is None else self.p * client.num_steps.astype(jnp.float32)
        factor = jnp.where(length == 0, 0.0, steps / jnp.where(length == 0, 1.0, length))
        movement = tree.subtract(shared.params, local.params)
        memory = lambda arrived: ScaffnewMemory(  # noqa: E731
            tree.add(client.memory.control, tree.scale(arrived, factor)), factor
        )
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, memory, local.parts)

    def communicated(self, mean: Shared, client: Client) -> ClientUpdate:
        """Subtracts the round's mean update from a client's h_i. It sends a number, since it has nothing more to send."""
        control, factor = client.memory
        memory = ScaffnewMemory(tree.subtract(control, tree.scale(mean.params, factor)), jnp.float32(0))
        # A client whose update was dropped does not count here either, and keeps what it had.
        return ClientUpdate(jnp.float32(0), jnp.where(factor == 0, 0.0, self.weight(client)), memory=memory)

    def round(self, state: Any, clients: Clients) -> tuple[Any, RoundInfo]:
        mean, info = clients.aggregate(self.client_update, self.broadcast(state))
        after = self.server_update(state, mean, info)
        sent = Shared(mean, state.round)
        _, whole = clients.aggregate(self.communicated, sent, name="control", aggregator=Mean(), trains=False)
        # Bits and dropped clients are those of both calls, the rest is that of the call that trains.
        of_both = ("bits_up", "bits_down", "entropy_bits_up", "dropped")
        trained = {name: x for name, x in info.clients.items() if name not in of_both}
        return after, whole._replace(clients={**whole.clients, **trained}, num_aggregated=info.num_aggregated)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_linear("Scaffnew", self.client_optimizer, self.model)
