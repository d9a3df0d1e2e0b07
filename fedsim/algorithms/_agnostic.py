"""Agnostic federated learning, trained with agnostic federated averaging.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic federated learning", ICML 2019: https://arxiv.org/abs/1902.00146, defines the
objective (equation 4, the worst mixture of domains) and the projected update of the mixture (Algorithm 1). J. Ro, M. Chen,
R. Mathews, M. Mohri, A. T. Suresh, "Communication-efficient agnostic federated averaging", Interspeech 2021:
https://arxiv.org/abs/2104.02748, adds local training, the exponentiated update, and the window of rounds.

The papers' λ is ``weights`` in the server state. α_d is λ_d divided by the mean number of examples of domain d in a round of
the window. β_k is the sum of α over the examples of client k, and is the client's weight.

Deviations:

- The loss of an example of domain d is multiplied by α_d n_k / β_k, where n_k is the client's number of examples. Then the mean
  over a batch is an unbiased estimate of (Σ α_d loss) / β_k, a sum over all examples of the client. So local steps do not
  become smaller for larger clients, and with one domain the algorithm is FedAvg. FedJAX divides the sum over a batch by β_k
  instead.
- A domain without examples in a round keeps its weight, and the other domains share the remaining weight. In both papers such a
  domain has a loss of 0.
- A domain without examples in the window keeps the counts of the last window in which it had examples. A domain that never
  had examples gets the mean count of the other domains. So neither dominates the round in which it appears.
- λ is updated with the losses at the parameters before training, and clients train with λ before its update, as in the first
  paper.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, metrics, tree
from fedsim.aggregators import Aggregator, AuxMean, Sum, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._domains import STEPS, by_domain, check_domains
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local
from fedsim.data import Batch, FederatedData
from fedsim.metrics import divide
from fedsim.model import Params, scope_of
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class AgnosticState(NamedTuple):
    """`ServerState` with the weights of the domains and their counts of examples.

    Attributes:
      params, opt_state, round: see `ServerState`.
      weights: λ, ``float32 [domains]``.
      counts: the number of examples in each of the last rounds, ``float32 [window, domains]``. They are all 0 for a domain that
        never had examples. Without examples in the window, they are its counts in the last window in which it had examples.
    """

    params: Params
    opt_state: Any
    round: jax.Array
    weights: jax.Array
    counts: jax.Array


class AgnosticShared(NamedTuple):
    """What clients receive: `Shared` and α ``[domains]``, each domain's weight divided by its number of examples."""

    params: Params
    round: jax.Array
    alpha: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AgnosticFedAvg(FedAvg):
    """FedAvg that minimizes the loss of the worst mixture of domains: min over w, max over λ of Σ_d λ_d F_d(w).

    A column of the data holds the domain of each example. A client may have examples of several domains. The server takes
    ascent steps on λ along the losses of the domains. Clients weight an example by λ_d divided by the number of examples of its
    domain. They make one more pass over their examples than in FedAvg, to compute the losses. The algorithm is that of Ro et
    al. (2021), https://arxiv.org/abs/2104.02748.

    Attributes:
      num_domains: number of domains.
      domain: the column that holds the domains, integers in [0, num_domains).
      domain_learning_rate: learning rate of λ. λ starts uniform, and stays uniform with rate 0.
      domain_update: ``"exponentiated"`` takes λ_d exp(rate F_d), normalized to sum 1. ``"projected"`` takes the nearest point
        of the simplex to λ + rate F, which may set the weight of a domain to 0.
      window: number of rounds over which the examples of the domains are counted.
      model, batches, client_optimizer, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: an attribute is out of its range.

    >>> import numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32),
    ...                                          "domain": np.array([0, 1, 1, 1, 1, 1])}, sizes=[4, 2])
    >>> algorithm = AgnosticFedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                            batches=fedsim.Batches(size=2), num_domains=2)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.counts.tolist(), state.weights.tolist()
    ([[1.0, 5.0]], [0.5, 0.5])
    """

    capabilities = Capabilities(
        aggregators=False,
        scalable=False,
        microbatches=True,
        model_parts=True,
        refused_parts={
            "statistics": "its clients weight their updates by domains themselves, and the server adds these, so that running "
            "statistics would have other weights; use statistics='client' or a model with GroupNorm"
        },
    )
    preview = "the losses of the domains"

    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
    # It cannot be given, because the domains determine the weights of clients.
    weighting: Literal["examples", "uniform"] = dataclasses.field(init=False, default="examples")
    num_domains: int
    domain: str = "domain"
    domain_learning_rate: float = 0.1
    domain_update: Literal["exponentiated", "projected"] = "exponentiated"
    window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_domains=self.num_domains, window=self.window)
        checks.number(least=0, domain_learning_rate=self.domain_learning_rate)
        checks.one_of(*STEPS, domain_update=self.domain_update)
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_domains(data, self.domain, self.num_domains)

    def init(self, key: jax.Array) -> AgnosticState:
        uniform = jnp.full(self.num_domains, 1 / self.num_domains, jnp.float32)
        return AgnosticState(
            **super().init(key)._asdict(), weights=uniform, counts=jnp.zeros((self.window, self.num_domains), jnp.float32)
        )

    def broadcast(self, state: AgnosticState) -> AgnosticShared:
        counts = jnp.mean(state.counts, axis=0)
        present = counts > 0
        of_others = divide(jnp.sum(counts), jnp.sum(present))
        # Before the first round no domain has examples. Any positive count works, because the scale of alpha has no effect.
        counts = jnp.where(present, counts, jnp.maximum(of_others, 1 / self.window))
        return AgnosticShared(state.params, state.round, state.weights / counts)

    def train(self, shared: AgnosticShared, client: Client) -> Local:
        scaled, _, _ = self._scaled(shared, client)
        return super().train(scaled, client)

    def client_update(self, shared: AgnosticShared, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, "the losses of domains that its clients send have no noise")
        scaled, beta, losses = self._scaled(shared, client)
        local = super().train(scaled, client)
        movement = tree.scale(tree.subtract(shared.params, local.params), beta)
        update = WithAux(movement, (beta, losses))
        return ClientUpdate(update, jnp.float32(1), {"loss": local.loss.result()}, parts=local.parts)

    def _scaled(self, shared: AgnosticShared, client: Client) -> tuple[AgnosticShared, jax.Array, metrics.Mean]:
        """Returns what a client trains with, whose α is multiplied by n_k / β_k, and β_k and the losses of its domains."""

        def add(losses: tree.Total, batch: Batch) -> tree.Total:
            with scope_of(client.parts, batch.mask):
                own = self._losses(shared.params, batch)
            return losses.add(by_domain(own, batch.mask, batch.examples[self.domain], self.num_domains))

        zeros = jnp.zeros(self.num_domains, jnp.float32)
        none = tree.Total.of(metrics.Mean(zeros, zeros))
        losses = client.for_each_batch(self.batches.one_pass(), add, none, "preview").value()
        beta = jnp.vdot(shared.alpha, losses.weight)
        return shared._replace(alpha=shared.alpha * divide(client.num_examples, beta)), beta, losses

    def client_loss(self, shared: AgnosticShared, params: Params, batch: Batch) -> jax.Array:
        return metrics.masked_mean(self._losses(params, batch) * shared.alpha[batch.examples[self.domain]], batch.mask)

    def server_update(self, state: AgnosticState, update: WithAux, info: RoundInfo) -> AgnosticState:
        # Movements are added, and auxiliary data comes as its mean over clients, each of weight 1.
        movement, aux = update
        beta, losses = tree.scale(aux, info.total("weight"))
        examples = jnp.round(losses.weight)
        step = self.domain_learning_rate * divide(losses.total, losses.weight)
        weights = STEPS[self.domain_update](state.weights, step, losses.weight > 0)
        counts = jnp.concatenate([state.counts[1:], examples[None]])
        counts = jnp.where(jnp.any(counts > 0, axis=0, keepdims=True), counts, state.counts)
        mean = jax.tree.map(lambda total: divide(total, beta), movement)
        return super().server_update(state, mean, info)._replace(weights=weights, counts=counts)

    def _losses(self, params: Params, batch: Batch) -> jax.Array:
        return self.model.losses(batch.examples, self.model.apply_for_train(params, batch.examples, batch.key))
