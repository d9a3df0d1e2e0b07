"""FedProto: prototypes of classes instead of parameters.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated prototype learning across heterogeneous
clients", AAAI 2022, Algorithm 1: https://arxiv.org/abs/2105.00243. The prototype of a class is the mean representation of its
examples. Client i sends its prototypes C_i^(j) of the classes j of which it has |D_ij| examples, and trains its own model::

    C^(j) = Σ_i |D_ij| C_i^(j) / Σ_i |D_ij|
    w_i minimizes ℓ + λ mean over examples of ‖z(x) - C^(y)‖² / features

Deviations: the distance is that of each example's representation z, as in the authors' code; in the paper it is that of the
mean of a class. A class without a prototype yet has no distance. A cohort takes part in each round, and a class that none of
its clients has keeps its prototype. Clients send the sum of z over the examples of each class, and beside it the counts |D_ij|,
which attacks and aggregators do not change. So clipping shortens prototypes, and with an aggregator that chooses single
updates, as Krum does, they are no means of examples. All models have one architecture, and start from the same random
parameters, which clients generate from a seed that the server sends. Clients classify by their output layer, where the paper
also takes the nearest prototype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, metrics, rng
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.algorithms._local_training import Local, LocalTraining, Schedule, check_client_optimizer
from fedsim.algorithms._representation import Representation, features_of
from fedsim.data import Batch, FederatedData
from fedsim.model import PARTS_IN_WORDS, Model, Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class FedProtoState(NamedTuple):
    """What the server keeps and sends.

    Attributes:
      params: the prototypes, ``float32 [classes, features]``, 0 for a class that no client has had yet.
      known: whether there is a prototype, ``bool [classes]``.
      round: the number of rounds so far, ``int32 []``.
      seed: the seed of clients' initial parameters, ``uint32 []``.
    """

    params: jax.Array
    known: jax.Array
    round: jax.Array
    seed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedProto(Algorithm):
    """Clients train models of their own, pulled towards prototypes of classes, which alone are sent and averaged.

    A message has one vector of features for each class, whatever the size of the model. There is no global model;
    `fedsim.evaluate_personalized` evaluates each client's own.

    Attributes:
      model: a model of classes, with ``num_classes`` and the label ``y``.
      client_optimizer: see `FedAvg`.
      lam: λ, at least 0. With 0, clients train alone. The paper takes 1.
      representation: see `MOON`.

    Raises:
      ValueError: ``lam`` is negative, or ``model`` has no ``num_classes``. In the first round: see `MOON`.

    >>> import fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = FedProto(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.params.shape, info.clients["bits_up"].tolist()  # 10 vectors of 64 features, and 10 counts
    ((10, 64), [20800, 20800])
    """

    capabilities = Capabilities(
        minimizes=False,  # There is no global model.
        scalable=False,
        microbatches=True,
        refused_parts=dict.fromkeys(
            PARTS_IN_WORDS,
            "each client keeps a whole model, and the server has none; use a model without, such as one with GroupNorm",
        ),
    )

    model: Model
    client_optimizer: optax.GradientTransformation | Schedule
    lam: float = 1.0
    representation: Representation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Model, "fedsim.models.emnist_dense()", model=self.model)
        checks.optimizer(or_schedule=True, client_optimizer=self.client_optimizer)
        checks.number(least=0, lam=self.lam)
        checks.whole(1, num_classes=self.model.num_classes, remedy="prototypes are of classes, so give the model a number")
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_client_optimizer(self.model, self.client_optimizer, self.batches, data)

    def init(self, key: jax.Array) -> FedProtoState:
        examples = self.model.dummy_examples(1)
        features = jax.eval_shape(lambda key: self._features(self.model.init_whole(key), examples, None), key).shape[1]
        classes, seed = self.model.num_classes or 0, jax.random.bits(rng.stream(key, "model"), dtype=jnp.uint32)
        return FedProtoState(jnp.zeros([classes, features]), jnp.zeros(classes, bool), jnp.int32(0), seed)

    @property
    def _features(self) -> Any:
        return features_of(self.model, self.representation)

    def client_memory(self, shared: FedProtoState) -> Params:
        return self.model.init(jax.random.key(shared.seed, impl=rng.IMPLEMENTATION))

    def personal_params(self, shared: FedProtoState, client: Client) -> Params:
        """Returns the parameters of the client's own model."""
        return client.memory

    def client_loss(self, shared: FedProtoState, params: Params, batch: Batch) -> jax.Array:
        """Returns the loss without the distance to prototypes. Override this method to use another loss."""
        return self.model.train_loss(params, batch)

    def distance(self, features: jax.Array, means: jax.Array) -> jax.Array:
        """Returns the distance of each example from the mean of its class, ``float32 [n]``, both ``float [n, features]``."""
        return jnp.mean(jnp.square(features - means), axis=1)

    def local_training(self, shared: FedProtoState, client: Client) -> LocalTraining:
        """Returns how a client trains, with the distance to prototypes."""
        training = LocalTraining.of(self, shared)

        def loss(params: Params, batch: Batch) -> jax.Array:
            label = batch.examples["y"]
            features = self._features(params, batch.examples, batch.key)
            distance = jnp.where(shared.known[label], self.distance(features, shared.params[label]), 0.0)
            return training.loss(params, batch) + self.lam * metrics.masked_mean(distance, batch.mask)

        return dataclasses.replace(training, loss=loss)

    def train(self, shared: FedProtoState, client: Client) -> Local:
        """Returns the result of a client's local steps from its own model."""
        return self.local_training(shared, client).run(client, client.memory)

    def client_update(self, shared: FedProtoState, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, "what its clients send of their classes has no noise")
        local = self.train(shared, client)

        def add(sums: tuple[jax.Array, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
            of_class = jnp.where(batch.mask[:, None], jax.nn.one_hot(batch.examples["y"], len(shared.known)), 0.0)
            features = self._features(local.params, batch.examples, None)
            return sums[0] + of_class.T @ features, sums[1] + jnp.sum(of_class, axis=0)

        zero = jnp.zeros_like(shared.params), jnp.zeros(len(shared.known))
        sums = client.for_each_batch(self.batches.one_pass(), add, zero, "prototypes")
        return ClientUpdate(WithAux(*sums), jnp.float32(1), {"loss": local.loss.result()}, local.params)

    def server_update(self, state: FedProtoState, update: WithAux, info: RoundInfo) -> FedProtoState:
        features, counts = update
        found = counts > 0
        means = features / jnp.where(found, counts, 1.0)[:, None]
        params = jnp.where(found[:, None], means, state.params)
        return state._replace(params=params, known=state.known | found, round=state.round + 1)
