"""What FixMatch and FedMatch share: pseudo-labels of augmented examples."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.algorithms._server_examples import Examples
from fedsim.augmentations import Augmentation
from fedsim.data import Batch, Batches, FederatedData
from fedsim.metrics import divide
from fedsim.model import Model, Params, current_scope, scope_of
from fedsim.rounds import Client

# Why `with_private_examples` is refused.
PRIVATE_REASON = "its loss is no mean over the examples of a batch, and the share of pseudo-labels that is sent has no noise"


@dataclasses.dataclass(frozen=True, eq=False)
class PseudoLabels:
    """Predictions of a model for augmented examples, which are labels if the model is confident. See `FixMatch`."""

    model: Model
    threshold: float
    weak: Augmentation
    strong: Augmentation
    augmented: str

    def check(self, data: FederatedData, server_examples: Examples | None) -> None:
        """Raises ``ValueError`` if nobody has a label, or if the feature to augment is missing."""
        known = data.label_range("y")
        if known is not None and known[1] < 0 and (server_examples is None or not len(server_examples["y"])):
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

    def logits(self, params: Params, batch: Batch, augmentation: Literal["weak", "strong"]) -> jax.Array:
        """Returns the logits ``float32 [n, classes]`` of the augmented examples of a batch."""
        key, augment = rng.stream(batch.key, augmentation), getattr(self, augmentation)
        examples = {**batch.examples, self.augmented: augment(key, batch.examples[self.augmented])}
        return self.model.apply_for_train(params, examples, rng.stream(key, "model"))

    def predicted(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the predicted classes ``int32 [n]``, and whether their probabilities reach the threshold, ``bool [n]``."""
        probabilities = jax.nn.softmax(jax.lax.stop_gradient(logits))
        return jnp.argmax(probabilities, axis=1).astype(jnp.int32), jnp.max(probabilities, axis=1) >= self.threshold

    def confident(self, params: Params, client: Client, batches: Batches) -> jax.Array:
        """Returns the fraction of a client's unlabelled examples whose pseudo-labels reach the threshold, ``float32 []``."""

        def add(total: tree.Total, batch: Batch) -> tree.Total:
            unlabelled = batch.mask & (batch.examples["y"] < 0)
            with scope_of(current_scope().parts, batch.mask):
                reached = unlabelled & self.predicted(self.logits(params, batch, "weak"))[1]
            return total.add(tuple(jnp.sum(each, dtype=jnp.float32) for each in (reached, unlabelled)))

        none = tree.Total.of((jnp.float32(0), jnp.float32(0)))
        return divide(*client.for_each_batch(batches.one_pass(), add, none, "preview").value())


def check_classifier(model: Model, threshold: float, unlabelled_weight: float, server_examples: Examples | None) -> None:
    """Raises ``ValueError`` if a field of FixMatch or FedMatch is out of its range."""
    checks.number(least=0, most=1, threshold=threshold)
    checks.number(least=0, unlabelled_weight=unlabelled_weight)
    if model.num_classes is None:
        raise ValueError("Expected a classifier, got a model with num_classes=None: give its number of classes.")
    if server_examples is not None:
        model.check(FederatedData.from_clients({"server": server_examples}))
