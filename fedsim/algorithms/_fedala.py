"""FedALA: adaptive local aggregation.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive local aggregation for personalized federated
learning", AAAI 2023, Algorithm 1: https://arxiv.org/abs/2212.01197. Client i keeps the model Θ_i with which it ended its last
round, and weights W_i of the shape of the upper layers, which are 1 at first. It starts a round from θ, which is the server's
model Θ in the lower layers, and in the upper layers::

    θ = Θ_i + (Θ - Θ_i) ⊙ W_i,     W_i = clip(W_i - η ∇_θ ℓ(θ) ⊙ (Θ - Θ_i), 0, 1)

Deviations: the weights learn in one pass over all of a client's examples in each round; the paper takes passes over a random
part of them, until they converge in the first round and one later. The upper layers are the ``head``. In a client's first round
Θ_i is Θ. The batches of the pass are those of ``batches``. Clients are weighted by ``weighting``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import widened
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate
from fedsim.transfer import Head, head_of, in_head


class FedALAMemory(NamedTuple):
    """What a client keeps: the model Θ_i of its last round, and the weights W_i, which are 1 in the lower layers.

    The weights are sums of small steps, and have at least the precision of ``float32``.
    """

    params: Params
    weights: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedALA(FedAvg):
    """FedAvg whose clients start from a mixture of the server's and their own last model, with a learned weight per parameter.

    The mixture is the client's personal model, which `fedsim.evaluate_personalized` evaluates: there, clients that have kept a
    model learn their weights anew from the examples. A client keeps two arrays as large as the parameters.

    Attributes:
      weight_learning_rate: η, above 0, of the weights of the mixture. The paper takes 1.
      head: the upper layers, whose parameters are mixed: a function from a Haiku module's name and a parameter's name, see
        `fedsim.transfer.head_of`. With None, they are the module that the model creates last, usually the output layer. With
        no upper layers, the algorithm is FedAvg.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``weight_learning_rate`` is not above 0, or ``head`` is neither a function nor None.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = FedALA(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for round in range(5):
    ...     state, _ = algorithm.apply(state, fedsim.Cohort.of(data, ["0", "1"], round=round))
    >>> fedsim.evaluate_personalized(algorithm, state, data, data).overall["accuracy"] > 0.8
    True
    """

    capabilities = Capabilities(
        minimizes=False,  # Clients start from different models.
        scalable=True,
        microbatches=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "clients mix models of two rounds, and would need these of both; use a model without, such as one with GroupNorm",
        ),
    )

    weight_learning_rate: float = 1.0
    head: Head | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(weight_learning_rate=self.weight_learning_rate)
        if self.head is not None:
            head_of(self.model, self.head)  # raises ValueError

    def client_memory(self, shared: Any) -> FedALAMemory:
        return FedALAMemory(shared.params, jax.tree.map(jnp.ones_like, widened(shared.params)))

    def mixture(self, shared: Any, client: Client) -> FedALAMemory:
        """Returns the model from which a client starts, and the weights with which it is mixed."""
        training, own = self.local_training(shared, client), client.memory.params
        # Where this is 0, the weights do not change.
        difference = tree.subtract(shared.params, own)
        upper = in_head(self.model, shared.params, self.head)

        def mixed(weights: Params) -> Params:
            return jax.tree.map(
                lambda is_upper, x, y, d, w: y + d * w.astype(d.dtype) if is_upper else x,
                *(upper, shared.params, own, difference, weights),
            )

        def step(weights: Params, batch: Batch) -> Params:
            _, slope = training.loss_and_gradient(mixed(weights), batch)

            def of_leaf(is_upper: bool, w: jax.Array, g: jax.Array, d: jax.Array) -> jax.Array:
                moved = self.weight_learning_rate * g.astype(w.dtype) * d.astype(w.dtype)
                return jnp.clip(w - moved, 0, 1).astype(w.dtype) if is_upper else w

            return jax.tree.map(of_leaf, upper, weights, slope, difference)

        weights = client.for_each_batch(self.batches.one_pass(), step, client.memory.weights, "weights")
        return FedALAMemory(mixed(weights), weights)

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of the client's personal model, the mixture."""
        return self.mixture(shared, client).params

    def train(self, shared: Any, client: Client) -> Local:
        return self.local_training(shared, client).run(client, self.personal_params(shared, client))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        start = self.mixture(shared, client)
        local = self.local_training(shared, client).run(client, start.params)
        movement, memory = tree.subtract(shared.params, local.params), FedALAMemory(local.params, start.weights)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, memory)
