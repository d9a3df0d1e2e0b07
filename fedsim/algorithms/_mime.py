"""Mime and MimeLite: clients imitate a centralized optimizer.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "Mime: Mimicking centralized stochastic
algorithms in federated learning", NeurIPS 2021 ("Breaking the centralized barrier for cross-device federated learning"),
Algorithm 1: https://arxiv.org/abs/2008.03606. A base algorithm takes steps U(g, s) and updates its statistics by V(g, s). With
x and s from the server, c = mean_S ∇f_i(x), and ζ a batch::

    y = x;  K times:  y = y - η U(g, s)
        g = ∇f_i(y; ζ) - ∇f_i(x; ζ) + c         Mime
        g = ∇f_i(y; ζ)                           MimeLite
    s = V(c, s),     x = mean_S y

Any optax transformation can be the base algorithm. U is the step of its ``update`` from the server's s, and V is the state that
``update`` computes from s and c. So a statistic includes the local gradient before the step, as the paper's momentum does. A
learning rate that counts updates counts rounds.

Deviations: in the paper's U, only the momentum m includes the local gradient, and the second moment v of RMSProp,
AdaGrad and Adam is the server's; a step of optax has g² in v, too, as in FedJAX. Means are weighted by ``weighting``
(``"uniform"`` is the paper's). The gradient for ``server_optimizer`` is the mean of x - y. With the default server optimizer,
the last equation holds. An ``aggregator`` other than the mean replaces both means, and c is its aggregate of the gradients.
`MimeLite` sends the pair (movement, gradient) as one update, which is clipped and compared with other updates as one. In `Mime`
they are two updates, one after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._descent import check_needs_no_loss, constants
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining, optimizer_of_round
from fedsim.algorithms._server_step import ServerState
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, Clients, ClientUpdate, RoundInfo

_REFUSED = {
    "kept": "clients train with statistics of the server's optimizer, which has none of these; use another algorithm, such as "
    "SCAFFOLD"
}


class MimeState(NamedTuple):
    """`ServerState` and the base algorithm's statistics s."""

    params: Params
    opt_state: Any
    round: jax.Array
    statistics: optax.OptState


class MimeShared(NamedTuple):
    """What clients receive: `Shared`, the base algorithm's statistics s, and for Mime the cohort's gradient c at x."""

    params: Params
    round: jax.Array
    statistics: optax.OptState
    gradient: Params = ()


