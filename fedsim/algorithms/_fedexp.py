"""FedExP: federated averaging with extrapolation.

D. Jhunjhunwala, S. Wang, G. Joshi, "FedExP: Speeding up federated averaging via extrapolation", ICLR 2023, Algorithm 1:
https://arxiv.org/abs/2301.09604. With Δ_i = x - x_i the update of client i, M the number of clients in the round, and Δ the
mean of the Δ_i::

    η_g = max(1, Σ_i ‖Δ_i‖² / (2 M (‖Δ‖² + ε))),     x = x - η_g Δ

Deviations: with ``weighting="examples"`` both means are weighted. The gradient for ``server_optimizer`` is η_g Δ. With the
default server optimizer, the last equation holds. The paper evaluates the mean of the last two models, because the models of
single rounds oscillate; `state.params` is the last one, and ``averaging=0.5`` gives a mean of the last ones. Δ_i is the update
as the server receives it, after clipping and compression. A client sends its ‖Δ_i‖² as a number beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import AuxMean, Memory, Sent, Update, WithAux, WithHistory, WithShortness
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import FederatedData
from fedsim.rounds import Client, ClientUpdate, RoundInfo


@dataclasses.dataclass(frozen=True, eq=False)
class SquaredNormMean(AuxMean):
    """`AuxMean` whose auxiliary data is the squared norm of each update as the server receives it."""

    def send(self, update: WithAux, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent = super().send(update, server_memory, memory, key)
        received: Update = sent.update.update
        own = received.update if isinstance(received, WithHistory | WithShortness) else received
        return sent._replace(update=WithAux(received, tree.squared_norm(own)))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedExP(FedAvg):
    """FedAvg whose server takes longer steps, the more the clients' updates differ in direction: extrapolation.

    The step is η_g ≥ 1 times the mean update. It is 1 if the clients agree, and grows as their updates cancel each other.

    Attributes:
      epsilon: ε, above 0, in units of a squared update. It bounds η_g where the mean update vanishes. It should be no larger
        than ``‖Δ‖²`` in the rounds that matter, or the algorithm is FedAvg. Where the losses of clients have different minima,
        a small one makes the server oscillate around the common minimum.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``epsilon`` is not above 0. Before the first round: the aggregator is `PartlyUniform`.

    >>> import jax, optax, fedsim
    >>> settings = {"model": fedsim.models.digits_logistic(), "client_optimizer": optax.sgd(0.1),
    ...             "batches": fedsim.Batches(size=20)}
    >>> cohort = fedsim.Cohort.of(fedsim.datasets.load("digits", clients=4).train, ["0", "1", "2", "3"])
    >>> moved = []
    >>> for algorithm in (fedsim.algorithms.FedAvg(**settings), FedExP(**settings)):
    ...     start = algorithm.init(jax.random.key(0))
    ...     end, _ = algorithm.apply(start, cohort)
    ...     moved.append(tree.squared_norm(tree.subtract(end.params, start.params)))
    >>> bool(moved[1] >= moved[0])
    True
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True, quadratic={"epsilon": 0.1})

    epsilon: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(epsilon=self.epsilon)
        if not isinstance(self.aggregator, SquaredNormMean):
            object.__setattr__(self, "aggregator", SquaredNormMean(inner=self.aggregator))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, "the server divides the mean of the squared norms by the squared norm of the mean")

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        result = super().client_update(shared, client)
        return result._replace(update=WithAux(result.update, jnp.float32(0)))  # The aggregator has the norm of what is sent.

    def server_update(self, state: Any, update: WithAux, info: RoundInfo) -> Any:
        movement, squared_norm = update
        rate = jnp.maximum(1.0, squared_norm / (2 * (tree.squared_norm(movement) + self.epsilon)))
        return super().server_update(state, tree.scale(movement, rate), info)
