"""HypCluster and IFCA: several global models. Every client trains the model that fits its data best.

Y. Mansour, M. Mohri, J. Ro, A. T. Suresh, "Three approaches for personalization with applications to federated learning", 2020,
Algorithm HypCluster: https://arxiv.org/abs/2002.10619. A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for
clustered federated learning", NeurIPS 2020, Algorithm 1 (IFCA) with its option II, model averaging:
https://arxiv.org/abs/2006.04088. Both algorithms do the same, except that HypCluster weights clients by their number of
examples, and IFCA weights them uniformly.

Deviations: a client chooses by the evaluation loss, without dropout. `HypCluster.init_from`, the initialization of HypCluster
that resembles k-means++, follows FedJAX: probabilities are proportional to losses and not to their squares. No client is drawn
twice, because this would produce two models that stay equal forever.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators import Grouped, Groups, Member
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, parts_of
from fedsim.algorithms._server_step import ServerState, Shared, first_state
from fedsim.algorithms._spread_models import spread_models
from fedsim.data import Batch, FederatedData
from fedsim.model import ModelParts, Params, scope_of
from fedsim.rounds import Client, ClientUpdate, FederatedState, RoundInfo

if TYPE_CHECKING:
    Base = FedAvg
else:  # A mixin: the classes that have it are subclasses of FedAvg.
    Base = object

# The axes of the models in a server's state.
AXES = ServerState(0, 0, None)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SeveralModels(Base):
    """What `HypCluster` and `IFCA` share: several models, of which each client trains the one with the smallest loss.

    Attributes:
      num_clusters, aggregator: see `HypCluster`.
    """

    not_differentiable = "lets each client choose the model with the smallest loss"

    capabilities = Capabilities(
        minimizes=False,  # There are several models, each for a part of the clients.
        scalable=True,
        microbatches=True,
        model_parts=True,
        refused_parts=dict.fromkeys(
            ("own_statistics", "kept"),
            "a client compares the losses of several models, and would have these for the one that it has trained; use a model "
            "without, such as one with GroupNorm",
        ),
    )

    num_clusters: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_clusters=self.num_clusters)
        of_one = self.aggregator.inner if isinstance(self.aggregator, Grouped) else self.aggregator
        object.__setattr__(self, "aggregator", Grouped(groups=self.num_clusters, inner=of_one))

    def init(self, key: jax.Array) -> ServerState:
        return self._initial_state(jax.vmap(self.model.init)(jax.random.split(key, self.num_clusters)))

    def model_parts(self, key: jax.Array) -> ModelParts | tuple[()]:
        """Returns the parts of the models, where running statistics are those of each model, leaves ``[num_clusters, ...]``."""
        parts = super().model_parts(key)
        if not isinstance(parts, ModelParts) or self.model.init_parts is None:
            return parts
        of_each = jax.vmap(self.model.init_parts)(jax.random.split(key, self.num_clusters))
        return parts._replace(statistics=of_each.statistics)

    def _initial_state(self, params: Params) -> ServerState:
        return jax.vmap(lambda params: first_state(params, self.server_optimizer), out_axes=AXES)(params)

    def init_from(self, data: FederatedData, *, seed: int | jax.Array = 0) -> Any:
        """Returns an initial state with models that differ, similar to k-means++: every model is trained on one client.

        The first client is drawn uniformly. Each further client is drawn with a probability proportional to the smallest of its
        losses under the models so far. No client is drawn twice. All models start from the same random parameters, and take
        FedAvg's local steps on this algorithm's `client_loss`.

        Args:
          data: the clients to draw from. The loss of every client is evaluated for every model.
          seed: the seed of the draws and of the random parameters.

        Raises:
          ValueError: there are fewer clients with examples than clusters.
        """
        models = spread_models(self, data, self.num_clusters, rng.stream(rng.root(seed), "clusters"))
        params, parts = jax.tree.map(lambda *of_each: jnp.stack(of_each), *((each.params, each.parts) for each in models))
        state = self._initial_state(params)
        if parts == ():
            return state
        common = jax.tree.map(lambda x: x[0], parts)
        return FederatedState(state, parts=common._replace(statistics=parts.statistics))

    def client_memory(self, shared: Shared) -> jax.Array:
        return jnp.int32(0)

    def personal_params(self, shared: Shared, client: Client) -> Params:
        """Returns the model that a client chooses now, by its training examples, with its running statistics.

        A client without examples gets the model that it chose last.
        """
        shared, client = self._with_choice(shared, client)
        return parts_of(client)._replace(frozen=()).join(shared.params)

    def train(self, shared: Shared, client: Client) -> Local:
        return super().train(*self._with_choice(shared, client))

    def _with_choice(self, shared: Shared, client: Client) -> tuple[Shared, Client]:
        """Returns what the client receives of the model that it chooses, and the client with the statistics of this model."""
        chosen = jnp.where(client.num_examples > 0, _best(self.cluster_losses(shared, client)), client.memory)
        return _model(shared, client, chosen)

    def cluster_losses(self, shared: Shared, client: Client) -> jax.Array:
        """Returns the sum of each model's losses over the client's examples, ``float32 [num_clusters]``."""
        parts = parts_of(client)

        def add(losses: tree.Total, batch: Batch) -> tree.Total:
            def loss(model: tuple[Params, Any]) -> jax.Array:
                params, statistics = model
                with scope_of(parts._replace(statistics=statistics)):
                    own = self.model.losses(batch.examples, self.model.apply_for_eval(params, batch.examples))
                return jnp.sum(jnp.where(batch.mask, own, 0.0))

            return losses.add(jax.lax.map(loss, (shared.params, parts.statistics)))

        none = tree.Total.of(jnp.zeros(self.num_clusters, jnp.float32))
        return client.for_each_batch(self.batches.one_pass(), add, none, "preview").value()

    def client_update(self, shared: Shared, client: Client) -> ClientUpdate:
        losses = self.cluster_losses(shared, client)
        cluster = _best(losses)
        chosen, trainer = _model(shared, client, cluster)
        training = self.local_training(chosen, trainer)
        training.check_not_private(type(self).__name__, "the losses by which its clients choose a model have no noise")
        local = super().train(chosen, trainer)
        mean_losses = losses / jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        update = Member(cluster, tree.subtract(chosen.params, local.params))
        info = {"loss": local.loss.result(), "cluster_losses": mean_losses}
        return ClientUpdate(update, self.weight(client), info, cluster, local.parts)

    def server_update(self, state: ServerState, update: Groups, info: RoundInfo) -> ServerState:
        def one(state: ServerState, update: Params) -> ServerState:
            return super(SeveralModels, self).server_update(state, update, info)

        after = jax.vmap(one, in_axes=(AXES, 0), out_axes=AXES)(state, update.updates)
        # A cluster that no client chose does not change, and neither does its optimizer state.
        chosen, old = update.weights != 0, (state.params, state.opt_state)
        params, opt_state = jax.vmap(tree.select)(chosen, (after.params, after.opt_state), old)
        return after._replace(params=params, opt_state=opt_state)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HypCluster(SeveralModels, FedAvg):
    """Trains several models by FedAvg. Each client trains the model that has the smallest loss on its examples.

    All models are sent to every client, with their running statistics. ``state.params`` holds them in stacked arrays,
    ``[num_clusters, ...]``; frozen parameters, which they have in common, are not stacked. Clients keep the number of the model
    that they chose. `fedsim.evaluate_personalized` lets every client choose again with its training examples, and evaluates the
    chosen model. Besides training, a round computes the loss of each model on all of a client's examples.

    Attributes:
      num_clusters: number of models, at least 1. With 1, the algorithm is FedAvg. `init` initializes them at random.
        `init_from` is a better initialization.
      aggregator: the aggregator of the updates of one cluster.

    >>> import optax, fedsim
    >>> algorithm = HypCluster(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     num_clusters=3)
    >>> algorithm.init(jax.random.key(0)).params["linear"]["b"].shape
    (3, 10)
    """


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IFCA(SeveralModels, FedAvg):
    """The iterative federated clustering algorithm with model averaging: `HypCluster` with uniform client weights.

    It is Algorithm 1 with option II of Ghosh et al. (2020), https://arxiv.org/abs/2006.04088.

    >>> import optax, fedsim
    >>> IFCA(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20)).weighting
    'uniform'
    """

    weighting: Literal["examples", "uniform"] = dataclasses.field(init=False, default="uniform")


def _best(losses: jax.Array) -> jax.Array:
    """Returns the number of the model with the smallest loss, ``int32 []``. A diverged model, with loss NaN, must not be
    chosen.
    """
    return jnp.argmin(jnp.nan_to_num(losses, nan=jnp.inf)).astype(jnp.int32)


def _model(shared: Shared, client: Client, cluster: jax.Array) -> tuple[Shared, Client]:
    """Returns what is sent of one model, and the client with the running statistics of this model."""
    params, statistics = jax.tree.map(lambda models: models[cluster], (shared.params, parts_of(client).statistics))
    if client.parts != ():
        client = dataclasses.replace(client, parts=client.parts._replace(statistics=statistics))
    return shared._replace(params=params), client
