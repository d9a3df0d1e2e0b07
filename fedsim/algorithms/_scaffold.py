"""SCAFFOLD: stochastic controlled averaging.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic controlled averaging for
federated learning", ICML 2020, Algorithm 1: https://arxiv.org/abs/1910.06378. Client i keeps c_i, and the server keeps c. All
are 0 at first. With S the cohort, N the number of clients that have examples, and g_i(·) the client's gradients::

    y = x;  K times:  y = y - η_l (g_i(y) - c_i + c)
    c_i' = g_i(x)                               option I, on all of the client's examples
    c_i' = c_i - c + (x - y) / (K η_l)          option II
    x = x + η_g mean_S (y - x),     c = c + |S| / N mean_S (c_i' - c_i)

η_l is the learning rate of ``client_optimizer``, and η_g the learning rate of ``server_optimizer``. These equations have no
deviations from the paper.

Extensions: K η_l is measured (see `fedsim.algorithms._distance`). With momentum or a learning rate that changes, option II then
uses a mean of the gradients with the weights of the optimizer. With ``weighting="examples"`` both means are weighted, and
|S| / N becomes the cohort's fraction of all examples, so that c remains the mean of all c_i. If a client's change is clipped or
compressed, its c_i changes by what the server receives, and a staleness weight multiplies this change, so that c still remains
the mean. An attack, an aggregator that is not a mean (a median, Krum), or one that adds noise makes c differ from the mean of
the c_i. The paper's experiments start with c_i = 0, its theorems with c_i = g_i(x).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._distance import check_linear, measured
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class ScaffoldState(NamedTuple):
    """`ServerState` and the server's control variate c, which has the shapes of the parameters."""

    params: Params
    opt_state: Any
    round: jax.Array
    control: Params


class ScaffoldShared(NamedTuple):
    """What clients receive: `Shared` and the server's control variate c."""

    params: Params
    round: jax.Array
    control: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SCAFFOLD(FedAvg):
    """FedAvg whose clients correct every gradient with control variates: g - c_i + c.

    c_i estimates the gradient of the client, and c the mean gradient of all clients. A client keeps c_i between rounds, which
    is as large as the parameters. It sends the change of c_i in addition to its update, and receives c in addition to x.

    Attributes:
      control_variate: how a client updates its control variate. ``"I"`` uses its full gradient at x, which takes one more
        pass over its examples. ``"II"`` uses the mean of its gradients during training, at no cost.
      weighting: default ``"uniform"``, as in the paper; see `FedAvg`.
      client_optimizer: see `FedAvg`. Option II needs SGD, with or without momentum, and a learning rate that is 0 or moves the
        parameters by much more than their rounding (6e-8 of their size in ``float32``), because movements are divided by it.
      model, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: ``control_variate`` has another value. Before the first round: the aggregator is `PartlyUniform`, parameters
        are in half precision, or, with option II, the client optimizer is not linear in the gradients or not alike for all
        parameters.

    >>> import optax, fedsim
    >>> settings = dict(batches=fedsim.Batches(size=20), client_optimizer=optax.sgd(0.1))
    >>> SCAFFOLD(model=fedsim.models.digits_logistic(), control_variate=2, **settings)
    Traceback (most recent call last):
    ...
    ValueError: Expected control_variate to be 'I' or 'II', got control_variate=2.
    """

    capabilities = Capabilities(scalable=False, repeatable=False, model_parts=True, microbatches=True, accumulates=True)

    control_variate: Literal["I", "II"] = "II"
    weighting: Literal["examples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("I", "II", control_variate=self.control_variate)

    @property
    def preview(self) -> str:
        return "the gradient" if self.control_variate == "I" else ""

    def init(self, key: jax.Array) -> ScaffoldState:
        state = super().init(key)
        return ScaffoldState(**state._asdict(), control=jax.tree.map(jnp.zeros_like, state.params))

    def broadcast(self, state: ScaffoldState) -> ScaffoldShared:
        return ScaffoldShared(state.params, state.round, state.control)

    def client_memory(self, shared: ScaffoldShared) -> Params:
        return jax.tree.map(jnp.zeros_like, shared.params)

    def local_training(self, shared: ScaffoldShared, client: Client) -> LocalTraining:
        correction = tree.subtract(shared.control, client.memory)
        training = super().local_training(shared, client).with_term(None, lambda params: correction)
        return training if self.control_variate == "I" else measured(training)

    def client_update(self, shared: ScaffoldShared, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        local = training.run(client, shared.params)
        movement = tree.subtract(shared.params, local.params)
        if self.control_variate == "I":
            change = tree.subtract(training.full_gradient(client, shared.params)[1], client.memory)
        else:
            distance = local.opt_state
            change = tree.subtract(distance.mean_gradient(movement), shared.control)
            # A client with learning rate 0 does not move, so its movement contains no information about its gradients.
            change = tree.select(distance.length == 0, jax.tree.map(jnp.zeros_like, change), change)
        memory = lambda arrived: tree.add(client.memory, tree.scale(arrived[1], client.arrival_weight))  # noqa: E731
        return ClientUpdate((movement, change), self.weight(client), {"loss": local.loss.result()}, memory, local.parts)

    def server_update(self, state: ScaffoldState, update: Any, info: RoundInfo) -> ScaffoldState:
        movement, change = update
        control = tree.add(state.control, tree.scale(change, self.participation(info)))
        return super().server_update(state, movement, info)._replace(control=control)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, "the server multiplies the mean by the cohort's share of all examples")
        if self.control_variate == "II":
            check_linear("SCAFFOLD's option II", self.client_optimizer, self.model)
