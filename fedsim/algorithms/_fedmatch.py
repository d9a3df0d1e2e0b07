"""FedMatch: inter-client consistency, and separate parameters for labelled and unlabelled examples.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang, "Federated semi-supervised learning with inter-client consistency & disjoint learning",
ICLR 2021, equations 2 to 5, and the authors' code: https://arxiv.org/abs/2006.12097. The paper's
λ_s is ``labels_weight``, λ_ICCS is ``unlabelled_weight``, λ_L2 is ``l2``, λ_L1 is ``l1``, τ is ``threshold`` and H is
``num_helpers``. As in the code, the model's own prediction alone decides which examples count, and helpers take part only in
every tenth round. E. Diao, J. Ding, V. Tarokh, "SemiFL", NeurIPS 2022, https://arxiv.org/abs/2106.01432, report that FedMatch
is no better than training on the labels alone.

Deviations: helpers are chosen among the first ``candidates`` clients of the round that have trained before (the paper: among
all clients that have), and the nearest are found by computing all distances, which finds the same as the paper's k-d tree. In
the simulation, clients keep the ψ that they sent last, and all of a round receive those of all candidates, of which they use H,
so that the metrics count too many bits down. Predictions for pseudo-labels are those for weakly augmented examples (the paper:
for examples as they are). Differences of parameters are sent whole; the paper leaves out small ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import augmentations, checks, metrics, rng, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining
from fedsim.algorithms._pseudo_labels import PRIVATE_REASON, PseudoLabels, check_classifier
from fedsim.algorithms._server_examples import Examples, after_server_steps, server_seed
from fedsim.algorithms._server_step import after_step, first_state
from fedsim.augmentations import Augmentation
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, Clients, ClientUpdate, RoundInfo


class Parts(NamedTuple):
    """The parameters of a model as a sum: ``sigma`` learns from labelled examples, and ``psi`` from the others."""

    sigma: Params
    psi: Params

    def whole(self) -> Params:
        """Returns the parameters of the model."""
        return tree.add(self.sigma, self.psi)


class FedMatchState(NamedTuple):
    """`SeededState`, where ``params`` are the sum of ``parts``, and ``opt_state`` is that of the parts."""

    params: Params
    opt_state: Any
    round: jax.Array
    server_seed: jax.Array
    parts: Parts


class Candidates(NamedTuple):
    """The last models of some clients, from which every client gets its helpers; leaves have an axis for the clients.

    Attributes:
      psi: their ψ.
      predictions: of the models on the probe, ``[clients, classes]``.
      position: of the clients in the population, ``int32 [clients]``.
      trained: whether the client has trained before, ``bool [clients]``; False where there is none.
    """

    psi: Params
    predictions: jax.Array
    position: jax.Array
    trained: jax.Array


class Helpers(NamedTuple):
    """The ψ of the helpers of one client, leaves ``[helpers, ...]``, and whether there are so many, ``bool [helpers]``."""

    psi: Params
    there: jax.Array


class FedMatchShared(NamedTuple):
    """What clients receive: the parameters' parts, the number of server updates so far, the probe's seed, and `Candidates`.

    In a client's steps ``helpers`` are its own, `Helpers`.
    """

    params: Parts
    round: jax.Array
    server_seed: jax.Array
    helpers: Any


class FedMatchMemory(NamedTuple):
    """What a client keeps: the ψ that it sent last, and whether it has trained, ``bool []``."""

    psi: Params
    trained: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedMatch(FedAvg):
    """FedAvg of σ and ψ, whose sum are the parameters: labelled examples train σ, and unlabelled ones train ψ.

    The loss of the unlabelled examples has a pseudo-label for which the model and ``num_helpers`` models of other clients vote,
    the divergence between the predictions of the helpers and the model's (both only where the model is confident), and two
    regularizers. Helpers are the clients whose models predict most similarly on an image of noise.

    ``l2`` and ``labels_weight`` multiply gradients by ten: with SGD, use a tenth of FedAvg's learning rate.

    Attributes:
      threshold: see `FixMatch`.
      unlabelled_weight: the weight of the votes and of the divergence.
      labels_weight: the weight of the labelled examples.
      l2: the weight of the squared distance of ψ from σ, where there are unlabelled examples.
      l1: the weight of the sum of the magnitudes of ψ, where there are unlabelled examples.
      psi_factor: the initial ψ is this times the initial σ.
      num_helpers: H, at least 0. With 0, every client is alone with its pseudo-labels.
      candidates: the number of clients of a round among which helpers are chosen.
      helper_every: the interval in rounds between rounds with helpers.
      weak, strong, augmented, server_examples: see `FixMatch`.

    Raises:
      ValueError: an attribute is out of its range.

    >>> import fedsim, optax
    >>> algorithm = FedMatch(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.01), batches=fedsim.Batches(size=10))
    >>> state = algorithm.init(jax.random.key(0))
    >>> bool(jnp.allclose(state.params["linear"]["w"], 1.2 * state.parts.sigma["linear"]["w"]))
    True
    """

    capabilities = Capabilities(
        minimizes=False,
        unlabelled=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "its clients label examples by the models of other clients, of which they would not have these; use FixMatch",
        ),
    )
    not_differentiable = "chooses pseudo-labels by a threshold and by votes"

    threshold: float = 0.75
    unlabelled_weight: float = 0.01
    weak: Augmentation = augmentations.weak
    strong: Augmentation = augmentations.strong
    augmented: str = "x"
    server_examples: Examples | None = None
    labels_weight: float = 10.0
    l2: float = 10.0
    l1: float = 1e-4
    psi_factor: float = 0.2
    num_helpers: int = 2
    candidates: int = 10
    helper_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_classifier(self.model, self.threshold, self.unlabelled_weight, self.server_examples)
        checks.number(least=0, labels_weight=self.labels_weight, l2=self.l2, l1=self.l1, psi_factor=self.psi_factor)
        checks.whole(1, candidates=self.candidates, helper_every=self.helper_every)
        checks.whole(0, self.candidates, num_helpers=self.num_helpers)

    @property
    def pseudo_labels(self) -> PseudoLabels:
        """How examples without a label get one."""
        return PseudoLabels(self.model, self.threshold, self.weak, self.strong, self.augmented)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        self.pseudo_labels.check(data, self.server_examples)

    def init(self, key: jax.Array) -> FedMatchState:
        params = self.model.init(key)
        parts = Parts(params, tree.scale(params, self.psi_factor))
        state = first_state(parts, self.server_optimizer)
        return FedMatchState(parts.whole(), state.opt_state, state.round, server_seed(key), parts)

    def broadcast(self, state: FedMatchState) -> FedMatchShared:
        one = Candidates(state.parts.psi, jnp.zeros(self.model.num_classes or 0), jnp.int32(0), jnp.bool_(False))
        nobody = jax.tree.map(lambda x: jnp.zeros((self.candidates, *x.shape), x.dtype), one)
        return FedMatchShared(state.parts, state.round, state.server_seed, nobody)

    def round(self, state: FedMatchState, clients: Clients) -> tuple[FedMatchState, RoundInfo]:
        shared = self.broadcast(state)
        models = clients.map(self.last_model, shared, name="helpers")
        # The shapes of what is sent do not depend on the number of clients in the round.
        shared = shared._replace(
            helpers=jax.tree.map(lambda x, rows: x.at[: len(rows)].set(rows[: len(x)]), shared.helpers, models)
        )
        update, info = clients.aggregate(self.client_update, shared)
        return self.server_update(state, update, info), info

    def client_memory(self, shared: FedMatchShared) -> FedMatchMemory:
        return FedMatchMemory(shared.params.psi, jnp.bool_(False))

    def downloaded(self, shared: FedMatchShared, client: Client) -> Params:
        """Returns the parameters of the model from which a client starts."""
        return shared.params.whole()

    def last_model(self, shared: FedMatchShared, client: Client) -> Candidates:
        """Returns a client's last model."""
        psi, trained = client.memory
        return Candidates(psi, self.on_probe(shared, psi), client.position, trained)

    def has_helpers(self, shared: FedMatchShared) -> jax.Array:
        """Returns whether helpers take part in a round, ``bool []``."""
        return (shared.round + 1) % self.helper_every == 0

    def on_probe(self, shared: FedMatchShared, psi: Params) -> jax.Array:
        """Returns the predictions of a client's model for an image of noise, ``float32 [classes]``.

        In rounds without helpers they are not needed, and zeros.
        """

        def predictions() -> jax.Array:
            key = rng.stream(jax.random.key(shared.server_seed, impl=rng.IMPLEMENTATION), "probe")
            noise = (jax.random.truncated_normal(key, -1, 1, (1, *_shape(self)), jnp.float32) + 1) / 2
            params = shared.params._replace(psi=psi).whole()
            examples: dict[str, Any] = {**self.model.dummy_examples(1), self.augmented: noise}
            return jax.nn.softmax(self.model.apply_for_eval(params, examples)[0])

        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(predictions))
        return jax.lax.cond(self.has_helpers(shared), predictions, lambda: none)

    def nearest(self, shared: FedMatchShared, client: Client) -> Helpers:
        """Returns a client's helpers: the other candidates with the most similar predictions on the probe."""
        psi, predictions, position, trained = shared.helpers
        squares = jnp.sum(jnp.square(predictions - self.on_probe(shared, client.memory.psi)[None]), axis=1)
        others = trained & (position != client.position) & client.memory.trained
        near, chosen = jax.lax.top_k(jnp.where(others, -squares, -jnp.inf), self.num_helpers)
        return Helpers(jax.tree.map(lambda x: x[chosen], psi), (near > -jnp.inf) & self.has_helpers(shared))

    def local_training(self, shared: FedMatchShared, client: Client) -> LocalTraining:
        return super().local_training(shared._replace(helpers=self.nearest(shared, client)), client)

    def train(self, shared: FedMatchShared, client: Client) -> Local:
        local = super().train(shared, client)
        return local._replace(params=local.params.whole())

    def client_update(self, shared: FedMatchShared, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, PRIVATE_REASON)
        local = super().train(shared, client)
        confident = self.pseudo_labels.confident(shared.params.whole(), client, self.batches)
        info = {"loss": local.loss.result(), "confident": confident}
        memory = FedMatchMemory(local.params.psi, jnp.bool_(True))
        return ClientUpdate(tree.subtract(shared.params, local.params), self.weight(client), info, memory)

    def client_loss(self, shared: FedMatchShared, params: Parts, batch: Batch) -> jax.Array:
        stopped, labelled = jax.lax.stop_gradient(params), batch.examples["y"] >= 0
        logits = self.pseudo_labels.logits(params._replace(psi=stopped.psi).whole(), batch, "weak")
        supervised = metrics.masked_mean(self.model.losses(batch.examples, logits), batch.mask & labelled)
        unlabelled = batch.mask & ~labelled
        unsupervised = self.unsupervised(shared, params._replace(sigma=stopped.sigma), batch, unlabelled)
        return self.labels_weight * supervised + jnp.where(jnp.any(unlabelled), unsupervised, 0.0)

    def unsupervised(self, shared: FedMatchShared, params: Parts, batch: Batch, unlabelled: jax.Array) -> jax.Array:
        """Returns the loss of the examples without label, ``float32 []``: equations 2 to 4, and 5 without its first term."""
        labels_of = self.pseudo_labels
        logits = labels_of.logits(params.whole(), batch, "weak")
        label, confident = labels_of.predicted(logits)
        votes, divergence = jax.nn.one_hot(label, logits.shape[1]), jnp.zeros(len(label))
        helpers, count = shared.helpers, jnp.maximum(jnp.sum(shared.helpers.there, dtype=jnp.float32), 1)
        for number, there in enumerate(helpers.there):
            theirs = params._replace(psi=jax.tree.map(lambda x, number=number: x[number], helpers.psi))
            predicted = jax.lax.stop_gradient(labels_of.logits(theirs.whole(), batch, "weak"))
            votes += jnp.where(there, jax.nn.one_hot(jnp.argmax(predicted, axis=1), votes.shape[1]), 0.0)
            divergence += jnp.where(there, _divergence(predicted, logits) / count, 0.0)
        losses = metrics.cross_entropy({"y": jnp.argmax(votes, axis=1)}, labels_of.logits(params.whole(), batch, "strong"))
        consistency = metrics.masked_mean(losses + divergence, unlabelled & confident)
        l1 = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(params.psi))
        l2 = tree.squared_norm(tree.subtract(params.sigma, params.psi))
        return self.unlabelled_weight * consistency + self.l2 * l2 + self.l1 * l1

    def server_update(self, state: FedMatchState, update: Parts, info: RoundInfo) -> FedMatchState:
        of_parts = after_step(state._replace(params=state.parts), update, self.server_optimizer)
        before, state = state, of_parts._replace(parts=of_parts.params)
        alone = Helpers(jax.tree.map(lambda x: x[None], state.parts.psi), jnp.zeros(1, bool))
        shared = self.broadcast(state)._replace(round=before.round, helpers=alone)  # this round's optimizer
        training = LocalTraining.of(self, shared)
        parts = after_server_steps(training, state.parts, self.server_examples, state.server_seed, state.round)
        return state._replace(params=parts.whole(), parts=parts)


def _shape(algorithm: FedMatch) -> tuple[int, ...]:
    feature = algorithm.model.features[algorithm.augmented]
    return tuple((feature[0] if isinstance(feature, tuple) else feature).shape)


def _divergence(theirs: jax.Array, ours: jax.Array) -> jax.Array:
    """Returns KL[theirs || ours] of two softmax distributions per example, from logits ``[n, classes]``, in nats."""
    theirs, ours = jax.nn.log_softmax(theirs), jax.nn.log_softmax(ours)
    return jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=1)
