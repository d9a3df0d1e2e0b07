"""FedEM: every client has a mixture, of its own, of models that all clients train.

O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal, "Federated multi-task learning under a mixture of distributions", NeurIPS
2021, Algorithm 1: https://arxiv.org/abs/2108.10445. With M components θ_m, a client with the weights π_m computes for its
examples i, at the server's θ_m::

    q_im ∝ π_m exp(-ℓ_i(θ_m))        (E-step: how likely component m is for example i)
    π_m = mean_i q_im                (M-step)
    θ_m minimizes mean_i q_im ℓ_i(θ_m)

The last line is local steps from the server's θ_m, with the q of the E-step, of which the server takes the mean for each m.

Deviations: the q of a batch are computed again in each step, to the same values, instead of being stored. Personal models are
evaluated after another E- and M-step at the server's θ_m, so a client that has not trained yet has a mixture, too. If examples
are sequences, ℓ_i is the model's loss of a sequence, the sum over its tokens divided by a length: q is less certain than with
the sum, the likelihood of the sequence. Predictions are mixed for each token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from fedsim import metrics, rng, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining
from fedsim.data import Batch, FederatedData
from fedsim.model import Examples, MixtureModel, Model, Params, current_scope, scope_of
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedEM(FedAvg):
    """Trains several models, of whose predictions each client learns a mixture of its own, by expectation maximization.

    A client trains all components in every step, each on the examples for which it is likely, and keeps the weights of its
    mixture, which are not sent. `fedsim.evaluate_personalized` evaluates the clients' mixtures, and ``state.params`` is the
    mixture with equal weights. The ``loss`` in a round's info is the mean over examples of the components' losses, weighted by
    how likely the components are. With one component, the algorithm is FedAvg.

    Attributes:
      model: a classifier, of which each component has its own parameters. It becomes a `fedsim.MixtureModel`.
      num_components: M, the number of components. The paper takes 3.
      client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: the model has no ``num_classes``, or its loss is no function of ``softmax(outputs)``; or a class overrides
        ``client_loss``. Before the first round: all components start from the same parameters.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = FedEM(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.3), batches=fedsim.Batches(size=20))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for round in range(5):
    ...     state, _ = algorithm.apply(state, fedsim.Cohort.of(data, ["0", "1"], round=round))
    >>> fedsim.evaluate_personalized(algorithm, state, data, data).overall["accuracy"] > 0.8
    True
    """

    capabilities = Capabilities(
        minimizes=False,  # There are several models, which clients mix.
        scalable=True,
        microbatches=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "clients train several models on differently weighted examples; use a model without, such as one with GroupNorm",
        ),
    )

    num_components: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_client_loss()
        one = self.component
        self._check_parts(one)  # before a mixture of it is made, which has other remedies
        if one is self.model or self.mixture_model.num_components != self.num_components:
            object.__setattr__(self, "model", MixtureModel.of(one, self.num_components))

    @property
    def component(self) -> Model:
        """The model of one component."""
        return self.model.component if isinstance(self.model, MixtureModel) else self.model

    @property
    def mixture_model(self) -> MixtureModel:
        """The model, of all components."""
        return cast(MixtureModel, self.model)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        with jax.ensure_compile_time_eval():
            starts = jax.tree.leaves(self.model.init(rng.root(0)))
            are_equal = all(bool(jnp.all(x == x[:1])) for x in starts)
        if self.num_components > 1 and are_equal:
            raise ValueError(
                f"Expected a model whose parameters are drawn at random, got one that starts {self.num_components} components "
                "with equal parameters, which stay equal: give a model with random initial parameters, or num_components=1."
            )

    def _check_parts(self, model: Model) -> None:
        super()._check_parts(self.component)  # The weights that clients keep are the algorithm's own.

    def responsibilities(self, params: Params, examples: Examples) -> jax.Array:
        """Returns q, how likely each component is for each example, ``float32 [num_components, n]`` (the E-step)."""
        whole = current_scope().parts.join(params)
        losses = self.mixture_model.component_losses(whole, examples)
        return jax.nn.softmax(whole["log_weights"][:, None] - losses, axis=0)

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        def loss(params: Params, batch: Batch) -> jax.Array:
            with scope_of(client.parts, batch.mask):
                likely = self.responsibilities(shared.params, batch.examples)
            losses = self.mixture_model.component_losses(params, batch.examples, batch.key)
            return metrics.masked_mean(jnp.sum(likely * losses, axis=0), batch.mask)

        return dataclasses.replace(super().local_training(shared, client), loss=loss)

    def mixture(self, shared: Any, client: Client) -> Params:
        """Returns what a client keeps: the weights of its mixture after an M-step, as logarithms."""

        def add(total: tree.Total, batch: Batch) -> tree.Total:
            with scope_of(client.parts, batch.mask):
                likely = self.responsibilities(shared.params, batch.examples)
            return total.add(jnp.sum(jnp.where(batch.mask, likely, 0.0), axis=1))

        none = tree.Total.of(jnp.zeros(self.num_components, jnp.float32))
        sums = client.for_each_batch(self.batches.one_pass(), add, none, "preview").value()
        weights = sums / jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        learned = jnp.log(jnp.maximum(weights, jnp.finfo(jnp.float32).tiny))  # An infinity would not count as a result.
        kept = client.parts.kept
        return {**kept, "log_weights": jnp.where(client.num_examples > 0, learned, kept["log_weights"])}

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the components, and the weights of the client's mixture after an M-step."""
        return client.parts._replace(kept=self.mixture(shared, client)).join(shared.params)

    def train(self, shared: Any, client: Client) -> Local:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, "the weights of a client's mixture have no noise")
        local = super().train(shared, client)
        return local._replace(parts=client.parts._replace(kept=self.mixture(shared, client)))
