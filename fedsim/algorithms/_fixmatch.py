"""FixMatch at the clients of a federation.

K. Sohn, D. Berthelot, C.-L. Li, Z. Zhang, N. Carlini, E. D. Cubuk, A. Kurakin, H. Zhang, C. Raffel, "FixMatch: simplifying
semi-supervised learning with consistency and confidence", NeurIPS 2020, equations 3 and 4: https://arxiv.org/abs/2001.07685.
The paper's τ is ``threshold``, λ_u is ``unlabelled_weight``, α is ``weak`` and the strong augmentation is ``strong``. FedMatch
and SemiFL compare with this combination of FixMatch and FedAvg (https://arxiv.org/abs/2006.12097,
https://arxiv.org/abs/2106.01432).

Deviations: a batch is drawn from all examples of a client, so that its numbers of labelled and unlabelled examples (the paper's
B and μB) are random. The default augmentations move images less, do not flip them, which changes characters, and
have rotation, noise and cutout in place of RandAugment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import augmentations, checks, metrics, rng, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg, Local
from fedsim.algorithms._gradient_server import Shared
from fedsim.augmentations import Augmentation
from fedsim.data import Batch, FederatedData
from fedsim.metrics import divide
from fedsim.model import Params
from fedsim.primitives import bounded_loop
from fedsim.rounds import Client, ClientUpdate, RoundInfo, streams


class FixMatchState(NamedTuple):
    """`ServerState`, and the seed of the server's own steps, ``uint32 []``."""

    params: Params
    opt_state: Any
    round: jax.Array
    server_seed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FixMatch(FedAvg):
    """FedAvg for classifiers whose clients also learn from examples without a label, by pseudo-labels.

    The loss of a step is the cross-entropy of the labelled examples of the batch, plus ``unlabelled_weight`` times a term for
    the unlabelled ones: the class that the model predicts for a weakly augmented example is the label of its strongly augmented
    version, if the predicted probability is at least ``threshold``. A hidden label is -1, see
    `fedsim.partitioners.hide_labels`; without hidden labels this is FedAvg with weak augmentation.

    Labels at the server: with ``server_examples`` and clients without any label, the server takes supervised steps on its own
    examples after every round, as many and with the same optimizer as a client with these examples.

    The ``confident`` in a round's info is the fraction of a client's unlabelled examples for which the server's model predicts
    a class with at least the probability ``threshold``.

    Attributes:
      threshold: the least probability of a pseudo-label, in [0, 1].
      unlabelled_weight: the weight of the unlabelled examples, at least 0. With 0, only labelled examples count.
      weak, strong: functions ``(key, images) -> images``, see `fedsim.augmentations`. For other examples than images give your
        own, such as `fedsim.augmentations.noise`.
      augmented: name of the feature that is augmented.
      server_examples: the labelled examples of the server, feature name to array ``[n, ...]``; None if it has none.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits").train
    >>> few = fedsim.partitioners.hide_labels(data, fraction=0.1, seed=0)
    >>> algorithm = FixMatch(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
    ...     threshold=0.0)
    >>> cohort = fedsim.UniformSampler(few, clients=2, seed=0).cohort(0)
    >>> _, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    >>> info.clients["confident"].tolist()
    [1.0, 1.0]
    """

    capabilities = Capabilities(minimizes=False, scalable=True, unlabelled=True)
    not_differentiable = "chooses pseudo-labels by a threshold"

    threshold: float = 0.95
    unlabelled_weight: float = 1.0
    weak: Augmentation = augmentations.weak
    strong: Augmentation = augmentations.strong
    augmented: str = "x"
    server_examples: Mapping[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, most=1, threshold=self.threshold)
        checks.number(least=0, unlabelled_weight=self.unlabelled_weight)
        if self.model.num_classes is None:
            raise ValueError("Expected a classifier, got a model with num_classes=None: give its number of classes.")
        if self.server_examples is not None:
            self.model.check(FederatedData.from_clients({"server": self.server_examples}))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        known = data.label_range("y")
        if known is not None and known[1] < 0 and (self.server_examples is None or not len(self.server_examples["y"])):
            raise ValueError(
                f"Expected labels at the clients or the server, got y=-1, a hidden label, for all {data.num_examples} examples "
                "of the clients, and no server_examples: hide fewer labels, or give server_examples."
            )
        if self.augmented not in data.columns:
            raise ValueError(
                f"There is no feature {self.augmented!r} to augment; the data has {sorted(data.columns)}: set augmented."
            )
        column = data.columns[self.augmented]
        example = jax.ShapeDtypeStruct((1, *column.shape[1:]), jax.dtypes.canonicalize_dtype(column.dtype))
        for augmentation in (self.weak, self.strong):
            jax.eval_shape(augmentation, jax.random.key(0), example)

    def init(self, key: jax.Array) -> Any:
        seed = jax.random.bits(rng.stream(key, "server"), dtype=jnp.uint32)
        return FixMatchState(**super().init(key)._asdict(), server_seed=seed)

    def broadcast(self, state: Any) -> Any:
        return Shared(state.params, state.round)

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        logits, labelled = self.logits(params, batch, "weak"), batch.examples["y"] >= 0
        supervised = metrics.masked_mean(self.model.losses(batch.examples, logits), batch.mask & labelled)
        labels, confident = self.pseudo_labels(logits)
        losses = metrics.cross_entropy({"y": labels}, self.logits(params, batch, "strong"))
        unsupervised = metrics.masked_mean(jnp.where(confident, losses, 0.0), batch.mask & ~labelled)
        return supervised + self.unlabelled_weight * unsupervised

    def logits(self, params: Params, batch: Batch, augmentation: Literal["weak", "strong"]) -> jax.Array:
        """Returns the logits ``float32 [n, classes]`` of the augmented examples of a batch."""
        key, augment = rng.stream(batch.key, augmentation), getattr(self, augmentation)
        examples = {**batch.examples, self.augmented: augment(key, batch.examples[self.augmented])}
        return self.model.apply_for_train(params, examples, rng.stream(key, "model"))

    def pseudo_labels(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the predicted classes ``int32 [n]``, and whether their probabilities reach the threshold, ``bool [n]``."""
        probabilities = jax.nn.softmax(jax.lax.stop_gradient(logits))
        return jnp.argmax(probabilities, axis=1).astype(jnp.int32), jnp.max(probabilities, axis=1) >= self.threshold

    def update_of(self, shared: Any, client: Client, local: Local) -> ClientUpdate:
        result = super().update_of(shared, client, local)
        return result._replace(info={**result.info, "confident": self.confident(shared, client)})

    def confident(self, shared: Any, client: Client) -> jax.Array:
        """Returns the fraction of a client's unlabelled examples whose pseudo-labels reach the threshold, ``float32 []``."""

        def add(total: tree.Total, batch: Batch) -> tree.Total:
            unlabelled = batch.mask & (batch.examples["y"] < 0)
            reached = unlabelled & self.pseudo_labels(self.logits(shared.params, batch, "weak"))[1]
            return total.add(tuple(jnp.sum(each, dtype=jnp.float32) for each in (reached, unlabelled)))

        none = tree.Total.of((jnp.float32(0), jnp.float32(0)))
        return divide(*client.for_each_batch(self.batches.one_pass(), add, none, "preview").value())

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        state = super().server_update(state, update, info)
        return state._replace(params=self.after_server_steps(self.broadcast(state), state.server_seed))

    def after_server_steps(self, shared: Any, seed: jax.Array) -> Params:
        """Returns the parameters after the server's steps on its own examples, which are those of a client."""
        if self.server_examples is None:
            return shared.params
        examples = {name: jnp.asarray(column) for name, column in self.server_examples.items()}
        size = len(examples["y"])
        words, step_key = streams(jax.random.fold_in(jax.random.key(seed), shared.round))

        def step(t: jax.Array, local: Any) -> Any:
            index, mask = self.batches.indices(words, size, t)
            drawn = {name: column[index] for name, column in examples.items()}
            batch = Batch(drawn, mask, jax.random.fold_in(step_key, t), t)
            return self.step(shared, local, batch, self.client_gradient(shared, local.params, batch))

        steps = self.batches.num_steps(size)
        return bounded_loop(steps, step, self.start(shared, shared.params), most_steps=max(1, steps)).params