def imitating(training: LocalTraining, statistics: optax.OptState) -> LocalTraining:
    """Returns training whose optimizer takes every step from these statistics."""
    optimizer = optax.with_extra_args_support(training.optimizer)

    def update(gradient: Params, state: Any, params: Params, **extra: Any) -> tuple[Params, optax.OptState]:
        return optimizer.update(gradient, state, params, **extra)[0], statistics

    fixed = optax.GradientTransformationExtraArgs(lambda params: statistics, update)
    return dataclasses.replace(training, optimizer=fixed)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MimeLite(FedAvg):
    """FedAvg whose clients use the server's optimizer statistics, which stay fixed during local training.

    A client also sends its full gradient at x, which takes one more pass over its examples per round.

    Attributes:
      client_optimizer: the base algorithm, an optax transformation such as ``optax.sgd(0.1, momentum=0.9)``. The server keeps
        its state. As in `FedAvg`, it may be a function from the round to a transformation, if all states have the same
        structure.
      model, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: see `FedAvg`. Before the first round: the client optimizer needs the loss.

    >>> import fedsim, jax.numpy as jnp
    >>> algorithm = MimeLite(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1, momentum=0.9),
    ...                      batches=fedsim.Batches(size=20, epochs=5))
    >>> state = algorithm.init(jax.random.key(0))
    >>> momentum = state.statistics[0].trace
    >>> jax.tree.map(jnp.shape, momentum) == jax.tree.map(jnp.shape, state.params)
    True
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True, refused_parts=_REFUSED)
    preview = "the gradient"

    def init(self, key: jax.Array) -> MimeState:
        return _first_state(self, super().init(key))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        _check(self)

    def broadcast(self, state: MimeState) -> MimeShared:
        return MimeShared(state.params, state.round, state.statistics)

    def local_training(self, shared: MimeShared, client: Client) -> LocalTraining:
        return imitating(super().local_training(shared, client), shared.statistics)

    def client_update(self, shared: MimeShared, client: Client) -> ClientUpdate:
        _, gradient = self.local_training(shared, client).full_gradient(client, shared.params)
        result = super().client_update(shared, client)
        return result._replace(update=(result.update, gradient))

    def server_update(self, state: MimeState, update: Any, info: RoundInfo) -> MimeState:
        movement, gradient = update
        return super().server_update(state, movement, info)._replace(statistics=_new_statistics(self, state, gradient))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mime(FedAvg):
    """MimeLite whose clients also correct every gradient with the cohort's full gradient c, as in SVRG: g(y) - g(x) + c.

    A round calls its clients twice, first to compute c and then to train, and they receive x both times. A step computes two
    gradients. The ``aggregator`` and the ``downlink`` apply both times, each time with a separate memory and separate noise.
    The round's bits are the sum of both. Attackers attack both times.

    Attributes:
      client_optimizer: see `MimeLite`.
      model, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: see `MimeLite`; or it is given as ``fine_tune`` to `fedsim.evaluate_personalized`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 8, 8, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> infos = []
    >>> for cls in (FedAvg, Mime):
    ...     algorithm = cls(
    ...         model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2))
    ...     infos.append(algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))[1])
    >>> [info.clients["bits_up"].tolist() for info in infos]
    [[20800, 20800], [41600, 41600]]
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True, refused_parts=_REFUSED)
    preview = "the gradient"

    def init(self, key: jax.Array) -> MimeState:
        return _first_state(self, super().init(key))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        _check(self)

    def broadcast(self, state: MimeState) -> MimeShared:
        return MimeShared(state.params, state.round, state.statistics)

    def round(self, state: MimeState, clients: Clients) -> tuple[MimeState, RoundInfo]:
        shared = self.broadcast(state)
        gradient, _ = clients.aggregate(self.client_full_gradient, shared, name="gradient", trains=False)
        movement, info = clients.aggregate(self.client_update, shared._replace(gradient=gradient))
        return self.server_update(state, (movement, gradient), info), info

    def client_full_gradient(self, shared: MimeShared, client: Client) -> ClientUpdate:
        """Returns what a client sends in the first call: its full gradient at x."""
        _, gradient = super().local_training(shared, client).full_gradient(client, shared.params)
        return ClientUpdate(gradient, self.weight(client))

    def local_training(self, shared: MimeShared, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)

        def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            loss, here = training.step_gradient(params, batch)
            _, there = training.step_gradient(shared.params, batch)
            return loss, tree.add(tree.subtract(here, there), shared.gradient)

        corrected = dataclasses.replace(training, gradient=gradient, objective=training.step_value, terms=())
        return imitating(corrected, shared.statistics)

    def train(self, shared: MimeShared, client: Client) -> Local:
        if shared.gradient == ():
            raise ValueError(
                "The local steps of Mime need the cohort's gradient, which the server has only within a round, so that Mime "
                "cannot be fine_tune: use MimeLite or FedAvg."
            )
        return super().train(shared, client)

    def server_update(self, state: MimeState, update: Any, info: RoundInfo) -> MimeState:
        movement, gradient = update
        return super().server_update(state, movement, info)._replace(statistics=_new_statistics(self, state, gradient))


def _check(algorithm: FedAvg) -> None:
    """Raises ``ValueError`` if the base algorithm needs the loss, which V(c, s) has not."""
    optimizer = optimizer_of_round(algorithm.client_optimizer, jnp.int32(0))
    check_needs_no_loss(f"{type(algorithm).__name__}, whose server has no loss", optimizer, constants(algorithm.model, 0))


def _first_state(algorithm: FedAvg, state: ServerState) -> MimeState:
    statistics = optimizer_of_round(algorithm.client_optimizer, state.round).init(state.params)
    return MimeState(**state._asdict(), statistics=statistics)


def _new_statistics(algorithm: FedAvg, state: MimeState, gradient: Params) -> optax.OptState:
    """Returns V(c, s), where ``gradient`` is c."""
    return optimizer_of_round(algorithm.client_optimizer, state.round).update(gradient, state.statistics, state.params)[1]
