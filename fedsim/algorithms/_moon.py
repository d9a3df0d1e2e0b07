"""MOON: model-contrastive federated learning.

Q. Li, B. He, D. Song, "Model-contrastive federated learning", CVPR 2021, Algorithm 1: https://arxiv.org/abs/2103.16257. With z,
z_glob and z_prev the representations of an example by the model w that client i trains, by the server's model, and by the model
with which the client ended its last round::

    ℓ_con = -log (exp(sim(z, z_glob) / τ) / (exp(sim(z, z_glob) / τ) + exp(sim(z, z_prev) / τ)))
    w minimizes ℓ + μ ℓ_con,     sim is the cosine

Deviations: in a client's first round, z_prev is z_glob, so that ℓ_con has no gradient. The paper adds a projection head to its
networks; here the representation is that of the network itself (see ``representation``). All three models have the random draws
of the batch, such as dropout. Clients are weighted by ``weighting``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, metrics
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._representation import Representation, features_of
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MOON(FedAvg):
    """FedAvg with a contrastive loss: representations stay near those of the server's model, away from the client's last ones.

    A client keeps its last model between rounds. A step computes three representations of its batch, and one gradient. The
    ``loss`` in a round's info is the sum of both losses.

    Attributes:
      mu: μ, at least 0. With 0, the algorithm is FedAvg. The paper tries 0.1 to 10.
      temperature: τ, above 0. The paper takes 0.5.
      representation: a function from the model's outputs to the representation, ``[n, ...]``, for networks that return both,
        such as ``lambda outputs: outputs["features"]``. None takes the input of the Haiku module that the model creates last,
        usually the output layer.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``mu`` is negative, or ``temperature`` is not above 0. In the first round: ``representation`` is None, and the
        model's last part is no Haiku module that is called with a representation.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = MOON(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for round in range(5):
    ...     state, info = algorithm.apply(state, fedsim.Cohort.of(data, ["0", "1"], round=round))
    >>> fedsim.evaluate(algorithm.model, state.params, data).overall["accuracy"] > 0.8
    True
    """

    capabilities = Capabilities(
        minimizes=False,  # The contrastive loss has another minimum.
        scalable=True,
        microbatches=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "clients compare models of several rounds, and would need these of each; use a model without, such as one with "
            "GroupNorm",
        ),
    )

    mu: float = 1.0
    temperature: float = 0.5
    representation: Representation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, mu=self.mu)
        checks.positive(temperature=self.temperature)

    def client_memory(self, shared: Any) -> Params:
        return shared.params

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training, features = super().local_training(shared, client), features_of(self.model, self.representation)

        def loss(params: Params, batch: Batch) -> jax.Array:
            z, of_server, of_last = (
                features(each, batch.examples, batch.key) for each in (params, shared.params, client.memory)
            )
            # -log(a / (a + b)) is log(1 + b / a).
            contrast = jax.nn.softplus((_cosine(z, of_last) - _cosine(z, of_server)) / self.temperature)
            return training.loss(params, batch) + self.mu * metrics.masked_mean(contrast, batch.mask)

        return dataclasses.replace(training, loss=loss)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        movement = jax.tree.map(jnp.subtract, shared.params, local.params)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, local.params)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the cosines of rows, ``[n]``; 0 for a row of zeros, also in derivatives."""

    def unit(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=1, keepdims=True), 1e-16))

    return jnp.sum(unit(a) * unit(b), axis=1)
