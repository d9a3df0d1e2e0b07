"""HypCluster and IFCA: several global models, of which every client trains the one that suits it best.

Y. Mansour, M. Mohri, J. Ro, A. T. Suresh, "Three approaches for personalization with applications to federated learning", 2020,
Algorithm HypCluster: https://arxiv.org/abs/2002.10619. A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for
clustered federated learning", NeurIPS 2020, Algorithm 1 (IFCA) with its option II, model averaging:
https://arxiv.org/abs/2006.04088. Both do the same; HypCluster weighs clients by their examples, and IFCA alike. Deviations: the
loss by which a client chooses is that of evaluation, without dropout; and the k-means++ like start of HypCluster,
`HypCluster.init_from`, is as FedJAX has it: probabilities are proportional to losses and not to their squares. No client
is drawn twice, which would make two models that are equal for ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators import Grouped, Groups, Member
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._part_of import LocalTraining
from fedsim.algorithms._spread_models import spread_models
from fedsim.data import Batch, Batches, FederatedData
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Chooser(NamedTuple):
    """Each cluster's sum of losses, ``float32 [clusters]``, the cluster chosen, ``int32 []``, and training from there."""

    losses: jax.Array
    cluster: jax.Array
    training: ClientState

    @property
    def params(self) -> Params:
        """Those of the model in training."""
        return self.training.params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HypCluster(FedAvg):
    """FedAvg of several models at once: a client finds out whose loss is the least on its examples, and trains that one.

    All models are sent to every client, ``state.params`` holds them side by side, ``[num_clusters, ...]``, and clients keep the
    number of the one they chose. `fedsim.evaluate_personalized` has every client choose anew, by its training examples, and
    evaluates that. A round takes, besides training, each model's loss on all of a client's examples.

    Attributes:
      num_clusters: how many models, at least 1; with 1 this is FedAvg. They start at random, or better by `init_from`.
      aggregator: of the updates of one cluster.

    >>> import optax, fedsim
    >>> algorithm = HypCluster(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=Batches(size=20), num_clusters=3)
    >>> algorithm.init(jax.random.key(0)).params["linear"]["b"].shape
    (3, 10)
    """

    capabilities = Capabilities(minimizes=False)  # It has several models, each for its own clients.

    num_clusters: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_clusters=self.num_clusters)
        of_one = self.aggregator.inner if isinstance(self.aggregator, Grouped) else self.aggregator
        object.__setattr__(self, "aggregator", Grouped(groups=self.num_clusters, inner=of_one))

    @property
    def preview(self) -> Batches:
        return self.batches.one_pass()

    def init(self, key: jax.Array) -> ServerState:
        return self._beginning(jax.vmap(self.model.init)(jax.random.split(key, self.num_clusters)))

    def _beginning(self, params: Params) -> ServerState:
        return ServerState(params, jax.vmap(self.server_optimizer.init)(params), jnp.zeros((), jnp.int32))

    def init_from(self, data: FederatedData, *, seed: int | jax.Array = 0) -> ServerState:
        """A start that is spread out like that of k-means++: every model is trained on one client alone.

        The first client is drawn evenly, each further one with a probability proportional to the least of its losses under
        the models so far, and none twice. All train from the same random parameters, by FedAvg's local steps on this
        algorithm's `client_loss`.

        Args:
          data: the clients to draw from; every one's loss is evaluated for every model.
          seed: of the draws, and of the random parameters.

        Raises:
          ValueError: fewer clients have examples than there are clusters.
        """
        alone = LocalTraining(
            whole=self,
            model=self.model,
            batches=self.batches,
            client_optimizer=self.client_optimizer,
            execution=self.execution,
        )
        models = spread_models(alone, data, self.num_clusters, rng.stream(rng.root(seed), "clusters"))
        return self._beginning(jax.tree.map(lambda *of_each: jnp.stack(of_each), *models))

    def client_memory(self, shared: Shared) -> jax.Array:
        return jnp.int32(0)

    def personal_params(self, shared: Shared, memory: jax.Array) -> Params:
        """The model of a cluster."""
        return jax.tree.map(lambda models: models[memory], shared.params)

    def client_init(self, shared: Shared, client: Client) -> Any:
        cluster = jnp.int32(0)
        start = self.set_out(shared, self.personal_params(shared, cluster))
        return Chooser(jnp.zeros(self.num_clusters, jnp.float32), cluster, start)

    def client_preview(self, shared: Shared, state: Chooser, batch: Batch) -> Chooser:
        def loss(params: Params) -> jax.Array:
            losses = self.model.loss(batch.examples, self.model.apply_for_eval(params, batch.examples))
            return jnp.sum(jnp.where(batch.mask, losses, 0.0))

        return state._replace(losses=state.losses + jax.lax.map(loss, shared.params))

    def client_begin(self, shared: Shared, state: Chooser, client: Client) -> Chooser:
        # A model that has gone astray must not be chosen for its NaN.
        cluster = jnp.argmin(jnp.nan_to_num(state.losses, nan=jnp.inf)).astype(jnp.int32)
        return Chooser(state.losses, cluster, self.set_out(shared, self.personal_params(shared, cluster)))

    def client_step(self, shared: Shared, state: Any, batch: Batch) -> Any:
        own = shared._replace(params=self.personal_params(shared, state.cluster))
        return state._replace(training=super().client_step(own, state.training, batch))

    def client_final(self, shared: Shared, state: Any, client: Client) -> ClientUpdate:
        own = shared._replace(params=self.personal_params(shared, state.cluster))
        sent = super().client_final(own, state.training, client)
        info = {**sent.info, "cluster_losses": state.losses / jnp.maximum(client.num_examples, 1).astype(jnp.float32)}
        return sent._replace(update=Member(state.cluster, sent.update), info=info, memory=state.cluster)

    def server_update(self, state: ServerState, update: Groups) -> ServerState:
        axes = ServerState(0, 0, None, None)  # type: ignore[arg-type]
        after = jax.vmap(super().server_update, in_axes=(axes, 0), out_axes=axes)(state, update.updates)
        # A cluster to which nobody came stays as it is, its optimizer, too.
        came, old = update.weights != 0, (state.params, state.opt_state)
        params, opt_state = jax.vmap(tree.select)(came, (after.params, after.opt_state), old)
        return after._replace(params=params, opt_state=opt_state)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IFCA(HypCluster):
    """The iterative federated clustering algorithm: `HypCluster` with clients that weigh alike.

    >>> import optax, fedsim
    >>> IFCA(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=Batches(size=20)).weighting
    'uniform'
    """

    weighting: Literal["examples", "uniform"] = dataclasses.field(init=False, default="uniform")
