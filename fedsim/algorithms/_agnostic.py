"""Agnostic federated learning, trained by agnostic federated averaging.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic federated learning", ICML 2019: https://arxiv.org/abs/1902.00146, the objective (its
equation 4: the worst mixture of domains) and the projected steps of the mixture (its Algorithm 1). J. Ro, M. Chen, R. Mathews,
M. Mohri, A. T. Suresh, "Communication-efficient agnostic federated averaging", Interspeech 2021:
https://arxiv.org/abs/2104.02748, local training, the exponentiated steps, and the window of rounds. The papers' λ is
``domain_weights``; α_d is λ_d over the mean number of examples of domain d in a round of the window, and β_k the sum of α over
the client's examples, its weight.

Deviations: a client's loss is scaled so that a batch's mean is unbiased for (Σ α_d loss) / β_k times the client's size, hence
steps do not shrink as clients grow, and one domain is FedAvg (FedJAX divides a batch's sum by β_k instead). Domains that no
client of a round has keep their weight, and the others share the rest (in both papers a domain without examples counts as one
without loss). A domain that no round of the window has keeps the counts of the last window in which it had examples, and one
that was never seen counts as the others do in the mean, so that neither takes over the round in which it comes. Both steps are
taken at the same point, before training, as in the first paper.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, metrics, tree
from fedsim.aggregators import Aggregator, Sum
from fedsim.algorithm import Capabilities
from fedsim.algorithms._domains import STEPS, by_domain, check_domains
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.data import Batch, Batches, FederatedData
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Domains(NamedTuple):
    """What the server's state has ``more``: weights ``[domains]``, and examples in the last rounds ``[window, domains]``.

    A domain's counts are all zero if it was never seen, and those of the last window that had any else.
    """

    weights: jax.Array
    counts: jax.Array


class Seen(NamedTuple):
    """What a client's state has ``more``: losses and numbers of examples by domain, and what scales a batch's losses."""

    losses: metrics.Mean
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AgnosticFedAvg(FedAvg):
    """FedAvg on the worst mixture of domains: min over w, max over λ of Σ_d λ_d F_d(w).

    An example's domain is a column of the data; a client may have examples of several. The server steps λ up along the
    domains' losses as clients train on the examples weighted by λ_d over how many the domain has. Clients read their examples
    once more than in FedAvg, for these losses.

    Attributes:
      num_domains: how many domains there are.
      domain: the column of their numbers, integers in [0, num_domains).
      domain_learning_rate: of λ, which starts uniform; at 0 it stays so.
      domain_update: ``"exponentiated"``: λ_d exp(rate F_d), made to sum to 1; ``"projected"``: the nearest point of the simplex
        to λ + rate F, where a domain may get no weight at all.
      window: the number of rounds over which the domains' examples are counted.
      model, batches, client_optimizer, server_optimizer: see `FedAvg`. ``weighting`` is that of the domains.

    >>> import numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32),
    ...                                          "domain": np.array([0, 1, 1, 1, 1, 1])}, sizes=[4, 2])
    >>> algorithm = AgnosticFedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                            batches=fedsim.Batches(size=2), num_domains=2)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.more.counts.tolist(), state.more.weights.tolist()
    ([[1.0, 5.0]], [0.5, 0.5])
    """

    capabilities = Capabilities(aggregators=False)

    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
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
        if self.weighting != "examples":
            raise ValueError(f"The domains weigh the clients: leave out weighting={self.weighting!r}.")

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_domains(data, self.domain, self.num_domains)

    @property
    def preview(self) -> Batches:
        return self.batches.one_pass()

    def init(self, key: jax.Array) -> ServerState:
        uniform = jnp.full(self.num_domains, 1 / self.num_domains, jnp.float32)
        return super().init(key)._replace(more=Domains(uniform, jnp.zeros((self.window, self.num_domains), jnp.float32)))

    def broadcast(self, state: ServerState) -> Shared:
        weights, counts = state.more
        counts = jnp.mean(counts, axis=0)
        seen = counts > 0
        of_others = metrics.Mean(jnp.sum(counts), jnp.sum(seen)).result()
        # Before the first round nobody has been seen, and any number will do: the scale of alpha has no effect.
        counts = jnp.where(seen, counts, jnp.maximum(of_others, 1 / self.window))
        return super().broadcast(state)._replace(more=weights / counts)

    def set_out(self, shared: Shared, params: Params) -> ClientState:
        zeros = jnp.zeros(self.num_domains, jnp.float32)
        return super().set_out(shared, params)._replace(more=Seen(metrics.Mean(zeros, zeros), jnp.float32(0)))

    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        losses = self._losses(shared.params, batch)
        here = by_domain(losses, batch.mask, batch.examples[self.domain], self.num_domains)
        return state._replace(more=state.more._replace(losses=state.more.losses.merge(here)))

    def client_begin(self, shared: Shared, state: ClientState, client: Client) -> ClientState:
        beta = jnp.vdot(shared.more, state.more.losses.weight)
        return state._replace(more=state.more._replace(scale=metrics.Mean(client.num_examples, beta).result()))

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        return super().client_gradient(shared._replace(more=shared.more * state.more.scale), state, batch)

    def client_loss(self, shared: Shared, params: Params, batch: Batch) -> jax.Array:
        return metrics.masked_mean(self._losses(params, batch) * shared.more[batch.examples[self.domain]], batch.mask)

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result = super().client_final(shared, state, client)
        beta = jnp.vdot(shared.more, state.more.losses.weight)
        return ClientUpdate((tree.scale(result.update, beta), beta, state.more.losses), jnp.float32(1), result.info)

    def server_update(self, state: ServerState, update: Any) -> ServerState:
        movement, beta, losses = update
        weights = STEPS[self.domain_update](state.more.weights, self.domain_learning_rate * losses.result(), losses.weight > 0)
        counts = jnp.concatenate([state.more.counts[1:], losses.weight[None]])
        counts = jnp.where(jnp.any(counts > 0, axis=0, keepdims=True), counts, state.more.counts)
        mean = jax.tree.map(lambda total: metrics.Mean(total, beta).result(), movement)
        return super().server_update(state, mean)._replace(more=Domains(weights, counts))

    def _losses(self, params: Params, batch: Batch) -> jax.Array:
        return self.model.loss(batch.examples, self.model.apply_for_train(params, batch.examples, batch.key))
