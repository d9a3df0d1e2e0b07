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
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import augmentations, metrics
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._pseudo_labels import PRIVATE_REASON, PseudoLabels, check_classifier
from fedsim.algorithms._server_examples import Examples, SeededState, after_server_steps, server_seed
from fedsim.augmentations import Augmentation
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


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

    Raises:
      ValueError: an attribute is out of its range, or ``server_examples`` are given and parts of the model change besides its
        parameters.

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

    capabilities = Capabilities(minimizes=False, scalable=True, unlabelled=True, model_parts=True)
    not_differentiable = "chooses pseudo-labels by a threshold"
    preview = "the share of confident pseudo-labels"

    threshold: float = 0.95
    unlabelled_weight: float = 1.0
    weak: Augmentation = augmentations.weak
    strong: Augmentation = augmentations.strong
    augmented: str = "x"
    server_examples: Examples | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_classifier(self.model, self.threshold, self.unlabelled_weight, self.server_examples)

    @property
    def pseudo_labels(self) -> PseudoLabels:
        """How examples without a label get one."""
        return PseudoLabels(self.model, self.threshold, self.weak, self.strong, self.augmented)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.server_examples is not None and self.model.has_changing_parts:
            raise ValueError(
                f"{type(self).__name__} with server_examples takes no model with {self.model.parts_in_words}: the server "
                "trains parameters alone; use a model without, or leave server_examples out."
            )
        self.pseudo_labels.check(data, self.server_examples)

    def init(self, key: jax.Array) -> SeededState:
        return SeededState(**super().init(key)._asdict(), server_seed=server_seed(key))

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        labels_of = self.pseudo_labels
        # Running statistics are those of the last call, and so of weakly augmented examples.
        strong = labels_of.logits(params, batch, "strong")
        logits, labelled = labels_of.logits(params, batch, "weak"), batch.examples["y"] >= 0
        supervised = metrics.masked_mean(self.model.losses(batch.examples, logits), batch.mask & labelled)
        labels, confident = labels_of.predicted(logits)
        losses = metrics.cross_entropy({"y": labels}, strong)
        unsupervised = metrics.masked_mean(jnp.where(confident, losses, 0.0), batch.mask & ~labelled)
        return supervised + self.unlabelled_weight * unsupervised

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, PRIVATE_REASON)
        result = super().client_update(shared, client)
        confident = self.pseudo_labels.confident(shared.params, client, self.batches)
        return result._replace(info={**result.info, "confident": confident})

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        before, state = state, super().server_update(state, update, info)
        training = LocalTraining.of(self, self.broadcast(state)._replace(round=before.round))  # this round's optimizer
        params = after_server_steps(training, state.params, self.server_examples, state.server_seed, state.round)
        return state._replace(params=params)
